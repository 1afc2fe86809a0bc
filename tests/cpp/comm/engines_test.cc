#include <fsdp/error.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "channel_checks.h"

namespace fsdp::comm {
namespace {

Rendezvous place(int rank, int size) {
  Rendezvous rendezvous;
  rendezvous.rank = rank;
  rendezvous.size = size;
  rendezvous.name = "test";
  return rendezvous;
}

TEST(Engines, OneRankNeedsNoStore) {
  for (const auto& engine : engines()) {
    check_channel(*open_channel(engine, place(0, 1)));
  }
}

TEST(Engines, UnknownOnesAreRefusedWithTheKnown) {
  try {
    open_channel("pigeon", place(0, 1));
    FAIL() << "nothing was thrown";
  } catch (const NotSupported& error) {
    const std::string what = error.what();
    EXPECT_EQ(what, "there is no engine 'pigeon'; this build has: " + c10::Join(", ", engines()));
    // mpi too where it was found.
    for (const auto* name : {"auto", "fake", "gloo", "inproc", "shm"}) EXPECT_NE(what.find(name), what.npos) << what;
  }
  EXPECT_THROW(register_engine("gloo", nullptr), InvalidArgument);
}

TEST(Engines, FakeMovesOnlyItsOwnSegment) {
  const int world = 16384;
  const auto channel = open_channel("fake", place(2, world));
  const shard::Segments segments(world, {3, 3, 2});
  const auto out = at::zeros({8});
  channel->all_gather(out, at::ones({2}), segments)->wait();
  EXPECT_TRUE(at::equal(out, at::tensor({0, 0, 0, 0, 0, 0, 1, 1}, at::kFloat)));
  const auto shard = at::zeros({2});
  channel->reduce_scatter(shard, at::arange(8, at::kFloat), segments)->wait();
  EXPECT_TRUE(at::equal(shard, at::tensor({6, 7}, at::kFloat)));
  const auto value = at::ones({1});
  channel->all_reduce(value, ReduceOp::kMax)->wait();
  EXPECT_EQ(value.item<float>(), 1.0f);
}

}  // namespace
}  // namespace fsdp::comm
