#include "base/buffer_pool.h"

#include <algorithm>
#include <new>
#include <utility>

#include <sys/mman.h>
#include <unistd.h>
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include "base/huge_pages.h"

namespace fsdp::base {
namespace {

struct Block {
  char* data;
  int64_t bytes;
};

Block map(int64_t bytes) {
  // One huge page more, so that the block can begin at one.
  constexpr int64_t kHuge = 2 << 20;
  static const auto page = static_cast<int64_t>(::sysconf(_SC_PAGESIZE));
  bytes = (bytes + page - 1) / page * page;
  void* at = ::mmap(nullptr, static_cast<size_t>(bytes + kHuge), PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) throw std::bad_alloc();
  auto* mapped = static_cast<char*>(at);
  const auto head = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(at) % kHuge);
  if (head > 0) ::munmap(mapped, static_cast<size_t>(head));
  ::munmap(mapped + head + bytes, static_cast<size_t>(kHuge - head));
  want_huge_pages(mapped + head, bytes);
  return {mapped + head, bytes};
}

// What nobody uses is not to be touched, which AddressSanitizer then finds.
void poison([[maybe_unused]] const Block& block) {
#ifdef __SANITIZE_ADDRESS__
  __asan_poison_memory_region(block.data, static_cast<size_t>(block.bytes));
#endif
}
void unpoison([[maybe_unused]] const Block& block) {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(block.data, static_cast<size_t>(block.bytes));
#endif
}

void unmap(const Block& block) {
  unpoison(block);
  ::munmap(block.data, static_cast<size_t>(block.bytes));
}

}  // namespace

class BufferPool::Blocks {
 public:
  ~Blocks() {
    for (const auto& block : kept_) unmap(block);
  }

  Block take(int64_t bytes) {
    std::lock_guard lock(mutex_);
    auto best = kept_.end();
    for (auto it = kept_.begin(); it != kept_.end(); ++it) {
      if (it->bytes >= bytes && it->bytes <= 2 * bytes && (best == kept_.end() || it->bytes < best->bytes)) best = it;
    }
    Block block{};
    if (best != kept_.end()) {
      block = *best;
      unpoison(block);
      kept_.erase(best);
      kept_bytes_ -= block.bytes;
    } else {
      block = map(bytes);
    }
    in_use_ += block.bytes;
    most_ = std::max(most_, in_use_);
    shrink();
    return block;
  }

  void give_back(const Block& block) {
    ::madvise(block.data, static_cast<size_t>(block.bytes), MADV_FREE);
    poison(block);
    std::lock_guard lock(mutex_);
    in_use_ -= block.bytes;
    kept_.push_back(block);
    kept_bytes_ += block.bytes;
  }

  int64_t kept_bytes() const {
    std::lock_guard lock(mutex_);
    return kept_bytes_;
  }

 private:
  /// The longest unused go first.
  void shrink() {
    while (in_use_ + kept_bytes_ > most_) {
      kept_bytes_ -= kept_.front().bytes;
      unmap(kept_.front());
      kept_.pop_front();
    }
  }

  mutable std::mutex mutex_;
  std::deque<Block> kept_;  // in the order in which they came back
  int64_t kept_bytes_ = 0, in_use_ = 0, most_ = 0;
};

BufferPool::BufferPool() : blocks_(std::make_shared<Blocks>()) {}

at::Tensor BufferPool::take(int64_t numel, const at::TensorOptions& options) const {
  const int64_t bytes = numel * static_cast<int64_t>(options.dtype().itemsize());
  if (!options.device().is_cpu() || bytes < kHugeBuffer) return at::empty({numel}, options);
  const auto block = blocks_->take(bytes);
  return at::from_blob(
      block.data, {numel}, [blocks = blocks_, block](void*) { blocks->give_back(block); },
      at::TensorOptions().dtype(options.dtype()));
}

int64_t BufferPool::kept_bytes() const { return blocks_->kept_bytes(); }

}  // namespace fsdp::base
