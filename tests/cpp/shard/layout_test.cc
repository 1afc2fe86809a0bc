#include "shard/layout.h"

#include <random>

#include <gtest/gtest.h>

namespace fsdp::shard {
namespace {

/// torch.chunk's rule, written down once more: chunks of ceil(rows / world), one after the other.
std::vector<RowRange> brute_force_rows(int64_t rows, int64_t world) {
  std::vector<RowRange> ranges(static_cast<size_t>(world));
  const int64_t chunk = (rows + world - 1) / world;
  int64_t row = 0;
  for (auto& range : ranges) {
    range.begin = row;
    for (int64_t taken = 0; taken < chunk && row < rows; ++taken) ++row;
    range.end = row;
  }
  return ranges;
}

TEST(RowsOfRank, FollowsBruteForce) {
  for (int64_t world : {1, 2, 3, 4, 5, 6, 7, 8, 9}) {
    for (int64_t rows = 0; rows <= 40; ++rows) {
      const auto expected = brute_force_rows(rows, world);
      for (int64_t rank = 0; rank < world; ++rank) {
        const auto got = rows_of_rank(rows, world, rank);
        EXPECT_EQ(got.begin, expected[rank].begin) << rows << " rows, rank " << rank << " of " << world;
        EXPECT_EQ(got.end, expected[rank].end) << rows << " rows, rank " << rank << " of " << world;
      }
    }
  }
}

TEST(RowsOfRank, KnownValues) {
  EXPECT_EQ(rows_of_rank(17, 5, 4).size(), 1);
  EXPECT_EQ(rows_of_rank(17, 3, 2).size(), 5);
  EXPECT_EQ(rows_of_rank(5, 4, 2).size(), 1);
  EXPECT_EQ(rows_of_rank(5, 4, 3).size(), 0);  // chunks of 2: 2, 2, 1, none
  EXPECT_EQ(rows_of_rank(0, 4, 0).size(), 0);
  EXPECT_EQ(rows_of_rank(3, 16384, 2).size(), 1);
  EXPECT_EQ(rows_of_rank(3, 16384, 16383).size(), 0);
  EXPECT_EQ(rows_of_rank(3, 16384, 16383).begin, 3);
}

/// The rows of `array` that each rank holds: those of its rows of the line that are the array's, taken one by one.
std::vector<RowRange> brute_force_rows(const FlatLayout::Array& array, int64_t world) {
  if (array.line == 0) return brute_force_rows(array.rows, world);
  std::vector<RowRange> ranges;
  int64_t taken = 0;
  for (const auto& of_line : brute_force_rows(array.line, world)) {
    ranges.push_back({taken, taken});
    for (int64_t row = of_line.begin; row < of_line.end; ++row) {
      if (row >= array.lead && row < array.lead + array.rows) ranges.back().end = ++taken;
    }
  }
  return ranges;
}

/// Arrays of so many rows each, one after another.
std::vector<FlatLayout::Array> in_line(const std::vector<int64_t>& rows, int64_t row_units = 1) {
  std::vector<FlatLayout::Array> arrays;
  int64_t line = 0;
  for (const int64_t each : rows) line += each;
  int64_t lead = 0;
  for (const int64_t each : rows) {
    arrays.push_back({each, row_units, 1, line, lead});
    lead += each;
  }
  return arrays;
}

/// Every element of every array with the place that a flat, rank-major buffer without padding gives it.
void expect_layout(const std::vector<FlatLayout::Array>& arrays, int64_t world) {
  const FlatLayout layout(arrays, world);
  std::vector<int64_t> lengths(static_cast<size_t>(world), 0);
  std::vector<std::vector<int64_t>> places(arrays.size());  // by element of the array
  for (size_t i = 0; i < arrays.size(); ++i) places[i].resize(static_cast<size_t>(arrays[i].units()), -1);
  int64_t flat = 0, longest = 0;
  for (int64_t rank = 0; rank < world; ++rank) {
    const int64_t begin = flat;
    for (size_t i = 0; i < arrays.size(); ++i) {
      const auto rows = brute_force_rows(arrays[i], world)[rank];
      const int64_t units = arrays[i].row_units, length = rows.size() * units * arrays[i].slabs;
      ASSERT_EQ(layout.local_length(i, rank), length);
      if (length > 0) {
        ASSERT_EQ(layout.local_offset(i, rank), flat - begin);
      }
      const auto part = layout.part(i, rank);
      ASSERT_EQ(part.length * part.count, length);
      for (int64_t slab = 0; slab < arrays[i].slabs; ++slab) {
        const int64_t base = slab * arrays[i].rows * units;
        if (length > 0) {
          ASSERT_EQ(part.at + slab * part.stride, base + rows.begin * units);
        }
        for (int64_t k = rows.begin * units; k < rows.end * units; ++k)
          places[i][static_cast<size_t>(base + k)] = flat++;
      }
    }
    lengths[rank] = flat - begin;
    longest = std::max(longest, lengths[rank]);
    ASSERT_EQ(layout.segments().length(rank), lengths[rank]) << "rank " << rank << " of " << world;
    if (lengths[rank] > 0) {
      ASSERT_EQ(layout.segments().begin(rank), begin);
    }
  }
  EXPECT_EQ(layout.world(), world);
  EXPECT_EQ(layout.segments().total(), flat);
  EXPECT_EQ(layout.segments().longest(), longest);
  EXPECT_EQ(layout.segments().even(), flat == longest * world);
  for (int64_t rank = layout.segments().active(); rank < world; ++rank) EXPECT_EQ(lengths[rank], 0);

  for (size_t i = 0; i < arrays.size(); ++i) {
    std::vector<int64_t> found(places[i].size(), -1);
    layout.for_each_run(i, [&](const FlatLayout::Run& run) {
      ASSERT_GT(run.length, 0);
      for (int64_t p = 0; p < run.count; ++p) {
        for (int64_t k = 0; k < run.length * run.slabs; ++k) {
          const int64_t slab = k / run.length, within = k % run.length;
          found[static_cast<size_t>(run.at + p * run.length + slab * run.slab_stride + within)] =
              run.flat + p * run.flat_stride + k;
        }
      }
    });
    EXPECT_EQ(found, places[i]) << "array " << i << " on " << world;
  }
}

TEST(FlatLayout, OneArray) {
  for (int64_t world = 1; world <= 9; ++world) {
    for (int64_t rows = 0; rows <= 20; ++rows) {
      for (int64_t units : {0, 1, 3}) expect_layout({{rows, units}}, world);
    }
  }
}

TEST(FlatLayout, EvenUnevenAndEmptyTogether) {
  for (int64_t world = 1; world <= 9; ++world) {
    expect_layout({}, world);
    expect_layout({{world, 4}, {2 * world, 1}}, world);
    expect_layout({{17, 5}, {1, 7}, {0, 3}, {world, 2}, {4, 0}}, world);
    expect_layout({{1, 1}, {1, 1}, {world + 1, 1}}, world);
  }
}

TEST(FlatLayout, Slabs) {
  for (int64_t world = 1; world <= 9; ++world) {
    expect_layout({{2 * world, 3, 4}}, world);
    expect_layout({{world, 4, 3}, {17, 5}, {world, 1, 7}}, world);
    expect_layout({{7, 2, 3}, {0, 2, 3}, {7, 2, 0}}, world);
  }
}

TEST(FlatLayout, Random) {
  std::mt19937 random(3);
  const auto draw = [&](int64_t below) { return static_cast<int64_t>(random() % static_cast<uint64_t>(below)); };
  for (int round = 0; round < 300; ++round) {
    std::vector<FlatLayout::Array> arrays;
    for (int64_t i = draw(6); i >= 0; --i) arrays.push_back({draw(30), draw(5), round % 2 ? 1 : 1 + draw(4)});
    expect_layout(arrays, 1 + draw(9));
  }
}

TEST(FlatLayout, InLine) {
  for (int64_t world = 1; world <= 9; ++world) {
    expect_layout(in_line({17, 1, 0, 30, 2}, 3), world);
    expect_layout(in_line({world, 2 * world, world}), world);
    expect_layout(in_line({1}), world);
    expect_layout(in_line({0, 0}), world);
    // Some of a line alone: first ranks, ranks in between and last ones may have nothing.
    auto some = in_line({5, 20, 3, 20, 7});
    expect_layout({some[1], some[2]}, world);
    expect_layout({some[0], some[4]}, world);
  }
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    std::vector<int64_t> rows;
    for (int64_t i = static_cast<int64_t>(random() % 6); i >= 0; --i) rows.push_back(random() % 30);
    auto arrays = in_line(rows, 1 + round % 3);
    if (round % 2 == 1) arrays.erase(arrays.begin());
    expect_layout(arrays, 1 + static_cast<int64_t>(random() % 9));
  }
}

TEST(FlatLayout, ALineIsCutIntoChunks) {
  const FlatLayout layout(in_line({5, 7}), 4);  // chunks of 3
  EXPECT_EQ(layout.local_length(0, 0), 3);
  EXPECT_EQ(layout.local_length(0, 1), 2);
  EXPECT_EQ(layout.local_length(1, 1), 1);
  EXPECT_EQ(layout.local_length(1, 3), 3);
  EXPECT_TRUE(layout.segments().even());
}

TEST(FlatLayout, AWorldFarLargerThanTheData) {
  constexpr int64_t kWorld = 16384;
  const FlatLayout layout({{17, 4}, {3, 2}, {1, 1}}, kWorld);
  EXPECT_EQ(layout.segments().total(), 17 * 4 + 3 * 2 + 1);
  EXPECT_EQ(layout.segments().active(), 17);
  EXPECT_EQ(layout.segments().length(0), 4 + 2 + 1);
  EXPECT_EQ(layout.segments().length(2), 4 + 2);
  EXPECT_EQ(layout.segments().length(16), 4);
  EXPECT_EQ(layout.segments().length(17), 0);
  EXPECT_EQ(layout.segments().begin(kWorld - 1), layout.segments().total());
  int64_t pieces = 0;
  layout.for_each_run(0, [&](const FlatLayout::Run& run) { pieces += run.count; });
  EXPECT_EQ(pieces, 17);  // and not one a rank
}

TEST(FlatLayout, AnEvenLargeWorld) {
  constexpr int64_t kWorld = 16384;
  const FlatLayout layout({{2 * kWorld, 3}, {kWorld, 1}}, kWorld);
  EXPECT_TRUE(layout.segments().even());
  EXPECT_EQ(layout.segments().length(kWorld - 1), 7);
  EXPECT_EQ(layout.segments().begin(kWorld - 1), 7 * (kWorld - 1));
  EXPECT_EQ(layout.local_offset(1, kWorld - 1), 6);
  int runs = 0;
  layout.for_each_run(1, [&](const FlatLayout::Run&) { ++runs; });
  EXPECT_EQ(runs, 1);
}

}  // namespace
}  // namespace fsdp::shard
