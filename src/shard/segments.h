#pragma once
#include <cstdint>
#include <utility>
#include <vector>

/// Pure arithmetic of sharding: no tensors, no communication.
namespace fsdp::shard {

/// How a flat buffer of `total()` units (elements or bytes) is cut into one contiguous segment a rank, without
/// padding. Segments may differ in length; those of the last ranks are empty in a world far larger than the data, and
/// cost nothing.
class Segments {
 public:
  /// Equal segments.
  Segments(int64_t world, int64_t length) : world_(world), longest_(length), total_(world * length), even_(true) {}
  /// `lengths` of the first ranks; every rank after them has an empty segment.
  Segments(int64_t world, const std::vector<int64_t>& lengths) : world_(world), longest_(0), total_(0), even_(true) {
    offsets_.push_back(0);
    for (int64_t length : lengths) {
      total_ += length;
      offsets_.push_back(total_);
      if (length > longest_) longest_ = length;
    }
    even_ = total_ == longest_ * world_;
  }

  int64_t world() const { return world_; }
  int64_t total() const { return total_; }
  /// The longest segment's length.
  int64_t longest() const { return longest_; }
  /// True if all segments are equally long: the flat buffer is then what all_gather_base wants.
  bool even() const { return even_; }
  /// Ranks from this one on have empty segments.
  int64_t active() const { return even_ ? world_ : static_cast<int64_t>(offsets_.size()) - 1; }
  int64_t begin(int64_t rank) const {
    if (even_) return rank * longest_;
    return rank < active() ? offsets_[rank] : total_;
  }
  int64_t length(int64_t rank) const {
    if (even_) return longest_;
    return rank < active() ? offsets_[rank + 1] - offsets_[rank] : 0;
  }

 private:
  int64_t world_, longest_, total_;
  bool even_;
  std::vector<int64_t> offsets_;  // active() + 1 entries where uneven
};

}  // namespace fsdp::shard
