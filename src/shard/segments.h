#pragma once
#include <cstdint>
#include <vector>

/// Pure arithmetic of sharding: no tensors, no ranks' communication.
namespace fsdp::shard {

/// How a flat buffer of `total()` elements is cut into one contiguous segment a rank, without padding: rank r owns
/// [offsets[r], offsets[r + 1]). Segments may differ in length and may be empty; the first is never the shorter.
struct Segments {
  std::vector<int64_t> offsets;  // world + 1 entries, offsets[0] == 0

  int64_t world() const { return static_cast<int64_t>(offsets.size()) - 1; }
  int64_t total() const { return offsets.back(); }
  int64_t begin(int64_t rank) const { return offsets[rank]; }
  int64_t length(int64_t rank) const { return offsets[rank + 1] - offsets[rank]; }
  /// True if all segments are equally long, so that the flat buffer is what all_gather_base wants.
  bool even = true;
  /// The longest segment's length.
  int64_t longest = 0;
};

}  // namespace fsdp::shard
