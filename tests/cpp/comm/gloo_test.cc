#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <fsdp/distributed.h>
#include <fsdp/error.h>
#include <gtest/gtest.h>

#include "channel_checks.h"
#include "mesh/world.h"
#include "support/processes.h"

namespace fsdp::comm {
namespace {

using testing::run_processes;

FSDP_PROCESS_BODY(gloo_collectives) {
  init_process_group({.engine = "gloo", .timeout = std::chrono::seconds(30)});
  check_channel(mesh::World::current()->channel());
  // Larger than the sockets' buffers, both ways at once.
  check_all_gather(mesh::World::current()->channel(), shard::Segments(world_size(), 1'000'000), at::kFloat);
  check_reduce_scatter(mesh::World::current()->channel(), shard::Segments(world_size(), 1'000'000), at::kFloat);
  check_own_sums(mesh::World::current()->channel());
  destroy_process_group();
}

class GlooWorldsProcs : public ::testing::TestWithParam<int> {};

TEST_P(GlooWorldsProcs, DoesEveryCollective) { run_processes(GetParam(), "gloo_collectives"); }

INSTANTIATE_TEST_SUITE_P(Worlds, GlooWorldsProcs, ::testing::Values(2, 3));

// "op" must fail with ErrorType within the bound.
template <class ErrorType>
void expect_failure(std::chrono::seconds bound, const std::function<std::unique_ptr<Pending>()>& op) {
  const auto start = std::chrono::steady_clock::now();
  try {
    op()->wait();
    ADD_FAILURE() << "rank " << rank() << ": the collective succeeded";
  } catch (const ErrorType& error) {
    EXPECT_NE(std::string(error.what()).find("gloo channel 'world', rank"), std::string::npos) << error.what();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, bound);
}

FSDP_PROCESS_BODY(gloo_killed_peer) {
  init_process_group({.engine = "gloo", .timeout = std::chrono::seconds(30)});
  auto& channel = mesh::World::current()->channel();
  barrier();
  if (rank() == world_size() - 1) {
    ::raise(SIGKILL);
  }
  const auto mine = at::ones({1000}), out = at::zeros({1000 * world_size()});
  expect_failure<CommError>(std::chrono::seconds(10), [&] { return channel.all_gather_even(out, mine); });
}

TEST(GlooFault, AKilledPeerIsACommError) {
  const auto results = run_processes(3, "gloo_killed_peer", {.expected_to_fail = {2}});
  EXPECT_EQ(results[2].exit_code, 128 + SIGKILL);
}

// The signals that each of this process's threads blocks, by thread.
std::map<std::string, uint64_t> blocked_signals() {
  std::map<std::string, uint64_t> result;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(task.path() / "status");
    for (std::string line; std::getline(status, line);) {
      if (line.rfind("SigBlk:", 0) == 0) result[task.path().filename()] = std::stoull(line.substr(7), nullptr, 16);
    }
  }
  return result;
}

// A write to a dead peer must not be the end of this process: no thread of Gloo or of the store gets the signal, and
// the program's own threads keep their masks.
FSDP_PROCESS_BODY(gloo_sigpipe) {
  constexpr uint64_t kSigpipe = 1ull << (SIGPIPE - 1);
  const auto before = blocked_signals();
  init_process_group({.engine = "gloo", .timeout = std::chrono::seconds(30)});
  barrier();
  size_t started = 0;
  for (const auto& [thread, mask] : blocked_signals()) {
    const bool own = before.count(thread) > 0;
    EXPECT_EQ((mask & kSigpipe) != 0, !own) << "thread " << thread;
    started += !own;
  }
  EXPECT_GT(started, 0u);
  destroy_process_group();
}

TEST(GlooProcs, ItsThreadsBlockSigpipe) { run_processes(2, "gloo_sigpipe"); }

FSDP_PROCESS_BODY(gloo_killed_while_sending) {
  init_process_group({.engine = "gloo", .timeout = std::chrono::seconds(30)});
  auto& channel = mesh::World::current()->channel();
  const auto mine = at::ones({20'000}), out = at::zeros({20'000 * world_size()});
  channel.all_gather_even(out, mine)->wait();
  if (rank() == world_size() - 1) ::raise(SIGKILL);
  // Many in flight: some find the peer there, some a closed connection.
  std::vector<std::unique_ptr<Pending>> sent;
  bool failed = false;
  for (int i = 0; i < 200 && !failed; ++i) {
    try {
      sent.push_back(channel.all_gather_even(at::zeros({20'000 * world_size()}), mine));
      if (i >= 20) sent[static_cast<size_t>(i) - 20]->wait();
    } catch (const CommError&) {
      failed = true;
    }
  }
  EXPECT_TRUE(failed);
}

TEST(GlooFault, APeerKilledWhileOthersSendToItKillsNobody) {
  run_processes(3, "gloo_killed_while_sending", {.expected_to_fail = {2}});
}

FSDP_PROCESS_BODY(gloo_stuck_peer) {
  init_process_group({.engine = "gloo", .timeout = std::chrono::seconds(2)});
  auto& channel = mesh::World::current()->channel();
  barrier();
  if (rank() == 1) {
    ::sleep(6);
    return;
  }
  const auto mine = at::ones({1000}), out = at::zeros({2000});
  expect_failure<TimeoutError>(std::chrono::seconds(6), [&] { return channel.all_gather_even(out, mine); });
}

TEST(GlooFault, AStuckPeerIsATimeoutError) { run_processes(2, "gloo_stuck_peer"); }

}  // namespace
}  // namespace fsdp::comm
