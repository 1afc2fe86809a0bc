#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>

namespace fsdp::comm::shm {

/// Where the bytes are that a rank contributes.
enum class Source : uint32_t {
  kSegment,  // in its segment; they stay there until every peer has read them
  kTensor,   // in a tensor, whose owner moves them to the segment when it wants to write there
  kGone,     // nowhere: the segment had no room for them
};

/// What a rank says about its part in one collective.
///
/// Note: read before moved. A peer that reads a tensor looks at `source` again afterwards: what it read counts if that
/// still says kTensor, since the owner changes it before it lets anybody write there. So no owner waits for a reader.
struct Post {
  uint64_t layout = 0;  // stands for how it is cut, and for whatever else must be equal on all ranks
  uint64_t count = 0;   // elements of the whole, for messages
  int32_t operation = 0;
  int32_t dtype = 0;
  uint64_t offset = 0;   // of the contribution, in the rank's segment
  uint64_t address = 0;  // of the tensor, in the rank's process
  std::atomic<Source> source{Source::kSegment};

  void lies_in_segment(uint64_t at) {
    offset = at;
    source.store(Source::kSegment, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  void lies_in_tensor(const void* at) {
    address = reinterpret_cast<uintptr_t>(at);
    source.store(Source::kTensor, std::memory_order_release);
  }
  void is_gone() {
    source.store(Source::kGone, std::memory_order_release);
    std::atomic_thread_fence(std::memory_order_seq_cst);
  }
  /// A peer: whether what it has read since `source` said kTensor is what was contributed.
  bool was_there() const {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    return source.load(std::memory_order_acquire) == Source::kTensor;
  }
};

/// The head of a rank's segment. Its owner writes posts; peers read them and sleep on them.
///
/// Note: posted before read. A post's line and its bytes are written before `posted` is raised (release); a peer reads
/// them after it saw `posted` (acquire). A line is overwritten, and a contribution reused, only after every peer has
/// raised its own `done` above it.
struct Board {
  static constexpr uint32_t kLines = 512;
  static constexpr uint64_t kMagic = 0x6c69626673647032;  // "libfsdp2"

  uint64_t magic = kMagic;
  uint64_t nonce = 0;  // tells this segment from any other
  alignas(64) std::atomic<uint32_t> posted{0};
  std::atomic<uint32_t> sleepers{0};
  std::atomic<uint32_t> left{0};
  alignas(64) std::atomic<uint32_t> done{0};
  alignas(64) Post lines[kLines];

  Post& line(uint32_t number) { return lines[number % kLines]; }
  const Post& line(uint32_t number) const { return lines[number % kLines]; }
  /// Counts wrap around; no two that are compared are ever 2^31 apart.
  bool has_posted(uint32_t number) const { return past(posted.load(std::memory_order_acquire), number); }
  bool has_done(uint32_t number) const { return past(done.load(std::memory_order_acquire), number); }

  /// The owner: line(number) and its bytes are there.
  void post(uint32_t number);
  /// The owner: posts nothing any more.
  void leave();
  /// A peer: sleeps until something is posted or the owner leaves, for `limit` at most; may wake early.
  void sleep(uint32_t number, std::chrono::nanoseconds limit);

 private:
  static bool past(uint32_t count, uint32_t number) { return static_cast<int32_t>(count - number) > 0; }
};

}  // namespace fsdp::comm::shm
