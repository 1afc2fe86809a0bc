// What ranks run that a launcher of another kind started than run_processes (mpirun, one shell a host), on the engine
// that LIBFSDP_TEST_ENGINE names; the tests are in tests/python.
#include <cstdlib>
#include <iostream>

#include <fsdp/distributed.h>
#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include "channel_checks.h"
#include "comm/hosts_channel.h"
#include "mesh/world.h"
#include "support/processes.h"

namespace fsdp::comm {
namespace {

std::string engine() {
  const char* given = std::getenv("LIBFSDP_TEST_ENGINE");
  return given ? given : "";
}

/// One line, which the test looks for.
void say(const char* what) {
  const bool hosts = dynamic_cast<HostsChannel*>(&mesh::World::current()->channel()) != nullptr;
  if (rank() == 0) {
    std::cout << what << " on " << world_size() << " ranks" << (hosts ? ", first their host's, then all" : "")
              << std::endl;
  }
}

FSDP_PROCESS_BODY(launched_collectives) {
  init_process_group({.engine = engine(), .timeout = std::chrono::seconds(60)});
  auto& channel = mesh::World::current()->channel();
  check_channel(channel);
  check_all_gather(channel, shard::Segments(world_size(), 1'000'000), at::kFloat);
  check_reduce_scatter(channel, shard::Segments(world_size(), 1'000'000), at::kFloat);
  for (const auto dtype : {at::kHalf, at::kBFloat16}) check_all_reduce(channel, dtype);
  // A channel among some of the ranks, numbered in another order.
  if (world_size() > 2 && rank() % 2 == 0 && rank() < 3) {
    const auto part = mesh::World::current()->open_channel({2, 0}, "part");
    EXPECT_EQ(part->rank(), rank() == 2 ? 0 : 1);
    check_channel(*part);
  }
  // One rank computes before it comes: the others' message arrives meanwhile, or is waited for.
  if (rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
  check_reduce_scatter(channel, shard::Segments(world_size(), 300'000), at::kDouble);
  say("collectives done");
  destroy_process_group();
}

FSDP_PROCESS_BODY(launched_trains) {
  init_process_group({.engine = engine(), .timeout = std::chrono::seconds(60)});
  const auto make = [] {
    torch::manual_seed(5);
    return torch::nn::Sequential(torch::nn::Linear(6, 17), torch::nn::Tanh(), torch::nn::Linear(17, 3));
  };
  const auto x = at::linspace(-1, 1, 24).view({4, 6});
  auto plain = make(), net = make();
  auto model = fully_shard(net);
  torch::optim::SGD theirs(plain->parameters(), 0.1), ours(net->parameters(), 0.1);
  for (int step = 0; step < 3; ++step) {
    theirs.zero_grad();
    ours.zero_grad();
    plain->forward(x).pow(2).mean().backward();
    model(x).pow(2).mean().backward();
    theirs.step();
    ours.step();
  }
  for (size_t i = 0; i < plain->parameters().size(); ++i) {
    EXPECT_TRUE(at::allclose(dtensor(net->parameters()[i]).full_tensor(), plain->parameters()[i], 1e-5, 1e-6));
  }
  say("trained");
  destroy_process_group();
}

}  // namespace
}  // namespace fsdp::comm
