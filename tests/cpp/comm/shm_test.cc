#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <set>
#include <thread>

#include <fsdp/distributed.h>
#include <fsdp/error.h>
#include <gtest/gtest.h>

#include "channel_checks.h"
#include "comm/backends/shm/arena.h"
#include "comm/backends/shm/board.h"
#include "comm/backends/shm/shm_channel.h"
#include "comm/segment.h"
#include "comm/sum.h"
#include "mesh/world.h"
#include "support/processes.h"
#include "support/ranks.h"

namespace fsdp::comm {
namespace {

using testing::run_processes;
using testing::run_ranks;

// Ranks as threads of this process, each with its own mappings: what the sanitizers can see.
std::shared_ptr<Channel> open_here(std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
  const auto world = mesh::World::current();
  return open_channel(
      "shm",
      {.store = world->store(), .rank = world->rank(), .size = world->size(), .timeout = timeout, .name = "test"});
}

class ShmThreads : public ::testing::TestWithParam<int> {};

TEST_P(ShmThreads, DoesEveryCollective) {
  run_ranks(GetParam(), [](int) { check_channel(*open_here()); });
}

// More in flight than a board has lines, and every result right: lines and blocks are reused only once all have read.
TEST_P(ShmThreads, ManyCollectivesWhileOneRankIsLate) {
  run_ranks(GetParam(), [](int rank) {
    const auto channel = open_here();
    const int64_t world = channel->size();
    for (int i = 0; i < 1300; ++i) {
      if (rank == 0 && i % 400 == 399) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      const auto in = channel->buffer(world * 40 * 4, at::kCPU).view(at::kFloat);
      in.fill_(static_cast<float>(i + rank));
      const auto out = at::empty({40}), all = at::empty({world * 3});
      const auto sum = channel->reduce_scatter(out, in, shard::Segments(world, 40));
      const auto gathered = channel->all_gather_even(all, at::full({3}, static_cast<float>(i * rank)));
      if (i % 3 == 0) gathered->wait();
      sum->wait();
      gathered->wait();
      ASSERT_TRUE(at::equal(out, at::full({40}, static_cast<float>(world * i + world * (world - 1) / 2)))) << i;
      ASSERT_TRUE(at::equal(all, (at::arange(world, at::kFloat) * i).repeat_interleave(3))) << i;
    }
  });
}

TEST_P(ShmThreads, MoreInFlightThanABoardHasLines) {
  run_ranks(GetParam(), [](int rank) {
    const auto channel = open_here();
    constexpr int kMany = 3 * shm::Board::kLines / 2;
    std::vector<at::Tensor> tensors;
    std::vector<std::unique_ptr<Pending>> pending;
    for (int i = 0; i < kMany; ++i) {
      tensors.push_back(at::full({2}, static_cast<float>(rank + i)));
      pending.push_back(channel->all_reduce(tensors.back(), ReduceOp::kMax));
    }
    while (!pending.empty()) pending.pop_back();  // the last one first
    for (int i = 0; i < kMany; ++i) {
      ASSERT_EQ(tensors[static_cast<size_t>(i)][1].item<int>(), channel->size() - 1 + i);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ShmThreads, ::testing::Values(2, 3, 5, 8));

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const CommError& error) {
    return error.what();
  }
  ADD_FAILURE() << "the collective succeeded";
  return "";
}

TEST(ShmErrorThreads, DifferentCallsAreAnErrorOnEveryRank) {
  run_ranks(3, [](int rank) {
    const auto channel = open_here();
    const auto tensor = at::ones({rank == 1 ? 3 : 2}), all = at::ones({9});
    const auto what = error_of([&] {
      (rank == 0 ? channel->all_reduce(tensor, ReduceOp::kSum) : channel->all_gather_even(all, tensor))->wait();
    });
    EXPECT_NE(what.find("shm channel 'test', rank " + std::to_string(rank) + " of 3"), std::string::npos) << what;
    EXPECT_NE(what.find("the ranks disagree on collective number 0"), std::string::npos) << what;
    // The channel is over, and says so at once.
    EXPECT_NE(error_of([&] { channel->all_reduce(tensor, ReduceOp::kSum); }).find("disagree"), std::string::npos);
    EXPECT_NE(error_of([&] { channel->buffer(8, at::kCPU); }).find("disagree"), std::string::npos);
  });
}

TEST(ShmErrorThreads, AnAbsentRankIsATimeoutThatNamesIt) {
  std::atomic<bool> given_up{false};
  run_ranks(2, [&](int rank) {
    const auto channel = open_here(std::chrono::milliseconds(200));
    const auto tensor = at::ones({2});
    if (rank == 1) {
      while (!given_up) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return;
    }
    const auto begin = std::chrono::steady_clock::now();
    {
      const auto pending = channel->all_reduce(tensor, ReduceOp::kSum);
      EXPECT_FALSE(pending->wait_for(std::chrono::milliseconds(1)));
      try {
        pending->wait();
        ADD_FAILURE() << "rank 1 was not there";
      } catch (const TimeoutError& error) {
        EXPECT_NE(std::string(error.what()).find("rank 1 did not come"), std::string::npos) << error.what();
        EXPECT_NE(std::string(error.what()).find("within 200 ms"), std::string::npos) << error.what();
      }
    }  // and leaving it behind does not wait once more
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
    EXPECT_EQ(tensor.sum().item<double>(), 2.0);
    given_up = true;
  });
}

TEST(ShmErrorThreads, ARankThatLeavesIsAnError) {
  run_ranks(3, [](int rank) {
    auto channel = open_here();
    const auto tensor = at::ones({2});
    channel->all_reduce(tensor, ReduceOp::kSum)->wait();
    if (rank == 2) {
      channel.reset();
      return;
    }
    const auto what = error_of([&] { channel->all_reduce(tensor, ReduceOp::kSum)->wait(); });
    EXPECT_NE(what.find("rank 2"), std::string::npos) << what;
    EXPECT_NE(what.find("has left the channel"), std::string::npos) << what;
  });
}

TEST(ShmErrorThreads, BuffersAndCollectivesMayOutliveTheChannel) {
  run_ranks(2, [](int rank) {
    auto channel = open_here();
    auto in = channel->buffer(64, at::kCPU).view(at::kFloat);
    const auto spare = channel->buffer(64, at::kCPU).view(at::kFloat);
    in.fill_(1);
    const auto out = at::zeros({8});
    auto pending = channel->reduce_scatter(out, in, shard::Segments(2, 8));
    channel.reset();
    pending->wait();
    EXPECT_EQ(out.sum().item<double>(), 16.0);
    pending.reset();
    spare.fill_(2);
    EXPECT_EQ(spare.sum().item<double>(), 32.0);
    EXPECT_EQ(in.sum().item<double>(), 16.0);  // issued, so not to be written any more
  });
}

// --- parts ----------------------------------------------------------------------------------------------------------

TEST(ShmArena, GivesDisjointAlignedBlocksAndTakesThemBack) {
  shm::Arena arena(128, 1 << 20);
  std::map<uint64_t, uint64_t> held;
  uint64_t seed = 1;
  const auto next = [&](uint64_t n) {
    return (seed = seed * 6364136223846793005ull + 1442695040888963407ull) >> 33 & (n - 1);
  };
  for (int i = 0; i < 20000; ++i) {
    if (held.size() < 40 && next(2) == 0) {
      const uint64_t bytes = next(8192), at = arena.allocate(bytes);
      ASSERT_EQ(at % shm::Arena::kAlignment, 0u);
      ASSERT_GE(at, 128u);
      const auto after = held.lower_bound(at);
      const bool before_next = after == held.end() || at + bytes <= after->first;
      const bool after_last = after == held.begin() || std::prev(after)->first + std::prev(after)->second <= at;
      ASSERT_TRUE(before_next && after_last);
      held.emplace(at, bytes);
    } else if (!held.empty()) {
      const auto it = std::next(held.begin(), static_cast<int64_t>(next(64) % held.size()));
      arena.free(it->first);
      held.erase(it);
    }
  }
  for (const auto& [at, bytes] : held) arena.free(at);
  EXPECT_EQ(arena.bytes_in_use(), 0u);
  EXPECT_EQ(arena.allocate((1 << 20) - 128), 128u);  // neighbours have become one block again
  EXPECT_THROW(arena.allocate(1 << 20), std::bad_alloc);
}

TEST(ShmSum, RoundsOnce) {
  // 256 + 1 eight times: bf16 has 8 bits, so adding ones one at a time would leave 256.
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto large = at::full({5000}, dtype == at::kHalf ? 2048 : 256, dtype), one = at::ones({5000}, dtype);
    std::vector<const void*> parts(9, one.const_data_ptr());
    parts[0] = large.const_data_ptr();
    const auto out = at::empty({5000}, dtype);
    reduce_parts(out.data_ptr(), parts, 5000, dtype, ReduceOp::kSum);
    EXPECT_TRUE(at::equal(out, large.to(at::kFloat).add(8).to(dtype))) << dtype;
  }
}

TEST(ShmSum, NotANumberWins) {
  const float nan = std::nanf("");
  const auto a = at::tensor({nan, 1.0f, 3.0f}), b = at::tensor({1.0f, nan, 2.0f}), out = at::empty({3});
  for (const auto op : {ReduceOp::kMax, ReduceOp::kMin}) {
    reduce_parts(out.data_ptr(), {a.const_data_ptr(), b.const_data_ptr()}, 3, at::kFloat, op);
    EXPECT_TRUE(std::isnan(out[0].item<float>()) && std::isnan(out[1].item<float>()));
  }
}

TEST(ShmSum, ComplexNumbersHaveASumAndNoOrder) {
  for (const auto dtype : {at::kComplexFloat, at::kComplexDouble}) {
    const auto a = at::randn({5000}, dtype), b = at::randn({5000}, dtype), c = at::randn({5000}, dtype);
    const std::vector<const void*> parts{a.const_data_ptr(), b.const_data_ptr(), c.const_data_ptr()};
    const auto out = at::empty({5000}, dtype);
    reduce_parts(out.data_ptr(), parts, 5000, dtype, ReduceOp::kSum);
    EXPECT_TRUE(at::equal(out, a + b + c)) << dtype;
    EXPECT_THROW(reduce_parts(out.data_ptr(), parts, 5000, dtype, ReduceOp::kMax), NotSupported);
  }
  EXPECT_THROW(reduce_parts(nullptr, {nullptr}, 1, at::kBool, ReduceOp::kSum), NotSupported);
}

TEST(ShmSegment, IsForItsUserAlone) {
  const auto segment = Segment::create(4096);
  const auto path = std::filesystem::path("/proc/self/fd") / std::to_string(segment.fd());
  EXPECT_EQ(std::filesystem::status(path).permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  EXPECT_NE(std::filesystem::read_symlink(path).string().find("(deleted)"), std::string::npos);  // no name to leave
}

// --- processes ------------------------------------------------------------------------------------------------------

FSDP_PROCESS_BODY(shm_collectives) {
  init_process_group({.engine = "shm", .timeout = std::chrono::seconds(30)});
  auto& channel = mesh::World::current()->channel();
  check_channel(channel);
  check_all_gather(channel, shard::Segments(world_size(), 200'000), at::kFloat);
  check_reduce_scatter(channel, shard::Segments(world_size(), 200'000), at::kFloat);
  destroy_process_group();
}

class ShmProcs : public ::testing::TestWithParam<int> {};

TEST_P(ShmProcs, DoesEveryCollective) { run_processes(GetParam(), "shm_collectives"); }

INSTANTIATE_TEST_SUITE_P(Worlds, ShmProcs, ::testing::Values(2, 3, 5));

FSDP_PROCESS_BODY(shm_by_itself) {
  init_process_group({.timeout = std::chrono::seconds(30)});
  EXPECT_NE(dynamic_cast<shm::ShmChannel*>(&mesh::World::current()->channel()), nullptr);
  barrier();
  destroy_process_group();
}

TEST(ShmChoiceProcs, IsTakenOnOneHost) { run_processes(2, "shm_by_itself"); }

// A data loader's worker, say: what it drops of its parent's objects must not end them for the other ranks.
FSDP_PROCESS_BODY(shm_fork) {
  init_process_group({.engine = "shm", .timeout = std::chrono::seconds(30)});
  barrier();
  const pid_t child = ::fork();
  if (child == 0) {
    mesh::World::set_process_world(nullptr);
    ::_exit(0);
  }
  int status = 1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  barrier();
  destroy_process_group();
}

TEST(ShmForkProcs, AForkedChildLeavesNothing) { run_processes(2, "shm_fork"); }

FSDP_PROCESS_BODY(shm_killed_peer) {
  init_process_group({.engine = "shm", .timeout = std::chrono::seconds(30)});
  auto& channel = mesh::World::current()->channel();
  barrier();
  const auto in = at::ones({1000 * world_size()}), out = at::zeros({1000});
  for (int i = 0; i < 3; ++i) channel.reduce_scatter(out, in, shard::Segments(world_size(), 1000))->wait();
  if (rank() == world_size() - 1) ::raise(SIGKILL);
  const auto begin = std::chrono::steady_clock::now();
  const auto what = error_of([&] { channel.reduce_scatter(out, in, shard::Segments(world_size(), 1000))->wait(); });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  EXPECT_NE(what.find("rank 2 (process"), std::string::npos) << what;
  EXPECT_NE(what.find("has ended"), std::string::npos) << what;
  EXPECT_NE(what.find("shm channel 'world', rank"), std::string::npos) << what;
}

TEST(ShmFault, AKilledPeerIsACommErrorThatNamesIt) {
  const auto results = run_processes(3, "shm_killed_peer", {.expected_to_fail = {2}});
  EXPECT_EQ(results[2].exit_code, 128 + SIGKILL);
}

FSDP_PROCESS_BODY(shm_stopped_peer) {
  init_process_group({.engine = "shm", .timeout = std::chrono::seconds(1)});
  auto& channel = mesh::World::current()->channel();
  barrier();
  if (rank() == 1) {
    ::sleep(3);
    return;
  }
  const auto mine = at::ones({1000}), out = at::zeros({2000});
  EXPECT_THROW(channel.all_gather_even(out, mine)->wait(), TimeoutError);
}

TEST(ShmFault, AStuckPeerIsATimeoutError) { run_processes(2, "shm_stopped_peer"); }

}  // namespace
}  // namespace fsdp::comm
