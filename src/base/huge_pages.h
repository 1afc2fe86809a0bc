#pragma once
#include <cstdint>

#include <sys/mman.h>
#include <unistd.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace fsdp::base {

/// Below this a buffer is left to the kernel's small pages, in bytes: two huge pages of x86.
constexpr int64_t kHugeBuffer = 4 << 20;

/// Asks for huge pages behind memory of the CPU that is about to be written. A buffer that comes fresh from the kernel
/// costs a fault a page: 64 MB in pages of 4 KB took 24 ms to touch where copying them took 11, in huge pages 6 - 8.
/// A hint: the kernel heeds it where /sys/kernel/mm/transparent_hugepage/enabled says `madvise` or `always`, and a
/// process that wants none says so itself (PR_SET_THP_DISABLE). Costs a system call; takes no memory outside of the
/// buffer.
inline void want_huge_pages(const void* memory, int64_t nbytes) {
  if (nbytes < kHugeBuffer) return;
  static const auto page = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto at = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t begin = (at + page - 1) / page * page, end = (at + static_cast<uintptr_t>(nbytes)) / page * page;
  ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

/// at::empty, for what is written as a whole right after: see want_huge_pages().
inline at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  auto tensor = at::empty(sizes, options);
  if (tensor.is_cpu()) want_huge_pages(tensor.const_data_ptr(), static_cast<int64_t>(tensor.nbytes()));
  return tensor;
}

}  // namespace fsdp::base
