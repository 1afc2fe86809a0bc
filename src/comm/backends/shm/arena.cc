#include "comm/backends/shm/arena.h"

#include <algorithm>
#include <iterator>
#include <new>

namespace fsdp::comm::shm {

void Arena::add_free(uint64_t offset, uint64_t bytes) {
  free_.emplace(offset, bytes);
  fit_.emplace(bytes, offset);
}

void Arena::remove_free(std::map<uint64_t, uint64_t>::iterator block) {
  auto [at, last] = fit_.equal_range(block->second);
  while (at != last && at->second != block->first) ++at;
  fit_.erase(at);
  free_.erase(block);
}

uint64_t Arena::allocate(uint64_t bytes) {
  bytes = std::max<uint64_t>(1, (bytes + kAlignment - 1) / kAlignment) * kAlignment;
  std::lock_guard lock(mutex_);
  uint64_t offset = top_;
  const auto found = fit_.lower_bound(bytes);
  if (found != fit_.end()) {
    offset = found->second;
    const uint64_t rest = found->first - bytes;
    remove_free(free_.find(offset));
    if (rest > 0) add_free(offset + bytes, rest);
  } else {
    if (bytes > end_ - top_) throw std::bad_alloc();
    top_ += bytes;
  }
  used_.emplace(offset, bytes);
  in_use_ += bytes;
  return offset;
}

void Arena::free(uint64_t offset) {
  std::lock_guard lock(mutex_);
  const auto block = used_.find(offset);
  uint64_t bytes = block->second;
  in_use_ -= bytes;
  used_.erase(block);
  const auto next = free_.find(offset + bytes);
  if (next != free_.end()) {
    bytes += next->second;
    remove_free(next);
  }
  auto before = free_.lower_bound(offset);
  if (before != free_.begin() && (--before)->first + before->second == offset) {
    offset = before->first;
    bytes += before->second;
    remove_free(before);
  }
  if (offset + bytes == top_) {
    top_ = offset;
  } else {
    add_free(offset, bytes);
  }
}

uint64_t Arena::bytes_in_use() const {
  std::lock_guard lock(mutex_);
  return in_use_;
}

}  // namespace fsdp::comm::shm
