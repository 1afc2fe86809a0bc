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

/// Rows [begin, end) of the dim that is cut, of which a rank holds these. A 0-dim tensor counts as one row.
using RowRange = shard::RowRange;

bool is_sharded(const at::Tensor& tensor);
/// This rank's part of a sharded tensor, sharing memory.
at::Tensor local_of(const at::Tensor& sharded);
/// The dim that is cut; kElements: none, a rank holds a stretch of the flattened tensor's elements.
constexpr int64_t kElements = -1;
int64_t dim_of(const at::Tensor& sharded);
/// The rows of that dim, or the elements, that this rank holds.
RowRange range_of(const at::Tensor& sharded);
/// The rows that this rank would hold if the tensor were cut along `dim`.
RowRange rows_along(const at::Tensor& sharded, int64_t dim);
/// A new sharded tensor that lies as `like` does (global sizes, mesh, name), holding `local` (of local_of(like)'s
/// sizes, any dtype). For optimizer state.
at::Tensor sharded_like(const at::Tensor& like, at::Tensor local);

}  // namespace fsdp::tensor
