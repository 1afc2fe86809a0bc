// What ranks of an MPI job run; tests/python/test_mpi.py starts them.
#include <algorithm>

#include <fsdp/distributed.h>
#include <fsdp/error.h>
#include <fsdp/fsdp.h>
#include <torch/torch.h>

#include "channel_checks.h"
#include "mesh/world.h"
#include "support/processes.h"

namespace fsdp::comm {
namespace {

FSDP_PROCESS_BODY(mpi_collectives) {
  init_process_group({.engine = "mpi", .timeout = std::chrono::seconds(60)});
  auto& channel = mesh::World::current()->channel();
  check_channel(channel);
  check_all_gather(channel, shard::Segments(world_size(), 1'000'000), at::kFloat);
  check_reduce_scatter(channel, shard::Segments(world_size(), 1'000'000), at::kFloat);
  for (const auto dtype : {at::kHalf, at::kBFloat16}) check_all_reduce(channel, dtype);
  // A channel among some of the ranks, numbered in another order.
  if (world_size() > 2 && rank() != 1) {
    const auto part = mesh::World::current()->open_channel({2, 0}, "part");
    EXPECT_EQ(part->rank(), rank() == 2 ? 0 : 1);
    check_channel(*part);
  }
  // One rank computes before it comes: the others' message arrives meanwhile, or is waited for.
  if (rank() == 0) std::this_thread::sleep_for(std::chrono::milliseconds(200));
  check_reduce_scatter(channel, shard::Segments(world_size(), 300'000), at::kDouble);
  if (rank() == 0) std::cout << "collectives done on " << world_size() << " ranks" << std::endl;
  destroy_process_group();
}

FSDP_PROCESS_BODY(mpi_timeout) {
  init_process_group({.engine = "mpi", .timeout = std::chrono::seconds(1)});
  auto& channel = mesh::World::current()->channel();
  barrier();
  if (rank() == 0) {
    EXPECT_THROW(channel.all_reduce(at::ones({4}), ReduceOp::kSum)->wait(), TimeoutError);
    std::cout << "rank 0 timed out" << std::endl;
    std::this_thread::sleep_for(std::chrono::seconds(2));  // what it left completes by itself; then MPI can end
  } else {
    std::this_thread::sleep_for(std::chrono::seconds(2));
    channel.all_reduce(at::ones({4}), ReduceOp::kSum)->wait();  // what rank 0 left on the wire
  }
}

FSDP_PROCESS_BODY(mpi_trains) {
  init_process_group({.engine = "mpi", .timeout = std::chrono::seconds(60)});
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
  if (rank() == 0) std::cout << "trained on " << world_size() << " ranks" << std::endl;
  destroy_process_group();
}

FSDP_PROCESS_BODY(mpi_without_mpirun) {
  init_process_group({.engine = "mpi", .timeout = std::chrono::seconds(60)});
  try {
    mesh::World::current()->channel();
    ADD_FAILURE() << "a channel without a job";
  } catch (const NotSupported& error) {
    EXPECT_NE(std::string(error.what()).find("mpirun"), std::string::npos) << error.what();
  }
  // Rank 0 has the store, and stays until the other one has come.
  auto& store = *mesh::World::current()->store();
  store.add("told", 1);
  while (rank() == 0 && store.add("told", 0) < world_size()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

// Without mpirun there is no job to join.
TEST(MpiProcs, WithoutMpirunItSaysWhatToDo) {
  const auto known = engines();
  if (std::find(known.begin(), known.end(), "mpi") == known.end()) GTEST_SKIP() << "this build found no MPI";
  testing::run_processes(2, "mpi_without_mpirun");
}

}  // namespace
}  // namespace fsdp::comm
