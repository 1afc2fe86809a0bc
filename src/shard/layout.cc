#include "shard/layout.h"

namespace fsdp::shard {
namespace {

int64_t chunk_of(int64_t rows, int64_t world) { return rows == 0 ? 0 : (rows + world - 1) / world; }

// Rows of a full chunk of the line that `array` is cut by.
int64_t chunk_of(const FlatLayout::Array& array, int64_t world) {
  return chunk_of(array.line > 0 ? array.line : array.rows, world);
}

bool uniform(const std::vector<FlatLayout::Array>& arrays, int64_t world) {
  return std::all_of(arrays.begin(), arrays.end(),
                     [&](const FlatLayout::Array& array) { return array.rows == chunk_of(array, world) * world; });
}

Segments make_segments(const std::vector<FlatLayout::Array>& arrays, int64_t world) {
  int64_t active = 0;
  for (const auto& array : arrays) {
    if (array.rows > 0) active = std::max(active, chunk_of(array.lead + array.rows, chunk_of(array, world)));
  }
  std::vector<int64_t> lengths(active, 0);
  for (const auto& array : arrays) {
    if (array.rows == 0) continue;
    int64_t rows = 0;
    for (int64_t rank = array.lead / chunk_of(array, world); rows < array.rows; ++rank) {
      const int64_t here = array.rows_of(world, rank).size();
      lengths[rank] += here * array.row_units * array.slabs;
      rows += here;
    }
  }
  return {world, lengths};
}

}  // namespace

RowRange FlatLayout::Array::rows_of(int64_t world, int64_t rank) const {
  const int64_t chunk = chunk_of(*this, world);
  return {std::clamp<int64_t>(chunk * rank - lead, 0, rows), std::clamp<int64_t>(chunk * (rank + 1) - lead, 0, rows)};
}

RowRange rows_of_rank(int64_t rows, int64_t world, int64_t rank) {
  return FlatLayout::Array{rows, 1}.rows_of(world, rank);
}

FlatLayout::FlatLayout(std::vector<Array> arrays, int64_t world)
    : arrays_(std::move(arrays)), segments_(make_segments(arrays_, world)), uniform_(uniform(arrays_, world)) {
  int64_t offset = 0;
  for (const auto& array : arrays_) {
    chunk_rows_.push_back(chunk_of(array, world));
    full_offset_.push_back(offset);
    offset += chunk_rows_.back() * array.row_units * array.slabs;
  }
  if (uniform_) return;
  const int64_t active = segments_.active();
  ragged_offsets_.resize(active * arrays_.size());
  for (int64_t rank = 0; rank < active; ++rank) {
    int64_t at = 0;
    for (size_t i = 0; i < arrays_.size(); ++i) {
      ragged_offsets_[rank * arrays_.size() + i] = at;
      at += local_length(i, rank);
    }
  }
}

int64_t FlatLayout::local_offset(size_t i, int64_t rank) const {
  if (uniform_) return full_offset_[i];
  return rank < segments_.active() ? ragged_offsets_[rank * arrays_.size() + i] : 0;
}

FlatLayout::Part FlatLayout::part(size_t i, int64_t rank) const {
  const auto& array = arrays_[i];
  const auto rows = array.rows_of(world(), rank);
  return {rows.begin * array.row_units, array.slab_units(), rows.size() * array.row_units, array.slabs};
}

int64_t FlatLayout::local_length(size_t i, int64_t rank) const {
  const auto& array = arrays_[i];
  return array.rows_of(world(), rank).size() * array.row_units * array.slabs;
}

}  // namespace fsdp::shard
