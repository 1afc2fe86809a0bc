#pragma once
#include <cstring>

#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>

namespace fsdp::base {

/// Copies bytes within a device, on the current stream. A plain memcpy on the CPU.
inline void copy_bytes(void* to, const void* from, int64_t nbytes, c10::Device device) {
  if (nbytes == 0) return;
  if (device.is_cpu()) {
    std::memcpy(to, from, static_cast<size_t>(nbytes));
    return;
  }
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  at::from_blob(to, {nbytes}, options).copy_(at::from_blob(const_cast<void*>(from), {nbytes}, options), true);
}

}  // namespace fsdp::base
