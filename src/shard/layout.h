#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "shard/segments.h"

namespace fsdp::shard {

/// Rows [begin, end) of the sharded dim.
struct RowRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

/// Rows a rank gets when `rows` are cut into chunks of ceil(rows / world), in order: the last chunks may be short or
/// empty. (torch.chunk's rule, which PyTorch's FSDP shards by; checkpoints depend on it.)
RowRange rows_of_rank(int64_t rows, int64_t world, int64_t rank);

/// The place of several sharded arrays in one flat buffer, rank-major: first everything of rank 0 (its part of array
/// 0, of array 1, ...), then everything of rank 1. Nothing is padded.
///
/// Each array is cut by its own rows, or all are one after another and the whole is cut (Array::line).
class FlatLayout {
 public:
  /// `slabs` slabs one after the other, of `rows` rows each; a rank holds its rows of every slab. One slab where a
  /// tensor is cut along dim 0; cut along dim n, its slabs are the indices of the dims before n.
  struct Array {
    int64_t rows;
    int64_t row_units;  // elements or bytes in a row
    int64_t slabs = 1;
    /// Not 0: the rows are a stretch of a line of so many rows, `lead` from its begin, and what a rank holds is what
    /// its rows of the line have of them.
    int64_t line = 0;
    int64_t lead = 0;
    int64_t slab_units() const { return rows * row_units; }
    int64_t units() const { return slabs * slab_units(); }
    RowRange rows_of(int64_t world, int64_t rank) const;
  };
  FlatLayout(std::vector<Array> arrays, int64_t world);

  const Segments& segments() const { return segments_; }
  int64_t world() const { return segments_.world(); }
  /// Where array `i` begins within rank `rank`'s own segment, and its length there, in units.
  int64_t local_offset(size_t i, int64_t rank) const;
  int64_t local_length(size_t i, int64_t rank) const;
  /// The part of rank `rank` of array `i`, in units: `count` pieces of `length`, one a slab. They follow one another in
  /// the rank's segment and are `stride` apart in the array, where the first is at `at`.
  struct Part {
    int64_t at, stride, length, count;
  };
  Part part(size_t i, int64_t rank) const;

  /// Pieces of one array, equally long: one of each of `count` consecutive ranks, and that for each slab. The one of
  /// rank p and slab s lies at flat + p * flat_stride + s * length in the buffer and at at + p * length + s *
  /// slab_stride within the array.
  struct Run {
    int64_t flat, flat_stride;
    int64_t at, slab_stride;
    int64_t length, count, slabs;
  };
  /// Calls fn(run), in units, so that the runs together are array `i`. One run where segments are even.
  template <class Fn>
  void for_each_run(size_t i, Fn&& fn) const {
    const Array& array = arrays_[i];
    if (array.units() == 0) return;
    const int64_t units = array.slab_units();
    if (uniform_) {
      fn(Run{full_offset_[i], segments_.longest(), 0, units, chunk_rows_[i] * array.row_units, world(), array.slabs});
      return;
    }
    Run run{0, 0, 0, units, 0, 0, array.slabs};
    int64_t rank = array.lead / chunk_rows_[i];  // the first that holds a row
    for (int64_t at = 0; at < units; at += run.length, ++rank) {
      const int64_t flat = segments_.begin(rank) + local_offset(i, rank);
      const int64_t length = array.rows_of(world(), rank).size() * array.row_units;
      const int64_t stride = flat - (run.flat + (run.count - 1) * run.flat_stride);
      if (run.count == 0 || length != run.length || (run.count > 1 && stride != run.flat_stride)) {
        if (run.count > 0) fn(run);
        run = {flat, 0, at, units, length, 1, array.slabs};
      } else {
        run.flat_stride = stride;
        ++run.count;
      }
    }
    fn(run);
  }

 private:
  std::vector<Array> arrays_;
  std::vector<int64_t> chunk_rows_;   // rows of a full chunk
  std::vector<int64_t> full_offset_;  // offset in a segment in which every earlier array has a full chunk
  Segments segments_;
  bool uniform_;                         // every rank holds equally much of every array
  std::vector<int64_t> ragged_offsets_;  // [rank][array], only where not uniform
};

}  // namespace fsdp::shard
