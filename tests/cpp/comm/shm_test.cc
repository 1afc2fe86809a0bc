#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <set>
#include <thread>

#include <fsdp/distributed.h>
#include <fsdp/error.h>
#include <gtest/gtest.h>

#include "channel_checks.h"
#include "comm/backends/shm/arena.h"
#include "comm/backends/shm/board.h"
#include "comm/backends/shm/peers.h"
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

// --- large contributions, which peers read out of the tensor --------------------------------------------------------

constexpr int64_t kLarge = 100'000;  // floats

/// Waits, and then does to `given` what its owner may do.
void wait_and_overwrite(Pending& pending, const at::Tensor& given) {
  pending.wait();
  given.fill_(-1);
}

void expect_gathered(const at::Tensor& whole, int64_t each, const std::function<float(int64_t)>& of_rank) {
  for (int64_t rank = 0; rank < whole.numel() / each; ++rank) {
    const auto part = whole.narrow(0, rank * each, each);
    ASSERT_TRUE(part.eq(of_rank(rank)).all().item<bool>()) << "of rank " << rank << ": " << part;
  }
}

// A rank that is late at any point finds what was contributed, though its owner has written there since.
TEST_P(ShmThreads, WhatWasGivenIsItsOwnersAfterTheWait) {
  run_ranks(GetParam(), [](int rank) {
    const auto channel = open_here();
    const int world = channel->size();
    const auto nap = [&](bool wanted) {
      if (wanted) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    };
    for (int late = 0; late < world; ++late) {
      for (const bool before : {true, false}) {
        const auto value = [&](int64_t of) { return static_cast<float>(10 * late + of + 1); };
        const auto mine = at::full({kLarge}, value(rank)), whole = at::empty({kLarge * world});
        nap(before && rank == late);
        auto gather = channel->all_gather_even(whole, mine);
        nap(!before && rank == late);
        wait_and_overwrite(*gather, mine);
        expect_gathered(whole, kLarge, value);

        const auto in = at::full({kLarge * world}, value(rank)), sum = at::empty({kLarge});
        nap(before && rank == late);
        auto reduction = channel->reduce_scatter(sum, in, shard::Segments(world, kLarge));
        nap(!before && rank == late);
        wait_and_overwrite(*reduction, in);
        float expected = 0;
        for (int other = 0; other < world; ++other) expected += value(other);
        ASSERT_TRUE(sum.eq(expected).all().item<bool>());

        const auto sent = at::full({kLarge}, value(rank));
        nap(before && rank == late);
        auto broadcast = channel->broadcast(sent, late == 0 ? world - 1 : 0);
        nap(!before && rank == late);
        broadcast->wait();
        ASSERT_TRUE(sent.eq(value(late == 0 ? world - 1 : 0)).all().item<bool>());
        sent.fill_(-1);
      }
    }
  });
}

// Owners write while peers are in the middle of reading.
TEST_P(ShmThreads, WhatMovesWhileItIsReadIsReadAgain) {
  run_ranks(GetParam(), [](int rank) {
    const auto channel = open_here();
    const int world = channel->size();
    uint64_t seed = static_cast<uint64_t>(rank) + 1;
    const auto some = [&] { return (seed = seed * 6364136223846793005ull + 1442695040888963407ull) >> 33; };
    std::vector<at::Tensor> mine, whole;
    for (int k = 0; k < 3; ++k) {
      mine.push_back(at::empty({4 * kLarge}));
      whole.push_back(at::empty({4 * kLarge * world}));
    }
    for (int i = 0; i < 20; ++i) {
      std::vector<std::unique_ptr<Pending>> pending;
      const auto value = [&](int k, int64_t of) { return static_cast<float>(1000 * i + 100 * k + of); };
      for (int k = 0; k < 3; ++k) {
        mine[static_cast<size_t>(k)].fill_(value(k, rank));
        pending.push_back(channel->all_gather_even(whole[static_cast<size_t>(k)], mine[static_cast<size_t>(k)]));
      }
      for (int k : i % 2 ? std::vector<int>{0, 1, 2} : std::vector<int>{2, 0, 1}) {
        std::this_thread::sleep_for(std::chrono::microseconds(some() % 1500));
        wait_and_overwrite(*pending[static_cast<size_t>(k)], mine[static_cast<size_t>(k)]);
        expect_gathered(whole[static_cast<size_t>(k)], 4 * kLarge, [&](int64_t of) { return value(k, of); });
      }
    }
  });
}

/// Takes segments in pieces of 1000 floats, or as a whole.
class Pieces final : public Placement {
 public:
  Pieces(at::Tensor whole, bool listed) : whole_(std::move(whole)), listed_(listed) {}
  void segment(int64_t rank, const void* bytes) override { std::memcpy(at(rank), bytes, kLarge * sizeof(float)); }
  void whole(const void* bytes) override { std::memcpy(at(0), bytes, whole_.nbytes()); }
  bool pieces(int64_t rank, std::vector<Piece>& into) override {
    for (int64_t i = 0; listed_ && i < kLarge; i += 1000) into.push_back({at(rank) + i, 1000 * sizeof(float)});
    return listed_;
  }

