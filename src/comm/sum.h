#pragma once
#include <vector>

#include <c10/core/ScalarType.h>

#include "comm/channel.h"

namespace fsdp::comm {

/// out[i] = parts[0][i] op parts[1][i] op ..., for `count` elements of `dtype`, in that order, so that every rank
/// computes the same bits. fp16 and bf16 are reduced in fp32 and rounded once. `out` may be one of the parts.
/// Tensors of the CPU. NotSupported for dtypes without a sum here (bool, quantized, 8-bit floats), and for the maximum
/// or minimum of complex ones.
void reduce_parts(void* out, const std::vector<const void*>& parts, int64_t count, at::ScalarType dtype, ReduceOp op);

}  // namespace fsdp::comm
