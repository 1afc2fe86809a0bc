#include "shard/layout.h"

namespace fsdp::shard {
namespace {

int64_t chunk_of(int64_t rows, int64_t world) { return rows == 0 ? 0 : (rows + world - 1) / world; }

Segments make_segments(const std::vector<FlatLayout::Array>& arrays, int64_t world) {
  int64_t active = 0;
  for (const auto& array : arrays) {
    const int64_t chunk = chunk_of(array.rows, world);
    if (chunk > 0) active = std::max(active, (array.rows + chunk - 1) / chunk);
  }
  std::vector<int64_t> lengths(active, 0);
  bool even = active == world;
  for (const auto& array : arrays) {
    const int64_t chunk = chunk_of(array.rows, world);
    even = even && chunk * world == array.rows;
    for (int64_t rank = 0; chunk > 0 && rank * chunk < array.rows; ++rank) {
      lengths[rank] += std::min(chunk, array.rows - rank * chunk) * array.row_units * array.slabs;
    }
  }
  return even ? Segments(world, lengths.empty() ? 0 : lengths[0]) : Segments(world, lengths);
}

}  // namespace

RowRange rows_of_rank(int64_t rows, int64_t world, int64_t rank) {
  const int64_t chunk = chunk_of(rows, world);
  return {std::min(rows, chunk * rank), std::min(rows, chunk * (rank + 1))};
}

FlatLayout::FlatLayout(std::vector<Array> arrays, int64_t world)
    : arrays_(std::move(arrays)), segments_(make_segments(arrays_, world)) {
  int64_t offset = 0;
  for (const auto& array : arrays_) {
    chunk_rows_.push_back(chunk_of(array.rows, world));
    full_offset_.push_back(offset);
    offset += chunk_rows_.back() * array.row_units * array.slabs;
  }
  if (segments_.even()) return;
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
  if (segments_.even()) return full_offset_[i];
  return rank < segments_.active() ? ragged_offsets_[rank * arrays_.size() + i] : 0;
}

FlatLayout::Part FlatLayout::part(size_t i, int64_t rank) const {
  const auto& array = arrays_[i];
  const auto rows = rows_of_rank(array.rows, world(), rank);
  return {rows.begin * array.row_units, array.slab_units(), rows.size() * array.row_units, array.slabs};
}

int64_t FlatLayout::local_length(size_t i, int64_t rank) const {
  const auto& array = arrays_[i];
  return rows_of_rank(array.rows, world(), rank).size() * array.row_units * array.slabs;
}

}  // namespace fsdp::shard
