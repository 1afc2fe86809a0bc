#pragma once
#include <cstdint>
#include <map>
#include <mutex>

namespace fsdp::comm::shm {

/// Gives out blocks of a segment, the best fit first. Thread-safe. Knows offsets only, no memory.
class Arena {
 public:
  static constexpr uint64_t kAlignment = 64;
  Arena(uint64_t begin, uint64_t end) : end_(end), top_(begin) {}

  /// Of `bytes`, 64-byte aligned. Throws std::bad_alloc if the segment is full.
  uint64_t allocate(uint64_t bytes);
  void free(uint64_t offset);
  uint64_t bytes_in_use() const;

 private:
  void add_free(uint64_t offset, uint64_t bytes);
  void remove_free(std::map<uint64_t, uint64_t>::iterator block);

  mutable std::mutex mutex_;
  uint64_t end_, top_;                     // blocks lie below top_
  std::map<uint64_t, uint64_t> used_;      // offset: bytes
  std::map<uint64_t, uint64_t> free_;      // offset: bytes; neighbours are merged
  std::multimap<uint64_t, uint64_t> fit_;  // bytes: offset, the same blocks
  uint64_t in_use_ = 0;
};

}  // namespace fsdp::comm::shm
