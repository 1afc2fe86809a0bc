#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <fsdp/device_mesh.h>
#include <fsdp/dtensor.h>

#include "shard/layout.h"

/// The sharded tensor: what rooms above the engine may ask of one.
namespace fsdp::tensor {

/// Rows [begin, end) of the tensor's dim 0 that a rank holds. A 0-dim tensor counts as one row.
using RowRange = shard::RowRange;

bool is_sharded(const at::Tensor& tensor);
/// This rank's rows of a sharded tensor, sharing memory.
at::Tensor local_of(const at::Tensor& sharded);
/// The rows that this rank holds.
RowRange rows_of(const at::Tensor& sharded);
/// A new sharded tensor that lies as `like` does (global sizes, mesh, name), holding `local` (of local_of(like)'s
/// sizes, any dtype). For optimizer state.
at::Tensor sharded_like(const at::Tensor& like, at::Tensor local);

}  // namespace fsdp::tensor
