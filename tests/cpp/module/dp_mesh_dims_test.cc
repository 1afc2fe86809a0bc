// The data-parallel axes of a mesh that has others: along those each rank's parameters are its own.
#include "nets.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

using torch::nn::Linear;

/// Of another width and other values for each rank of the other axis.
std::shared_ptr<MlpNet> net_of(int64_t other) {
  auto net = std::make_shared<MlpNet>(std::vector<int64_t>{6, 5 + other, 6});
  at::NoGradGuard no_grad;
  double shift = 0.1 * static_cast<double>(other);
  for (auto& parameter : net->parameters()) parameter.set_data(ramp(parameter.sizes().vec()) * 0.3 + (shift += 0.02));
  return net;
}

/// This rank's samples are of its place among the data-parallel ranks.
at::Tensor batch(int64_t place) { return ramp({4, 6}) * (0.5 + 0.1 * static_cast<double>(place)); }

/// Trains beside the plain model of this rank's place on the other axis, whose gradient is the mean over the
/// `data_ranks` ranks of the data-parallel axes, of which this one is `place`. `looks` looks at the sharded one.
void trains(const FullyShardOptions& options, int64_t other, int64_t data_ranks, int64_t place,
            const std::function<void(MlpNet&)>& looks) {
  const auto net = net_of(other), plain = net_of(other);
  for (auto& layer : net->layers) fully_shard(layer, options);
  auto model = fully_shard(NetPtr(net), options);
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(0.05).eps(1e-3));
  torch::optim::AdamW plain_optimizer(plain->parameters(), torch::optim::AdamWOptions(0.05).eps(1e-3));
  for (int step = 0; step < 3; ++step) {
    optimizer.zero_grad();
    plain_optimizer.zero_grad();
    model(batch(place)).pow(2).mean().backward();
    for (int64_t r = 0; r < data_ranks; ++r) {
      (plain->forward(batch(r)).pow(2).mean() / static_cast<double>(data_ranks)).backward();
    }
    for (const auto& item : net->named_parameters()) {
      const auto expected = plain->named_parameters()[item.key()].grad();
      EXPECT_LT(difference(dtensor(item.value().grad()).full_tensor(), expected), 1e-9) << item.key();
    }
    optimizer.step();
    plain_optimizer.step();
  }
  for (const auto& item : net->named_parameters()) {
    const auto expected = plain->named_parameters()[item.key()].detach();
    EXPECT_LT(difference(dtensor(item.value()).full_tensor(), expected), 1e-9) << item.key();
  }
  looks(*net);
}

struct Axes {
  const char* name;
  std::vector<std::string> names;  // of a mesh of 2 x 2 x 2
  DataParallelMeshDims dims;
  std::vector<std::string> data;  // all data-parallel axes, replicating ones first
  std::string other;
  std::vector<int64_t> shape;  // of what parameters show
};

struct DpMeshDimsThreads : ::testing::TestWithParam<Axes> {};

TEST_P(DpMeshDimsThreads, EightRanks) {
  const auto& axes = GetParam();
  run_ranks(8, [&](int) {
    const auto mesh = init_device_mesh(at::kCPU, {2, 2, 2}, axes.names);
    int64_t place = 0, ranks = 1;
    for (const auto& name : axes.data) place = place * 2 + mesh[name].coordinate(0), ranks *= 2;
    FullyShardOptions options;
    options.mesh = mesh;
    options.dp_mesh_dims = axes.dims;
    const int64_t other = axes.other.empty() ? 0 : mesh[axes.other].coordinate(0);
    trains(options, other, ranks, place, [&](MlpNet& net) {
      const auto weight = dtensor(net.layers[0]->weight);
      EXPECT_EQ(weight.device_mesh().shape(), axes.shape);
      EXPECT_EQ(weight.placements().size(), axes.shape.size());
      const int64_t cut = axes.shape.back(), rows = 5 + other;
      EXPECT_LE(weight.to_local().size(0), (rows + cut - 1) / cut);
    });
  });
}

INSTANTIATE_TEST_SUITE_P(
    Meshes, DpMeshDimsThreads,
    ::testing::Values(
        Axes{"TwoShardAxesAndAnother", {"dp", "cp", "tp"}, {.shard = {"dp", "cp"}}, {"dp", "cp"}, "tp", {4}},
        Axes{"TheOtherFirst", {"tp", "dp", "cp"}, {.shard = {"dp", "cp"}}, {"dp", "cp"}, "tp", {4}},
        Axes{"Hybrid", {"dp", "tp", "cp"}, {.shard = {"cp"}, .replicate = {"dp"}}, {"dp", "cp"}, "tp", {2, 2}},
        Axes{"TwoReplicateAxes",
             {"a", "b", "c"},
             {.shard = {"c"}, .replicate = {"a", "b"}},
             {"a", "b", "c"},
             "",
             {4, 2}},
        Axes{"OnlyReplicas", {"dp", "cp", "tp"}, {.replicate = {"dp", "cp"}}, {"dp", "cp"}, "tp", {4, 1}}),
    [](const auto& info) { return info.param.name; });

TEST(DpMeshDimsRefusalThreads, NamesThatTheMeshDoesNotHave) {
  run_ranks(2, [&](int) {
    const auto error_of = [](DataParallelMeshDims dims) -> std::string {
      FullyShardOptions options;
      options.mesh = init_device_mesh(at::kCPU, {1, 2}, {"dp", "tp"});
      options.dp_mesh_dims = std::move(dims);
      try {
        fully_shard(Linear(4, 4), options);
      } catch (const InvalidArgument& error) {
        return error.what();
      }
      return "";
    };
    EXPECT_NE(error_of({.shard = {"data"}}).find("the axis 'data'"), std::string::npos);
    EXPECT_NE(error_of({}).find("name no axis"), std::string::npos);
    EXPECT_NE(error_of({.shard = {"dp"}, .replicate = {"dp"}}).find("may be used once"), std::string::npos);
  });
}

TEST(DpMeshDimsRefusalThreads, ThreeAxesWithoutNames) {
  run_ranks(1, [&](int) {
    EXPECT_THROW(fully_shard(Linear(4, 4), {.mesh = init_device_mesh(at::kCPU, {1, 1, 1})}), InvalidArgument);
  });
}

}  // namespace
}  // namespace fsdp::testing
