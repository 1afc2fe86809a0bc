#pragma once
#include <algorithm>
#include <chrono>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "comm/channel.h"

/// What every engine must do, run by each rank on its channel.
namespace fsdp::comm {

/// Even, uneven, mostly empty and empty segments.
inline std::vector<shard::Segments> segment_patterns(int world) {
  const auto first_of = [&](std::vector<int64_t> lengths) {
    lengths.resize(std::min<size_t>(lengths.size(), world));
    return shard::Segments(world, lengths);
  };
  return {shard::Segments(world, 6), shard::Segments(world, 0), first_of({5}), first_of({7, 7, 2}),
          first_of({4, 4, 4, 4, 4, 4, 4, 3})};
}

/// Small whole numbers, exact in every dtype.
inline at::Tensor pattern(int64_t length, int64_t seed, at::ScalarType dtype) {
  return at::remainder(at::arange(length) * 3 + seed, 2 + (dtype != at::kBool) * 3).to(dtype);
}

inline void expect_equal(const at::Tensor& got, const at::Tensor& expected, const char* what) {
  EXPECT_TRUE(at::equal(got.to(at::kDouble), expected.to(at::kDouble)))
      << what << " of " << got.scalar_type() << ": got " << got.to(at::kDouble) << ", expected "
      << expected.to(at::kDouble);
}

inline void check_all_gather(Channel& channel, const shard::Segments& segments, at::ScalarType dtype) {
  const auto expected = pattern(segments.total(), 1, dtype);
  const auto mine = expected.narrow(0, segments.begin(channel.rank()), segments.length(channel.rank())).clone();
  const auto out = at::zeros({segments.total()}, mine.options());
  channel.all_gather(out, mine, segments)->wait();
  expect_equal(out, expected, "all_gather");
}

inline void check_reduce_scatter(Channel& channel, const shard::Segments& segments, at::ScalarType dtype) {
  auto sum = at::zeros({segments.total()}, at::kDouble);
  for (int rank = 0; rank < channel.size(); ++rank) {
    sum += pattern(segments.total(), rank, at::kDouble);
  }
  const auto in = pattern(segments.total(), channel.rank(), dtype);
  const auto length = segments.length(channel.rank());
  const auto out = at::full({length}, 1, in.options());
  channel.reduce_scatter(out, in, segments)->wait();
  expect_equal(out, sum.narrow(0, segments.begin(channel.rank()), length), "reduce_scatter");
  expect_equal(in, pattern(segments.total(), channel.rank(), dtype), "reduce_scatter's input");
}

inline void check_all_reduce(Channel& channel, at::ScalarType dtype) {
  std::vector<at::Tensor> all;
  for (int rank = 0; rank < channel.size(); ++rank) {
    all.push_back(pattern(9, rank * 2, at::kDouble));
  }
  const auto stacked = at::stack(all);
  const auto run = [&](ReduceOp op) {
    const auto tensor = pattern(9, channel.rank() * 2, dtype);
    channel.all_reduce(tensor, op)->wait();
    return tensor;
  };
  expect_equal(run(ReduceOp::kSum), stacked.sum(0), "all_reduce sum");
  expect_equal(run(ReduceOp::kMax), stacked.amax(0), "all_reduce max");
  expect_equal(run(ReduceOp::kMin), stacked.amin(0), "all_reduce min");
}

inline void check_broadcast(Channel& channel, at::ScalarType dtype) {
  for (const int root : {0, channel.size() - 1}) {
    const auto tensor = pattern(7, channel.rank(), dtype);
    channel.broadcast(tensor, root)->wait();
    expect_equal(tensor, pattern(7, root, dtype), "broadcast");
  }
}

/// Several collectives in flight, waited for in another order than issued, twice, and not at all.
inline void check_flight(Channel& channel) {
  const int64_t world = channel.size();
  const auto mine = at::full({3}, static_cast<float>(channel.rank()));
  const auto gathered = at::zeros({3 * world}), sums = at::zeros({3});
  const auto ones = at::ones({3 * world}), abandoned = at::ones({2});
  auto first = channel.all_gather_even(gathered, mine);
  auto second = channel.reduce_scatter(sums, ones, shard::Segments(world, 3));
  channel.all_reduce(abandoned, ReduceOp::kSum);
  second->wait();
  first->wait();
  first->wait();
  expect_equal(gathered, at::arange(world).repeat_interleave(3), "all_gather_even in flight");
  expect_equal(sums, at::full({3}, world), "reduce_scatter in flight");
  expect_equal(abandoned, at::full({2}, world), "all_reduce that nobody waited for");

  const auto polled = at::ones({2});
  auto third = channel.all_reduce(polled, ReduceOp::kSum);
  while (!third->wait_for(std::chrono::milliseconds(1))) {
  }
  EXPECT_TRUE(third->wait_for(std::chrono::milliseconds(0)));
  third->wait();
  expect_equal(polled, at::full({2}, world), "all_reduce waited for a little at a time");
}

/// Segments that an engine does not carry the way it carries a few bytes.
inline void check_much(Channel& channel) {
  std::vector<int64_t> lengths{300'001, 262'144, 3, 70'000, 1};
  lengths.resize(std::min<size_t>(lengths.size(), static_cast<size_t>(channel.size())));
  const shard::Segments segments(channel.size(), lengths);
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    check_all_gather(channel, segments, dtype);
    check_reduce_scatter(channel, segments, dtype);
  }
}

/// Where libfsdp itself adds: dtypes that backends do not know, and half precision rounded once.
inline void check_own_sums(Channel& channel) {
  const int64_t world = channel.size(), here = channel.rank();
  for (const int64_t each : {5, 100'000}) {
    const shard::Segments segments(world, each);
    for (const auto dtype : {at::kShort, at::kComplexFloat, at::kComplexDouble}) {
      const auto out = at::empty({each}, dtype), in = at::full({each * world}, here + 1, dtype);
      channel.reduce_scatter(out, in, segments)->wait();
      EXPECT_TRUE(out.eq(world * (world + 1) / 2).all().item<bool>()) << dtype;
    }
    // bf16 has 8 bits: adding ones one at a time would leave 256.
    const auto out = at::empty({each}, at::kBFloat16),
               in = at::full({each * world}, here == 0 ? 256 : 1, at::kBFloat16);
    channel.reduce_scatter(out, in, segments)->wait();
    const auto expected = at::full({1}, 255 + world).to(at::kBFloat16);
    EXPECT_TRUE(out.eq(expected).all().item<bool>()) << out[0] << ", expected " << expected;
  }
}

inline void check_channel(Channel& channel) {
  for (const auto& segments : segment_patterns(channel.size())) {
    for (const auto dtype : {at::kBool, at::kByte, at::kShort, at::kBFloat16, at::kFloat, at::kDouble, at::kLong}) {
      check_all_gather(channel, segments, dtype);
    }
    for (const auto dtype : {at::kBFloat16, at::kHalf, at::kFloat, at::kDouble, at::kLong}) {
      check_reduce_scatter(channel, segments, dtype);
    }
  }
  for (const auto dtype : {at::kByte, at::kFloat, at::kDouble, at::kLong}) {
    check_all_reduce(channel, dtype);
  }
  for (const auto dtype : {at::kBool, at::kShort, at::kBFloat16, at::kFloat}) {
    check_broadcast(channel, dtype);
  }
  check_much(channel);
  check_flight(channel);
}

}  // namespace fsdp::comm
