// Channels over several hosts. The hosts are names here: ranks of one name meet in shared memory.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <fsdp/distributed.h>
#include <fsdp/error.h>
#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "channel_checks.h"
#include "comm/backends/backends.h"
#include "comm/backends/shm/shm_channel.h"
#include "comm/hosts_channel.h"
#include "mesh/world.h"
#include "support/processes.h"
#include "support/ranks.h"

namespace fsdp::comm {
namespace {

using testing::run_processes;
using testing::run_ranks;

Rendezvous here(std::chrono::milliseconds timeout = std::chrono::seconds(30)) {
  const auto world = mesh::World::current();
  return {.store = world->store(), .rank = world->rank(), .size = world->size(), .timeout = timeout, .name = "test"};
}

// Digits: how many ranks each host has.
std::string host_of(const std::string& layout, int rank) {
  size_t host = 0;
  for (int end = layout[0] - '0'; rank >= end; end += layout[++host] - '0') {
  }
  return "host" + std::to_string(host);
}

int ranks_of(const std::string& layout) {
  int ranks = 0;
  for (const char digit : layout) ranks += digit - '0';
  return ranks;
}

TEST(Hosts, AreBlocksOfRanks) {
  const auto hosts = Hosts::of_words({"a", "a", "b", "c", "c"}, 3);
  EXPECT_EQ(hosts.first, (std::vector<int>{0, 2, 3, 5}));
  EXPECT_EQ(hosts.mine, 2);
  EXPECT_EQ(hosts.count(), 3);
  EXPECT_EQ(hosts.ranks(0), 2);
  EXPECT_EQ(hosts.of(2), 1);
  EXPECT_EQ(Hosts::of_words({"a", "b", "a"}, 0).count(), -1);
}

class HostsThreads : public ::testing::TestWithParam<const char*> {};

TEST_P(HostsThreads, DoEveryCollective) {
  const std::string layout = GetParam();
  run_ranks(ranks_of(layout), [&](int rank) {
    const auto channel = open_over_hosts(here(), host_of(layout, rank), "inproc");
    ASSERT_NE(dynamic_cast<HostsChannel*>(channel.get()), nullptr);
    check_channel(*channel);
    check_all_gather(*channel, shard::Segments(channel->size(), 70'001), at::kBFloat16);
    check_reduce_scatter(*channel, shard::Segments(channel->size(), 70'001), at::kFloat);
    for (int root = 0; root < channel->size(); ++root) {
      const auto tensor = pattern(1000, rank, at::kFloat);
      channel->broadcast(tensor, root)->wait();
      expect_equal(tensor, pattern(1000, root, at::kFloat), "broadcast");
    }
  });
}

// Inputs from buffer(), asked for while earlier collectives run; every result right.
TEST_P(HostsThreads, ManyInFlightWhileOneRankIsLate) {
  const std::string layout = GetParam();
  run_ranks(ranks_of(layout), [&](int rank) {
    const auto channel = open_over_hosts(here(), host_of(layout, rank), "inproc");
    const int64_t world = channel->size();
    std::vector<at::Tensor> sums;
    std::vector<std::unique_ptr<Pending>> pending;
    for (int i = 0; i < 120; ++i) {
      if (rank == 1 && i % 40 == 39) std::this_thread::sleep_for(std::chrono::milliseconds(20));
      const auto in = channel->buffer(world * 40 * 4, at::kCPU).view(at::kFloat);
      in.fill_(static_cast<float>(i + rank));
      sums.push_back(at::empty({40}));
      pending.push_back(channel->reduce_scatter(sums.back(), in, shard::Segments(world, 40)));
      const auto all = at::empty({world * 3});
      const auto gathered = channel->all_gather_even(all, at::full({3}, static_cast<float>(i * rank)));
      if (i % 3 == 0) gathered->wait();
      if (i % 7 != 0) continue;
      gathered->wait();
      ASSERT_TRUE(at::equal(all, (at::arange(world, at::kFloat) * i).repeat_interleave(3))) << i;
    }
    for (int i = 0; i < 120; ++i) {
      pending[i]->wait();
      ASSERT_TRUE(at::equal(sums[i], at::full({40}, static_cast<float>(world * i + world * (world - 1) / 2)))) << i;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, HostsThreads, ::testing::Values("21", "12", "22", "32", "212", "411"),
                         [](const auto& info) { return std::string("Of") + info.param; });

TEST(HostsChoiceThreads, FollowsWhereTheRanksAre) {
  run_ranks(3, [](int rank) {
    const auto open = [&](const std::vector<const char*>& hosts, const char* name) {
      auto rendezvous = here();
      rendezvous.name = name;
      rendezvous.store = c10::make_intrusive<c10d::PrefixStore>(name, rendezvous.store);
      return open_over_hosts(rendezvous, hosts[static_cast<size_t>(rank)], "inproc");
    };
    const auto is_shm = [](const auto& channel) { return dynamic_cast<shm::ShmChannel*>(channel.get()) != nullptr; };
    const auto is_mixed = [](const auto& channel) { return dynamic_cast<HostsChannel*>(channel.get()) != nullptr; };
    EXPECT_TRUE(is_shm(open({"a", "a", "a"}, "one")));
    EXPECT_TRUE(is_mixed(open({"a", "a", "b"}, "two")));
    for (const auto& channel : {open({"a", "b", "c"}, "three"), open({"a", "b", "a"}, "turns")}) {
      EXPECT_FALSE(is_shm(channel) || is_mixed(channel));
      check_all_gather(*channel, shard::Segments(3, 4), at::kFloat);
    }
  });
}

// --- what leaves a host ---------------------------------------------------------------------------------------------

std::atomic<int64_t> bytes_sent{0};

/// An in-process channel that counts what an all-to-all would send.
class CountingChannel final : public Channel {
 public:
  explicit CountingChannel(std::shared_ptr<Channel> below) : below_(std::move(below)) {}
  int rank() const override { return below_->rank(); }
  int size() const override { return below_->size(); }
  const std::string& name() const override { return below_->name(); }
  std::unique_ptr<Pending> all_gather(const at::Tensor& out, const at::Tensor& mine,
                                      const shard::Segments& segments) override {
    bytes_sent += static_cast<int64_t>(mine.nbytes()) * (size() - 1);
    return below_->all_gather(out, mine, segments);
  }
  std::unique_ptr<Pending> reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                          const shard::Segments& segments) override {
    bytes_sent += static_cast<int64_t>(in.nbytes() - out.nbytes());
    return below_->reduce_scatter(out, in, segments);
  }
  std::unique_ptr<Pending> all_reduce(const at::Tensor& tensor, ReduceOp op) override {
    return below_->all_reduce(tensor, op);
  }
  std::unique_ptr<Pending> broadcast(const at::Tensor& tensor, int root) override {
    return below_->broadcast(tensor, root);
  }
  std::unique_ptr<Pending> all_gather_even(const at::Tensor& out, const at::Tensor& mine) override {
    return all_gather(out, mine, shard::Segments(size(), mine.numel()));
  }

 private:
  std::shared_ptr<Channel> below_;
};

TEST(HostsWireThreads, ABytePassesBetweenTwoHostsOnce) {
  register_engine("counting", [](const Rendezvous& rendezvous) {
    return std::make_shared<CountingChannel>(open_channel("inproc", rendezvous));
  });
  bytes_sent = 0;
  run_ranks(5, [](int rank) {
    const auto channel = open_over_hosts(here(), host_of("32", rank), "counting");
    check_all_gather(*channel, shard::Segments(5, 100), at::kFloat);
  });
  EXPECT_EQ(bytes_sent, 5 * 100 * 4);  // three shards one way, two the other
  bytes_sent = 0;
  run_ranks(5, [](int rank) {
    const auto channel = open_over_hosts(here(), host_of("32", rank), "counting");
    check_reduce_scatter(*channel, shard::Segments(5, 100), at::kFloat);
  });
  EXPECT_EQ(bytes_sent, 5 * 100 * 4);  // one sum a host, of what the other one's ranks need
}

// --- processes ------------------------------------------------------------------------------------------------------

std::shared_ptr<Channel> open_on_gloo(const std::string& layout, std::chrono::milliseconds timeout) {
  return open_over_hosts(here(timeout), host_of(layout, rank()), "gloo");
}

FSDP_PROCESS_BODY(hosts_collectives) {
  init_process_group({.engine = "gloo", .timeout = std::chrono::seconds(30)});
  {
    const auto channel = open_on_gloo(testing::process_arguments()[0], std::chrono::seconds(30));
    check_channel(*channel);
    check_all_gather(*channel, shard::Segments(world_size(), 300'000), at::kFloat);
    check_reduce_scatter(*channel, shard::Segments(world_size(), 300'000), at::kFloat);
    // A data loader's worker, say.
    const pid_t child = ::fork();
    if (child == 0) {
      const auto dropped = channel;
      const_cast<std::shared_ptr<Channel>&>(channel).reset();
      ::_exit(0);
    }
    int status = 1;
    ::waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    check_all_gather(*channel, shard::Segments(world_size(), 3), at::kFloat);
  }
  destroy_process_group();
}

TEST(HostsProcs, DoEveryCollective) { run_processes(4, "hosts_collectives", {.arguments = {"31"}}); }

// A rank dies: one that speaks for its host, and one that does not. Every other rank hears of it, on both hosts.
FSDP_PROCESS_BODY(hosts_killed_peer) {
  init_process_group({.engine = "gloo", .timeout = std::chrono::seconds(30)});
  const auto channel = open_on_gloo("22", std::chrono::seconds(30));
  const auto in = at::ones({1000 * world_size()}), out = at::zeros({1000});
  const auto sum = [&] { channel->reduce_scatter(out, in, shard::Segments(world_size(), 1000))->wait(); };
  for (int i = 0; i < 3; ++i) sum();
  if (rank() == std::stoi(testing::process_arguments()[0])) ::raise(SIGKILL);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THROW(
      {
        sum();  // what the dead rank had sent before may be enough for one
        sum();
      },
      CommError);
  EXPECT_THROW(sum(), CommError) << "a broken channel";
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

class HostsVictimsFault : public ::testing::TestWithParam<int> {};

TEST_P(HostsVictimsFault, AKilledPeerIsACommErrorOnEveryHost) {
  const int victim = GetParam();
  const auto results =
      run_processes(4, "hosts_killed_peer", {.arguments = {std::to_string(victim)}, .expected_to_fail = {victim}});
  EXPECT_EQ(results[static_cast<size_t>(victim)].exit_code, 128 + SIGKILL);
}

INSTANTIATE_TEST_SUITE_P(Victims, HostsVictimsFault, ::testing::Values(2, 3));

FSDP_PROCESS_BODY(hosts_stopped_peer) {
  init_process_group({.engine = "gloo", .timeout = std::chrono::seconds(10)});
  const auto channel = open_on_gloo("21", std::chrono::seconds(1));
  channel->all_reduce(at::ones({1}), ReduceOp::kSum)->wait();
  if (rank() == 1) {
    ::sleep(3);
    return;
  }
  const auto mine = at::ones({1000}), out = at::zeros({3000});
  EXPECT_THROW(channel->all_gather_even(out, mine)->wait(), Error);
}

TEST(HostsFault, AStuckPeerEndsTheWait) { run_processes(3, "hosts_stopped_peer"); }

}  // namespace
}  // namespace fsdp::comm
