#pragma once
#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

namespace fsdp::comm {

/// Where a channel's collectives send from and receive into when that is not a tensor of the caller's. Large buffers of
/// the CPU (base::kHugeBuffer) are kept for the next collective, since a fresh one costs more to touch than to fill.
/// While nobody uses them, their pages are the kernel's to take back when memory is short (MADV_FREE). What is kept and
/// what is in use are together never more than was once in use at one time. Thread-safe; tensors may outlive it.
class Staging {
 public:
  Staging();
  /// 1-D, uninitialised, of the dtype and device of `options`.
  at::Tensor take(int64_t numel, const at::TensorOptions& options) const;
  /// Bytes that are kept and not in use.
  int64_t kept_bytes() const;

 private:
  class Blocks;
  std::shared_ptr<Blocks> blocks_;
};

}  // namespace fsdp::comm
