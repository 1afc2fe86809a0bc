#include <signal.h>
#include <unistd.h>

#include <chrono>

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
  init_process_group({.timeout = std::chrono::seconds(30)});
  check_channel(mesh::World::current()->channel());
  // Larger than the sockets' buffers, both ways at once.
  check_all_gather(mesh::World::current()->channel(), shard::Segments(world_size(), 3'000'000), at::kFloat);
  check_reduce_scatter(mesh::World::current()->channel(), shard::Segments(world_size(), 3'000'000), at::kFloat);
  destroy_process_group();
}

class GlooProcs : public ::testing::TestWithParam<int> {};

TEST_P(GlooProcs, DoesEveryCollective) { run_processes(GetParam(), "gloo_collectives"); }

INSTANTIATE_TEST_SUITE_P(Worlds, GlooProcs, ::testing::Values(2, 3));

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
  init_process_group({.timeout = std::chrono::seconds(30)});
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

FSDP_PROCESS_BODY(gloo_stuck_peer) {
  init_process_group({.timeout = std::chrono::seconds(2)});
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
