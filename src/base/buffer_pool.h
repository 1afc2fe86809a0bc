#pragma once
#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

namespace fsdp::base {

/// Gives out buffers, and keeps those that come back for the next one who asks: a large buffer that is fresh from the
/// kernel costs more to touch than to fill. Keeps those of the CPU of kHugeBuffer bytes and more. While nobody uses
/// them, their pages are the kernel's to take back when memory is short (MADV_FREE; they count as resident until then).
/// What is kept and what is in use are together never more than was once in use at one time. Thread-safe; buffers may
/// outlive it.
class BufferPool {
 public:
  BufferPool();
  /// 1-D, uninitialised, of the dtype and device of `options`.
  at::Tensor take(int64_t numel, const at::TensorOptions& options) const;
  /// Bytes that are kept and not in use.
  int64_t kept_bytes() const;

 private:
  class Blocks;
  std::shared_ptr<Blocks> blocks_;
};

}  // namespace fsdp::base
