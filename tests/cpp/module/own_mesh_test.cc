// Parameters over a mesh of their own (ShardPlacementResult): experts, of which each half of the ranks has others.
#include <cmath>

#include "nets.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

using torch::nn::Linear;

struct ExpertBlock : torch::nn::Module {
  ExpertBlock() {
    register_module("before", before);
    experts = register_parameter("experts", torch::zeros({3, 5, 5}));
    register_module("after", after);
  }
  at::Tensor forward(const at::Tensor& x) {
    return x + after(at::einsum("si,eij->sj", {at::tanh(before(x)), experts}));
  }
  Linear before{6, 5}, after{5, 6};
  at::Tensor experts;
};

/// Values that differ everywhere, and those of experts between the halves too.
struct ExpertNet : Net {
  explicit ExpertNet(int64_t half) {
    for (int i = 0; i < 2; ++i)
      blocks.push_back(register_module("block" + std::to_string(i), std::make_shared<ExpertBlock>()));
    own = register_parameter("own", torch::zeros({5}));
    at::NoGradGuard no_grad;
    double shift = 0.01;
    for (const auto& item : named_parameters()) {
      const auto values =
          ramp(item.value().sizes().vec()) * 0.3 + (shift += 0.01) + (is_own(item.key()) ? 0.1 * half : 0);
      item.value().set_data(values);
    }
  }
  at::Tensor forward(const at::Tensor& x) override {
    auto h = x;
    for (const auto& block : blocks) h = block->forward(h);
    return h * own.mean();
  }
  static bool is_own(const std::string& name) { return name.find("experts") != name.npos || name == "own"; }

  std::vector<std::shared_ptr<ExpertBlock>> blocks;
  at::Tensor own;
};

constexpr int64_t kHalves = 2;

/// The mesh of all, and this rank's half of it.
struct Meshes {
  Meshes() : both(init_device_mesh(at::kCPU, {kHalves, world_size() / kHalves}, {"half", "within"})) {}
  DeviceMesh both, all = both.flatten("all"), within = both["within"];
  int64_t half() const { return both.coordinate(0); }
};

FullyShardOptions options_of(const Meshes& meshes, const ExpertNet& net) {
  FullyShardOptions options;
  options.mesh = meshes.all;
  std::vector<at::Tensor> own;
  for (const auto& item : net.named_parameters()) {
    if (ExpertNet::is_own(item.key())) own.push_back(item.value());
  }
  options.shard_placement_fn = [own, mesh = meshes.within](const at::Tensor& p) -> std::optional<ShardPlacementResult> {
    for (const auto& each : own) {
      if (p.is_same(each)) return ShardPlacementResult({Placement::Kind::kShard, 0}, mesh);
    }
    return std::nullopt;
  };
  return options;
}

Handle shard(const std::shared_ptr<ExpertNet>& net, const FullyShardOptions& options) {
  for (const auto& block : net->blocks) fully_shard(block, options);
  return fully_shard(NetPtr(net), options);
}

at::Tensor loss_of(Net& net, const at::Tensor& x) { return net.forward(x).pow(2).mean(); }

/// Each half's plain model with the gradients that its sharded one gets: of experts the mean over the half's ranks, of
/// the others over all.
std::vector<std::shared_ptr<ExpertNet>> plain_halves() {
  return {std::make_shared<ExpertNet>(0), std::make_shared<ExpertNet>(1)};
}
void plain_backward(const std::vector<std::shared_ptr<ExpertNet>>& plains, const std::vector<at::Tensor>& xs) {
  const size_t within = xs.size() / kHalves;
  for (size_t half = 0; half < kHalves; ++half) {
    plains[half]->zero_grad();
    for (size_t r = 0; r < within; ++r) {
      (loss_of(*plains[half], xs[half * within + r]) / static_cast<double>(within)).backward();
    }
  }
  for (const auto& item : plains[0]->named_parameters()) {
    if (ExpertNet::is_own(item.key())) continue;
    const auto other = plains[1]->named_parameters()[item.key()];
    const auto mean = (item.value().grad() + other.grad()) / 2;
    item.value().mutable_grad() = mean;
    other.mutable_grad() = mean.clone();
  }
}

std::vector<at::Tensor> batches(int step) {
  std::vector<at::Tensor> xs;
  for (int r = 0; r < world_size(); ++r) xs.push_back(ramp({4, 6}) * (0.5 + 0.1 * r) + 0.05 * step);
  return xs;
}

