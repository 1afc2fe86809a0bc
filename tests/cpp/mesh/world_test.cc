#include <fsdp/distributed.h>

#include <chrono>
#include <thread>

#include <ATen/ATen.h>
#include <fsdp/error.h>
#include <gtest/gtest.h>

#include "comm/channel.h"
#include "mesh/world.h"
#include "support/processes.h"
#include "support/ranks.h"

namespace fsdp {
namespace {

using testing::run_processes;
using testing::run_ranks;

template <class ErrorType, class Body>
std::string message_of(Body&& body) {
  try {
    body();
  } catch (const ErrorType& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

TEST(World, IsOneRankWithoutAGroup) {
  EXPECT_FALSE(is_initialized());
  EXPECT_EQ(rank(), 0);
  EXPECT_EQ(world_size(), 1);
  EXPECT_EQ(local_rank(), 0);
  barrier();
  EXPECT_EQ(all_reduce_mean(at::full({2}, 3.0)).sum().item<double>(), 6.0);
}

TEST(World, FakeEngineTakesAnyPlaceInAnyWorld) {
  init_process_group({.engine = "fake", .rank = 5, .world_size = 16384});
  EXPECT_TRUE(is_initialized());
  EXPECT_EQ(rank(), 5);
  EXPECT_EQ(world_size(), 16384);
  barrier();
  destroy_process_group();
  EXPECT_FALSE(is_initialized());
  EXPECT_EQ(world_size(), 1);
}

TEST(World, RefusesBadOptions) {
  EXPECT_NE(
      message_of<NotSupported>([] { init_process_group({.engine = "pigeon"}); }).find("auto, fake, gloo, inproc, "),
      std::string::npos);
  EXPECT_THROW(init_process_group({.rank = 1}), InvalidArgument);
  EXPECT_THROW(init_process_group({.world_size = 2}), InvalidArgument);
  EXPECT_THROW(init_process_group({.rank = 2, .world_size = 2}), InvalidArgument);
  EXPECT_FALSE(is_initialized());
  EXPECT_THROW(all_reduce_mean(at::ones({1}, at::kLong)), InvalidArgument);
}

TEST(World, RefusesASecondGroup) {
  init_process_group();
  EXPECT_THROW(init_process_group(), InvalidArgument);
  destroy_process_group();
  destroy_process_group();  // no group: nothing happens
}

TEST(WorldThreads, EachThreadIsARank) {
  run_ranks(3, [](int r) {
    EXPECT_EQ(rank(), r);
    EXPECT_EQ(world_size(), 3);
    barrier();
    EXPECT_EQ(all_reduce_mean(at::full({1}, static_cast<double>(r))).item<double>(), 1.0);
  });
}

TEST(WorldThreads, ChannelsOfOneLabelDoNotCollide) {
  run_ranks(4, [](int r) {
    const auto world = mesh::World::current();
    const auto sum = [&](comm::Channel& channel) {
      const auto value = at::full({1}, static_cast<double>(r));
      channel.all_reduce(value, comm::ReduceOp::kSum)->wait();
      return value.item<double>();
    };
    const std::vector<int> pair{r / 2 * 2, r / 2 * 2 + 1};
    const auto first = world->open_channel(pair, "same");
    const auto second = world->open_channel(pair, "same");
    const auto all = world->open_channel({3, 2, 1, 0}, "same");
    EXPECT_EQ(all->rank(), 3 - r);
    EXPECT_EQ(sum(*all), 6.0);
    EXPECT_EQ(sum(*second), r < 2 ? 1.0 : 5.0);
    EXPECT_EQ(sum(*first), r < 2 ? 1.0 : 5.0);
    EXPECT_THROW(world->open_channel({(r + 1) % 4}, "not mine"), InvariantError);
  });
}

TEST(RunRanksThreads, ListsEveryFailedRank) {
  const auto what = message_of<std::runtime_error>([] {
    run_ranks(3, [](int r) {
      if (r != 1) {
        throw std::runtime_error("no luck");
      }
    });
  });
  EXPECT_EQ(what, "rank 0: no luck\nrank 2: no luck");
}

FSDP_PROCESS_BODY(join_twice) {
  for (int round = 0; round < 2; ++round) {
    init_process_group({.timeout = std::chrono::seconds(20)});
    EXPECT_EQ(all_reduce_mean(at::full({1}, static_cast<double>(rank()))).item<double>(), (world_size() - 1) / 2.0);
    barrier();
    // The others are at the next group's door before rank 0 may leave this one.
    if (rank() == 2) std::this_thread::sleep_for(std::chrono::milliseconds(300));
    destroy_process_group();
  }
}

TEST(WorldProcs, JoinsLeavesAndJoinsAgain) { run_processes(3, "join_twice"); }

FSDP_PROCESS_BODY(join_alone) {
  try {
    init_process_group({.timeout = std::chrono::seconds(1)});
    barrier();
    ADD_FAILURE() << "the other rank never came";
  } catch (const TimeoutError&) {
  }
}

TEST(WorldFault, AMissingRankIsATimeoutError) {
  run_processes(1, "join_alone", {.environment = {{"WORLD_SIZE", "2"}}});
}

}  // namespace
}  // namespace fsdp
