#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "shard/segments.h"

namespace fsdp::shard {

/// Rows [begin, end) of dim 0.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

/// Rows a rank gets when `rows` are cut into chunks of ceil(rows / world), in order: the last chunks may be short or
/// empty. (torch.chunk's rule, which PyTorch's FSDP shards by; checkpoints depend on it.)
RowRange rows_of_rank(int64_t rows, int64_t world, int64_t rank);

/// The place of several row-sharded arrays in one flat buffer, rank-major: first everything of rank 0 (array 0's
/// rows, array 1's rows, ...), then everything of rank 1. Nothing is padded.
class FlatLayout {
 public:
  struct Array {
    int64_t rows;
    int64_t row_units;  // elements or bytes in a row
  };
  FlatLayout(std::vector<Array> arrays, int64_t world);

  const Segments& segments() const { return segments_; }
  int64_t world() const { return segments_.world(); }
  /// Where array `i` begins within rank `rank`'s own segment, and its length there, in units.
  int64_t local_offset(size_t i, int64_t rank) const;
  int64_t local_length(size_t i, int64_t rank) const;

  /// Calls fn(flat offset, offset within the array, length), in units, for each non-empty piece of array `i`.
  template <class Fn>
  void for_each_piece(size_t i, Fn&& fn) const {
    const Array& array = arrays_[i];
    if (array.rows == 0 || array.row_units == 0) return;
    const int64_t chunk = chunk_rows_[i];
    const int64_t units = array.rows * array.row_units;
    const int64_t step = chunk * array.row_units;
    int64_t rank = 0;
    for (int64_t begin = 0; begin < units; begin += step, ++rank) {
      const int64_t length = std::min(step, units - begin);
      const int64_t inner = segments_.even() ? full_offset_[i] : local_offset(i, rank);
      fn(segments_.begin(rank) + inner, begin, length);
    }
  }

 private:
  std::vector<Array> arrays_;
  std::vector<int64_t> chunk_rows_;   // rows of a full chunk
  std::vector<int64_t> full_offset_;  // offset in a segment in which every earlier array has a full chunk
  Segments segments_;
  std::vector<int64_t> ragged_offsets_;  // [rank][array], only where segments differ
};

}  // namespace fsdp::shard