struct OwnMeshThreads : OnRanks {
  void trains(const std::function<void(FullyShardOptions&)>& set, bool clips = false) {
    run_ranks(ranks(), [&](int rank) {
      const Meshes meshes;
      const auto net = std::make_shared<ExpertNet>(meshes.half());
      auto options = options_of(meshes, *net);
      set(options);
      auto model = shard(net, options);
      const auto plains = plain_halves();
      auto& plain = *plains[static_cast<size_t>(meshes.half())];
      torch::optim::SGD optimizer(net->parameters(), 0.1), plain_optimizer(plain.parameters(), 0.1);
      for (int step = 0; step < 3; ++step) {
        const auto xs = batches(step);
        const auto loss = model(xs[static_cast<size_t>(rank)]).pow(2).mean();
        EXPECT_NEAR(loss.item<double>(), loss_of(plain, xs[static_cast<size_t>(rank)]).item<double>(), 1e-12);
        loss.backward();
        plain_backward(plains, xs);
        if (clips) clip(*net, plains);
        for (const auto& item : net->named_parameters()) {
          const auto expected = plain.named_parameters()[item.key()];
          EXPECT_LT(difference(dtensor(item.value().grad()).full_tensor(), expected.grad()), 1e-9) << item.key();
        }
        optimizer.step();
        // The shared parameters of the other half's model stay alike.
        plain_optimizer.step();
        torch::optim::SGD(plains[static_cast<size_t>(1 - meshes.half())]->parameters(), 0.1).step();
        optimizer.zero_grad();
      }
      for (const auto& item : net->named_parameters()) {
        const auto whole = dtensor(item.value()).full_tensor();
        EXPECT_LT(difference(whole, plain.named_parameters()[item.key()].detach()), 1e-9) << item.key();
        EXPECT_EQ(dtensor(item.value()).device_mesh(), ExpertNet::is_own(item.key()) ? meshes.within : meshes.all);
      }
      EXPECT_EQ(model.state()->context().stats().unsharded_gradients.now, 0);
    });
  }

  /// The norm is of all experts, of both halves: every rank scales alike.
  static void clip(ExpertNet& net, const std::vector<std::shared_ptr<ExpertNet>>& plains) {
    double squares = 0;
    for (size_t half = 0; half < kHalves; ++half) {
      for (const auto& item : plains[half]->named_parameters()) {
        if (half == 0 || ExpertNet::is_own(item.key())) squares += item.value().grad().pow(2).sum().item<double>();
      }
    }
    const double norm = std::sqrt(squares), most = norm / 2;
    EXPECT_NEAR(clip_grad_norm_(net.parameters(), most).item<double>(), norm, 1e-6 * norm);
    at::NoGradGuard no_grad;
    for (const auto& plain : plains) {
      for (auto& parameter : plain->parameters()) parameter.mutable_grad().mul_(most / (norm + 1e-6));
    }
  }
};

TEST_P(OwnMeshThreads, Trains) {
  trains([](auto&) {});
}
TEST_P(OwnMeshThreads, TrainsWithoutResharding) {
  trains([](auto& options) { options.reshard_after_forward = false; });
}
TEST_P(OwnMeshThreads, TrainsKeptOverSomeRanks) {
  trains([&](auto& options) { options.reshard_after_forward = int64_t{ranks() / 2}; });
}
TEST_P(OwnMeshThreads, ClipsByTheNormOfAllExperts) {
  trains([](auto&) {}, /*clips=*/true);
}

TEST_P(OwnMeshThreads, AModuleOfItsOwnInsideOneOverAll) {
  run_ranks(ranks(), [&](int rank) {
    const Meshes meshes;
    const auto make = [&] {
      auto net = std::make_shared<ExpertNet>(0);
      at::NoGradGuard no_grad;
      for (auto& parameter : net->blocks[0]->parameters()) parameter.add_(0.1 * static_cast<double>(meshes.half()));
      return net;
    };
    const auto net = make(), plain = make();
    // All of the first block is the half's own; the rest is everybody's.
    fully_shard(net->blocks[0], {.mesh = meshes.within});
    auto model = fully_shard(NetPtr(net), {.mesh = meshes.all});
    model(batches(0)[static_cast<size_t>(rank)]).pow(2).mean().backward();
    const int within = ranks() / static_cast<int>(kHalves);
    for (int r = 0; r < within; ++r) {
      const auto x = batches(0)[static_cast<size_t>(meshes.half() * within + r)];
      (loss_of(*plain, x) / within).backward();
    }
    for (const auto& item : net->blocks[0]->named_parameters()) {
      const auto expected = plain->blocks[0]->named_parameters()[item.key()].grad();
      EXPECT_LT(difference(dtensor(item.value().grad()).full_tensor(), expected), 1e-9) << item.key();
    }
  });
}

