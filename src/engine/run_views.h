#pragma once
#include <ATen/core/Tensor.h>

#include "shard/layout.h"

namespace fsdp::engine {

/// The pieces of `run` as the rows of a matrix, in the rank-major buffer `flat` ...
inline at::Tensor run_in_flat(const at::Tensor& flat, const shard::FlatLayout::Run& run) {
  return flat.as_strided({run.count, run.length}, {run.flat_stride, 1}, flat.storage_offset() + run.flat);
}
/// ... and in the array's own elements, which are 1-D.
inline at::Tensor run_in_array(const at::Tensor& array, const shard::FlatLayout::Run& run) {
  return array.narrow(0, run.at, run.count * run.length).view({run.count, run.length});
}

}  // namespace fsdp::engine
