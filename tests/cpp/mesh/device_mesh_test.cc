#include <fsdp/device_mesh.h>

#include <sstream>

#include <ATen/ATen.h>
#include <fsdp/distributed.h>
#include <fsdp/error.h>
#include <gtest/gtest.h>

#include "mesh/mesh_state.h"
#include "support/ranks.h"

namespace fsdp {
namespace {

using mesh::Lane;
using testing::run_ranks;
using Ranks = std::vector<int>;
using Shape = std::vector<int64_t>;
using Names = std::vector<std::string>;

double sum_over(comm::Channel& channel) {
  const auto value = at::full({1}, static_cast<double>(rank()));
  channel.all_reduce(value, comm::ReduceOp::kSum)->wait();
  return value.item<double>();
}

std::string text(const DeviceMesh& mesh) {
  std::ostringstream out;
  out << mesh;
  return out.str();
}

TEST(DeviceMesh, OneRank) {
  const auto mesh = init_device_mesh(c10::kCPU, {1});
  EXPECT_EQ(mesh.names(), Names{"dim_0"});
  EXPECT_EQ(mesh.size(), 1);
  EXPECT_EQ(mesh.coordinate(0), 0);
  EXPECT_EQ(text(mesh), "DeviceMesh(cpu, dim_0=1)");
  EXPECT_EQ(sum_over(*mesh.state()->axis_channel(0, Lane::kGather)), 0.0);
}

TEST(DeviceMesh, RefusesBadShapesAndNames) {
  EXPECT_THROW(init_device_mesh(c10::kCPU, {}), InvalidArgument);
  EXPECT_THROW(init_device_mesh(c10::kCPU, {2}), InvalidArgument);
  EXPECT_THROW(init_device_mesh(c10::kCPU, {0}), InvalidArgument);
  EXPECT_THROW(init_device_mesh(c10::kCPU, {1, 1}, {"dp"}), InvalidArgument);
  EXPECT_THROW(init_device_mesh(c10::kCPU, {1, 1}, {"dp", "dp"}), InvalidArgument);
  EXPECT_THROW(init_device_mesh(c10::kCPU, {1}, {""}), InvalidArgument);
}

TEST(DeviceMesh, UndefinedIsRefusedByName) {
  const DeviceMesh mesh;
  EXPECT_FALSE(mesh.defined());
  EXPECT_EQ(mesh, DeviceMesh());
  EXPECT_EQ(text(mesh), "DeviceMesh(undefined)");
  EXPECT_THROW(mesh.size(), InvalidArgument);
  EXPECT_THROW(mesh["dp"], InvalidArgument);
}

TEST(DeviceMesh, UnknownAxesAreRefusedWithTheKnownOnes) {
  const auto mesh = init_device_mesh(c10::kCPU, {1, 1}, {"dp", "tp"});
  try {
    mesh["pp"];
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("dp, tp"), std::string::npos) << error.what();
  }
  EXPECT_THROW((mesh[Names{"dp", "dp"}]), InvalidArgument);
  EXPECT_THROW(mesh[Names{}], InvalidArgument);
  EXPECT_THROW(mesh.coordinate(2), InvalidArgument);
  EXPECT_THROW(mesh.state()->axis_channel(-1, Lane::kGather), InvalidArgument);
}

TEST(DeviceMeshThreads, DifferentArgumentsAreAnErrorOnEveryRank) {
  run_ranks(4, [](int rank) {
    const auto make = [&](std::vector<int64_t> shape, std::vector<std::string> names) -> std::string {
      try {
        init_device_mesh(c10::kCPU, std::move(shape), std::move(names));
        return "";
      } catch (const InvalidArgument& error) {
        return error.what();
      }
    };
    const auto has = [](const std::string& what, const std::string& part) {
      EXPECT_NE(what.find(part), std::string::npos) << part << " is not in: " << what;
    };
    auto what = rank == 2 ? make({2, 2}, {"a", "b"}) : make({4}, {"dp"});
    has(what, "on rank " + std::to_string(rank));
    has(what, "(cpu, {4}, {dp})");
    has(what, "(cpu, {2, 2}, {a, b})");
    what = make({4}, {rank == 0 ? "dp" : "tp"});
    has(what, "{tp}");
    what = rank == 3 ? make({3}, {"dp"}) : make({4}, {"dp"});
    has(what, rank == 3 ? "of 3 ranks, but the world has 4" : "rank 3 asks for (cpu, {3}, {dp})");
    EXPECT_EQ(make({4}, {"dp"}), "");  // and all go on
  });
}

TEST(DeviceMeshThreads, OneAxis) {
  run_ranks(3, [](int r) {
    const auto mesh = init_device_mesh(c10::kCPU, {3}, {"dp"});
    EXPECT_EQ(mesh.ranks(), (Ranks{0, 1, 2}));
    EXPECT_EQ(mesh.coordinate(0), r);
    EXPECT_EQ(mesh["dp"], mesh);
    EXPECT_EQ(mesh, init_device_mesh(c10::kCPU, {3}, {"dp"}));
    EXPECT_NE(mesh, init_device_mesh(c10::kCPU, {3}, {"tp"}));
    auto& state = *mesh.state();
    EXPECT_EQ(state.axis_channel(0, Lane::kGather), state.flat_channel(Lane::kGather));
    EXPECT_NE(state.axis_channel(0, Lane::kGather), state.axis_channel(0, Lane::kReduce));
    EXPECT_EQ(sum_over(*state.axis_channel(0, Lane::kReduce)), 3.0);
  });
}

TEST(DeviceMeshThreads, TwoAxes) {
  run_ranks(6, [](int r) {
    const auto mesh = init_device_mesh(c10::kCPU, {2, 3}, {"replicate", "shard"});
    const int row = r / 3, column = r % 3;
    EXPECT_EQ(mesh.shape(), (Shape{2, 3}));
    EXPECT_EQ(mesh.coordinate(0), row);
    EXPECT_EQ(mesh.coordinate(1), column);
    auto& state = *mesh.state();
    const auto shard = state.axis_channel(1, Lane::kGather);
    EXPECT_EQ(shard->rank(), column);
    EXPECT_EQ(shard->name(), "shard.gather");
    EXPECT_EQ(sum_over(*shard), row * 9 + 3.0);
    EXPECT_EQ(sum_over(*state.axis_channel(0, Lane::kReduce)), 2.0 * column + 3);
    EXPECT_EQ(sum_over(*state.flat_channel(Lane::kGather)), 15.0);

    const auto sub = mesh["shard"];
    EXPECT_EQ(sub.ranks(), (Ranks{row * 3, row * 3 + 1, row * 3 + 2}));
    EXPECT_EQ(sub.coordinate(0), column);
    EXPECT_EQ(sub.state(), mesh["shard"].state());  // its channels are opened once
    EXPECT_EQ(sum_over(*sub.state()->axis_channel(0, Lane::kGather)), row * 9 + 3.0);
    EXPECT_EQ(mesh["replicate"].ranks(), (Ranks{column, column + 3}));

    const auto turned = mesh[Names{"shard", "replicate"}];
    EXPECT_EQ(turned.shape(), (Shape{3, 2}));
    EXPECT_EQ(turned.ranks(), (Ranks{0, 3, 1, 4, 2, 5}));
    EXPECT_EQ(turned.coordinate(0), column);
    EXPECT_EQ(turned.state()->flat_channel(Lane::kGather)->rank(), column * 2 + row);
    EXPECT_NE(turned, mesh);

    const auto flat = mesh.flatten("dp");
    EXPECT_EQ(flat.shape(), Shape{6});
    EXPECT_EQ(flat.names(), Names{"dp"});
    EXPECT_EQ(flat.coordinate(0), r);
    EXPECT_EQ(sum_over(*flat.state()->axis_channel(0, Lane::kGather)), 15.0);
    EXPECT_EQ(text(mesh), "DeviceMesh(cpu, replicate=2, shard=3)");
  });
}

}  // namespace
}  // namespace fsdp
