// The engine mpi: what its ranks do besides launched_test.cc; tests/python/test_mpi.py starts them.
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