TEST_P(OwnMeshThreads, ControlsReachBothGroups) {
  run_ranks(ranks(), [&](int rank) {
    const Meshes meshes;
    const auto net = std::make_shared<ExpertNet>(meshes.half());
    auto model = shard(net, options_of(meshes, *net));
    const auto x = batches(0)[static_cast<size_t>(rank)];
    model(x);
    auto block = fsdp_module(net->blocks[0]);
    EXPECT_EQ(block.fqn(), "block0");
    block.unshard(/*async_op=*/true).wait();
    {
      at::NoGradGuard no_grad;
      EXPECT_EQ(net->blocks[0]->experts.transpose(1, 2).size(0), 3);  // read whole, outside a forward
      EXPECT_EQ(net->blocks[0]->before->weight.t().size(0), 6);
    }
    block.reshard();
    model.set_requires_gradient_sync(false);
    model(x).pow(2).mean().backward();
    for (const auto& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
    model.set_requires_gradient_sync(true);
    model(x).pow(2).mean().backward();
    std::vector<at::Tensor> twice;
    for (const auto& parameter : net->parameters()) twice.push_back(dtensor(parameter.grad()).full_tensor());
    net->zero_grad();
    model(x).pow(2).mean().backward();
    size_t i = 0;
    for (const auto& item : net->named_parameters()) {
      EXPECT_LT(difference(2 * dtensor(item.value().grad()).full_tensor(), twice[i++]), 1e-9) << item.key();
    }
    EXPECT_NE(model.schedule().find("block1 over {within}"), std::string::npos) << model.schedule();
  });
}

FSDP_ON_RANKS(OwnMeshThreads, 2, 4, 6);

TEST(OwnMeshHybridThreads, ReplicasOfItsOwn) {
  auto c = mlp({12, 9, 12}, 8);
  c.wrap = [](const NetPtr& net, Grouping grouping) {
    FullyShardOptions options;
    const auto both = init_device_mesh(at::kCPU, {2, 2}, {"replicate", "shard"});
    options.mesh = both.flatten("all");
    options.shard_placement_fn = [both](const at::Tensor& p) -> std::optional<ShardPlacementResult> {
      if (p.dim() == 1) return std::nullopt;
      return ShardPlacementResult({Placement::Kind::kShard, 0}, both);
    };
    if (grouping == Grouping::kChildren) shard_children(*net, options);
    return fully_shard(net, options);
  };
  expect_parity(4, c);
}

TEST(OwnMeshRefusalThreads, SaysWhatDoesNotFit) {
  std::vector<std::string> errors(4), saves(4);
  run_ranks(4, [&](int rank) {
    const Meshes meshes;
    const auto message = [](const auto& act) -> std::string {
      try {
        act();
      } catch (const std::exception& error) {
        return error.what();
      }
      return "";
    };
    errors[static_cast<size_t>(rank)] = message([&] {
      FullyShardOptions options;
      options.mesh = meshes.within;
      options.shard_placement_fn = [&](const at::Tensor&) -> std::optional<ShardPlacementResult> {
        return ShardPlacementResult({Placement::Kind::kShard, 0}, meshes.all);
      };
      fully_shard(Linear(4, 4), options);
    });
    EXPECT_NE(message([&] {
                torch::nn::Sequential net(Linear(4, 4), Linear(4, 4));
                fully_shard(net->ptr(0), {.mesh = meshes.all});
                fully_shard(net, {.mesh = meshes.within});
              }).find("has ranks that the mesh of its enclosing module does not have"),
              std::string::npos);
    const auto net = std::make_shared<ExpertNet>(meshes.half());
    const auto model = shard(net, options_of(meshes, *net));
    saves[static_cast<size_t>(rank)] = message([&] { save(*net, "never-written"); });
  });
  for (const auto& error : errors) {
    EXPECT_NE(error.find("'weight'"), std::string::npos) << error;
    EXPECT_NE(error.find("its own mesh DeviceMesh(cpu, all=4) has ranks"), std::string::npos) << error;
  }
  for (const auto& error : saves)
    EXPECT_NE(error.find("lies over 2 of the world's 4 ranks"), std::string::npos) << error;
}

}  // namespace
}  // namespace fsdp::testing
