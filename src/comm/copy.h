#pragma once
#include <cstdint>

#include <ATen/core/Tensor.h>

namespace fsdp::comm {

/// dst[dst_begin ...] = src[src_begin ...], `length` elements of two contiguous tensors of one dtype. Plain bytes on
/// the CPU: no dispatch, no version counter. Nothing happens if both are the same memory.
void copy_elements(const at::Tensor& dst, int64_t dst_begin, const at::Tensor& src, int64_t src_begin, int64_t length);

}  // namespace fsdp::comm