 private:
  float* at(int64_t rank) const { return whole_.data_ptr<float>() + rank * kLarge; }
  at::Tensor whole_;
  bool listed_;
};

TEST_P(ShmThreads, APlacementMayBeInPieces) {
  run_ranks(GetParam(), [](int rank) {
    const auto channel = open_here();
    const auto segments = shard::Segments(channel->size(), kLarge);
    for (const bool listed : {true, false}) {
      const auto mine = at::full({kLarge}, static_cast<float>(rank)), whole = at::empty({kLarge * channel->size()});
      auto pending = channel->all_gather_to(std::make_shared<Pieces>(whole, listed), mine, segments);
      wait_and_overwrite(*pending, mine);
      expect_gathered(whole, kLarge, [](int64_t of) { return static_cast<float>(of); });
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

// The one that failed may have freed the tensor: whoever comes later gets what it was, and fails by what is next.
TEST(ShmErrorThreads, WhatAFailedRankContributedIsThereForTheLate) {
  std::atomic<bool> given_up{false};
  run_ranks(2, [&](int rank) {
    const auto channel = open_here(std::chrono::milliseconds(rank == 0 ? 200 : 10'000));
    auto mine = at::ones({kLarge});
    const auto whole = at::zeros({2 * kLarge});
    if (rank == 0) {
      EXPECT_THROW(channel->all_gather_even(whole, mine)->wait(), TimeoutError);
      mine.fill_(2);
      given_up = true;
      return;
    }
    while (!given_up) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    channel->all_gather_even(whole, mine)->wait();
    EXPECT_TRUE(whole.eq(1).all().item<bool>());
    EXPECT_NE(error_of([&] { channel->all_gather_even(whole, mine)->wait(); }).find("rank 0"), std::string::npos);
  });
}

TEST(ShmErrorThreads, ASegmentWithoutRoomIsAnErrorOnEveryRank) {
  std::atomic<int> failed{0};
  run_ranks(2, [&](int rank) {
    const auto channel = open_here();
    std::vector<at::Tensor> held;  // all but less than 64 KB; untouched, so that it takes no memory
    for (int64_t bytes = int64_t{1} << 42; rank == 0 && bytes > 1 << 15;) {
      try {
        held.push_back(channel->buffer(bytes, at::kCPU));
      } catch (const CommError&) {
        bytes /= 2;
      }
    }
    const auto mine = at::ones({kLarge}), whole = at::zeros({2 * kLarge});
    auto pending = channel->all_gather_even(whole, mine);
    while (rank == 1 && failed == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const auto what = error_of([&] { pending->wait(); });
    EXPECT_NE(what.find(rank == 1 ? "rank 0 had no room for its part" : "bad_alloc"), std::string::npos) << what;
    ++failed;
    held.clear();
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
  check_own_sums(channel);
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

FSDP_PROCESS_BODY(shm_killed_lender) {
  init_process_group({.engine = "shm", .timeout = std::chrono::seconds(30)});
  auto& channel = mesh::World::current()->channel();
  barrier();
  const auto mine = at::ones({kLarge}), whole = at::zeros({kLarge * world_size()});
  auto pending = channel.all_gather_even(whole, mine);
  if (rank() == world_size() - 1) ::raise(SIGKILL);
  ::usleep(300'000);  // until it has ended: it is there to be read, and its owner is not
  const auto begin = std::chrono::steady_clock::now();
  const auto what = error_of([&] { pending->wait(); });
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
  EXPECT_NE(what.find("rank 2 has ended"), std::string::npos) << what;
}

TEST(ShmFault, AKilledRankWhoseTensorIsReadIsACommErrorThatNamesIt) {
  const auto results = run_processes(3, "shm_killed_lender", {.expected_to_fail = {2}});
  EXPECT_EQ(results[2].exit_code, 128 + SIGKILL);
}

/// No process_vm_readv in this process from now on, as in many a container.
void forbid_direct_reads() {
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{std::size(program), program};
  ASSERT_EQ(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
  ASSERT_EQ(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter), 0);
}

FSDP_PROCESS_BODY(shm_without_direct_reads) {
  init_process_group({.engine = "gloo", .timeout = std::chrono::seconds(30)});
  if (rank() == 1) forbid_direct_reads();
  const auto world = mesh::World::current();
  const Rendezvous meeting{.store = world->store(), .rank = rank(), .size = world_size(), .name = "test"};
  std::string reason;
  auto peers = shm::Peers::meet(meeting, reason);
  ASSERT_TRUE(peers) << reason;
  EXPECT_FALSE(peers->direct());  // on the others too
  shm::ShmChannel channel(meeting, std::move(*peers));
  check_channel(channel);
  const auto mine = at::full({kLarge}, static_cast<float>(rank())), whole = at::empty({kLarge * world_size()});
  wait_and_overwrite(*channel.all_gather_even(whole, mine), mine);
  expect_gathered(whole, kLarge, [](int64_t of) { return static_cast<float>(of); });
  barrier();
  destroy_process_group();
}

TEST(ShmChoiceProcs, WorksWhereARankMayNotReadAnothersMemory) { run_processes(3, "shm_without_direct_reads"); }

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
