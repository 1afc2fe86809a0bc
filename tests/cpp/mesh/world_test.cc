#include <gtest/gtest.h>

#include <sstream>
#include <thread>

#include <fsdp/device_mesh.h>
#include <fsdp/distributed.h>
#include <fsdp/error.h>

#include "mesh/mesh_state.h"
#include "ranks.h"

namespace fsdp {
namespace {

using testing::run_ranks;

TEST(World, IsOneRankWithoutAGroup) {
  EXPECT_FALSE(is_initialized());
  EXPECT_EQ(rank(), 0);
  EXPECT_EQ(world_size(), 1);
  barrier();
  EXPECT_EQ(all_reduce_mean(at::full({2}, 3.0)).sum().item<double>(), 6.0);
}

TEST(WorldThreads, EachThreadIsARank) {
  run_ranks(3, [](int r) {
    EXPECT_EQ(rank(), r);
    EXPECT_EQ(world_size(), 3);
    barrier();
    EXPECT_EQ(all_reduce_mean(at::full({1}, static_cast<double>(r))).item<double>(), 1.0);
  });
}

}  // namespace
}  // namespace fsdp
