// Memory that the ranks of a channel have in common.
#include "comm/common_memory.h"

#include <cstring>
#include <numeric>
#include <vector>

#include <fsdp/distributed.h>
#include <fsdp/error.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "mesh/world.h"
#include "support/processes.h"
#include "support/ranks.h"

namespace fsdp::comm {
namespace {

using testing::run_processes;
using testing::run_ranks;

std::shared_ptr<Channel> channel_here() {
  const auto world = mesh::World::current();
  std::vector<int> ranks(static_cast<size_t>(world->size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return world->open_channel(ranks, "test");
}

constexpr int64_t kPages = 3;
int64_t bytes() { return kPages * ::sysconf(_SC_PAGESIZE); }

/// Every rank writes a byte of each page, and sees all ranks'; what it writes to own() it alone sees, and drops.
void check_memory() {
  const auto channel = channel_here();
  const auto memory = CommonMemory::make(*channel, bytes());
  const int rank = channel->rank(), size = channel->size();
  const int64_t page = bytes() / kPages;
  for (int64_t p = 0; p < kPages; ++p) memory->shared()[p * page + rank] = static_cast<char>(10 + rank);
  barrier();
  const auto expect_theirs = [&](char step) {
    for (int64_t p = 0; p < kPages; ++p) {
      for (int r = 0; r < size; ++r) EXPECT_EQ(memory->own()[p * page + r], 10 + r + step) << "page " << p;
    }
  };
  expect_theirs(0);
  barrier();
  memory->own()[page + 100 + rank] = 1;  // the second page is this rank's own now
  barrier();
  for (int64_t p = 0; p < kPages; ++p) memory->shared()[p * page + rank] = static_cast<char>(20 + rank);
  barrier();
  for (int r = 0; r < size; ++r) {
    EXPECT_EQ(memory->own()[r], 20 + r);
    EXPECT_EQ(memory->own()[page + r], 10 + r) << "as it was when this rank wrote there";
    EXPECT_EQ(memory->own()[page + 100 + r], r == rank ? 1 : 0) << "a peer's own write";
    EXPECT_EQ(memory->shared()[page + 100 + r], 0);
  }
  memory->drop_own_writes();
  expect_theirs(10);
  EXPECT_EQ(memory->own()[page + 100 + rank], 0);
  barrier();
}

struct CommonMemoryThreads : ::testing::TestWithParam<int> {};
TEST_P(CommonMemoryThreads, IsOneForAll) {
  run_ranks(GetParam(), [](int) { check_memory(); });
}
INSTANTIATE_TEST_SUITE_P(Worlds, CommonMemoryThreads, ::testing::Values(1, 2, 3, 5));

TEST(CommonMemoryManyThreads, LeavesNoDescriptorBehind) {
  run_ranks(2, [](int) {
    const auto channel = channel_here();
    std::vector<std::shared_ptr<CommonMemory>> many;
    // More than a process may have open by default.
    for (int i = 0; i < 1100; ++i) many.push_back(CommonMemory::make(*channel, 64));
    many.back()->shared()[channel->rank()] = 1;
    barrier();
    EXPECT_EQ(many.back()->own()[0] + many.back()->own()[1], 2);
    barrier();
  });
}

FSDP_PROCESS_BODY(memory_of_processes) {
  init_process_group({.engine = "shm", .timeout = std::chrono::seconds(30)});
  check_memory();
  barrier();
  destroy_process_group();
}
TEST(CommonMemoryProcs, IsOneForAll) { run_processes(3, "memory_of_processes"); }

FSDP_PROCESS_BODY(memory_over_gloo) {
  init_process_group({.engine = "gloo", .timeout = std::chrono::seconds(30)});
  EXPECT_THROW(CommonMemory::make(*channel_here(), 64), NotSupported);
  barrier();
  destroy_process_group();
}
TEST(CommonMemoryProcs, IsRefusedOnEveryRankOverGloo) { run_processes(2, "memory_over_gloo"); }

}  // namespace
}  // namespace fsdp::comm
