#pragma once
#include <cstdint>

namespace fsdp::comm {

/// A piece of memory that other processes of this user can map. It has no name: it is gone with its last mapping. Pages
/// take memory when they are first written.
class Segment {
 public:
  Segment() = default;
  /// Maps a new one for reading and writing; throws std::system_error.
  static Segment create(uint64_t bytes);
  /// Maps another rank's: the first `writable` bytes for writing too. `pid` and `fd` as its owner told them.
  static Segment open(int pid, int fd, uint64_t bytes, uint64_t writable);
  /// Maps one so that what this process writes there stays its own: a page is copied when it is first written, and no
  /// longer shows what others write to it, until drop_own_writes(). Of a process of this rank too.
  static Segment look_at(int pid, int fd, uint64_t bytes);
  ~Segment();
  Segment(Segment&& other) noexcept;
  Segment& operator=(Segment&& other) noexcept;

  char* data() const { return data_; }
  uint64_t bytes() const { return bytes_; }
  /// Valid while the owner's Segment lives; -1 for one that was opened.
  int fd() const { return fd_; }
  /// The owner gives up fd(): nobody can map the memory any more.
  void seal();
  /// Of one that look_at() gave: shows what the others see again. Costs 8 bytes of reading a page.
  void drop_own_writes();

 private:
  char* data_ = nullptr;
  uint64_t bytes_ = 0;
  int fd_ = -1;
};

/// The most that a segment can be of use for on this host: its physical memory, in bytes.
uint64_t physical_memory();

}  // namespace fsdp::comm
