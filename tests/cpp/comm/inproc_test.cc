#include <condition_variable>
#include <mutex>
#include <stdexcept>

#include <fsdp/error.h>
#include <gtest/gtest.h>

#include "channel_checks.h"
#include "mesh/world.h"
#include "support/ranks.h"

namespace fsdp::comm {
namespace {

using testing::run_ranks;

std::shared_ptr<Channel> open_world_channel() {
  const auto world = mesh::World::current();
  std::vector<int> ranks;
  for (int rank = 0; rank < world->size(); ++rank) {
    ranks.push_back(rank);
  }
  return world->open_channel(ranks, "test");
}

/// Holds ranks back until one of them says that it is done.
class Gate {
 public:
  void open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void pass() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

class InprocThreads : public ::testing::TestWithParam<int> {};

TEST_P(InprocThreads, DoesEveryCollective) {
  run_ranks(GetParam(), [](int) { check_channel(*open_world_channel()); });
}

INSTANTIATE_TEST_SUITE_P(Worlds, InprocThreads, ::testing::Values(1, 2, 3, 5, 8));

std::string error_of(Pending& pending) {
  try {
    pending.wait();
  } catch (const CommError& error) {
    return error.what();
  }
  ADD_FAILURE() << "the collective succeeded";
  return "";
}

TEST(InprocErrorThreads, DifferentOperationsAreAnErrorOnEveryRank) {
  run_ranks(3, [](int rank) {
    const auto channel = open_world_channel();
    const auto small = at::ones({2}), large = at::ones({6});
    const auto what =
        error_of(*(rank == 0 ? channel->all_reduce(small, ReduceOp::kSum) : channel->all_gather_even(large, small)));
    EXPECT_NE(what.find("rank 0 calls all_reduce(2 x Float"), std::string::npos) << what;
    EXPECT_NE(what.find("calls all_gather(2 x Float"), std::string::npos) << what;
    EXPECT_NE(what.find("inproc channel 'test', rank " + std::to_string(rank) + " of 3"), std::string::npos) << what;
  });
}

TEST(InprocErrorThreads, DifferentSizesAreAnErrorAndTheChannelGoesOn) {
  run_ranks(2, [](int rank) {
    const auto channel = open_world_channel();
    const auto tensor = at::ones({2 + rank}), alike = at::ones({4});
    const auto pending = channel->all_reduce(tensor, ReduceOp::kSum);
    const auto next = channel->all_reduce(alike, ReduceOp::kSum);
    const auto what = error_of(*pending);
    EXPECT_NE(what.find("collective number 0"), std::string::npos) << what;
    next->wait();
    EXPECT_EQ(alike.sum().item<double>(), 8.0);
  });
}

TEST(InprocErrorThreads, AnAbsentRankIsATimeoutThatNamesIt) {
  Gate gate;
  const auto body = [&](int rank) {
    const auto channel = open_world_channel();
    const auto tensor = at::ones({2});
    if (rank == 1) {
      gate.pass();
    }
    const auto pending = channel->all_reduce(tensor, ReduceOp::kSum);
    try {
      pending->wait();
      ADD_FAILURE() << "rank 0 had given up";
    } catch (const TimeoutError& error) {
      EXPECT_NE(std::string(error.what()).find("rank 1 did not come"), std::string::npos) << error.what();
      EXPECT_NE(std::string(error.what()).find("within 200 ms"), std::string::npos) << error.what();
    }
    EXPECT_EQ(tensor.sum().item<double>(), 2.0);  // untouched
    gate.open();
  };
  run_ranks(2, body, std::chrono::milliseconds(200));
}

TEST(InprocErrorThreads, AShortWaitChangesNothing) {
  Gate gate;
  run_ranks(2, [&](int rank) {
    const auto channel = open_world_channel();
    const auto tensor = at::ones({2});
    if (rank == 1) {
      gate.pass();
    }
    const auto pending = channel->all_reduce(tensor, ReduceOp::kSum);
    if (rank == 0) {
      EXPECT_FALSE(pending->wait_for(std::chrono::milliseconds(0)));
      EXPECT_FALSE(pending->wait_for(std::chrono::milliseconds(5)));
      gate.open();
    }
    pending->wait();
    EXPECT_EQ(tensor.sum().item<double>(), 4.0);
  });
}

TEST(InprocErrorThreads, ARankThatThrowsFreesTheOthers) {
  try {
    run_ranks(3, [](int rank) {
      const auto channel = open_world_channel();
      const auto tensor = at::ones({2});
      if (rank == 2) {
        throw std::runtime_error("out of luck");
      }
      channel->all_reduce(tensor, ReduceOp::kSum)->wait();
    });
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find("rank 2: out of luck"), std::string::npos) << what;
    EXPECT_NE(what.find("rank 0: inproc channel"), std::string::npos) << what;
    EXPECT_NE(what.find("rank 2 has left the channel"), std::string::npos) << what;
  }
}

}  // namespace
}  // namespace fsdp::comm
