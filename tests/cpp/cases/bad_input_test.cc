// What can never work, found where it is passed, on every rank, with both sides named.
#include "cases.h"

namespace fsdp::testing {
namespace {

using torch::nn::Linear;

TEST(BadInputThreads, NoParameters) {
  expect_every_rank_says(errors_of(2, [](int) { fully_shard(torch::nn::ReLU()); }), {"no parameters", "ReLU"});
  expect_every_rank_says(errors_of(2, [](int) { fully_shard(std::vector<std::shared_ptr<torch::nn::Module>>{}); }),
                         {"at least one module"});
  expect_every_rank_says(errors_of(2, [](int) { fully_shard({std::shared_ptr<torch::nn::Module>()}); }), {"empty"});
}

TEST(BadInputThreads, TheSameModuleTwice) {
  expect_every_rank_says(errors_of(2,
                                   [](int) {
                                     Linear net(4, 4);
                                     fully_shard({net.ptr(), net.ptr()});
                                   }),
                         {"same module twice", "Linear"});
  expect_every_rank_says(errors_of(2,
                                   [](int) {
                                     Linear net(4, 4);
                                     fully_shard(net);
                                     fully_shard(net);
                                   }),
                         {"already applied", "Linear"});
  expect_every_rank_says(errors_of(2,
                                   [](int) {
                                     Stack net;
                                     shard_blocks(net, {});
                                     fully_shard({net->head.ptr(), net->blocks[0]});
                                   }),
                         {"already applied", "Linear"});
}

TEST(BadInputThreads, AParameterSharedByTwoGroups) {
  expect_every_rank_says(errors_of(2,
                                   [](int) {
                                     Stack net;
                                     const auto first = net->blocks->ptr<torch::nn::LinearImpl>(0);
                                     const auto second = net->blocks->ptr<torch::nn::LinearImpl>(1);
                                     second->weight = second->register_parameter("tied", first->weight);
                                     fully_shard(first);
                                     fully_shard(second);
                                   }),
                         {"'tied'", "shared by modules"});
}

/// Both ranks build `make(rank)` and shard it; both must say what each has.
void expect_models_differ(const std::function<void(int rank)>& shard, const std::vector<std::string>& words) {
  auto all = words;
  for (const auto* word : {"different models", "rank 0 has", "rank 1 has"}) all.push_back(word);
  expect_every_rank_says(errors_of(2, shard), all);
}

TEST(BadInputThreads, ModelsThatDiffer) {
  expect_models_differ(  // names
      [](int rank) {
        auto net = std::make_shared<torch::nn::SequentialImpl>();
        net->push_back(rank == 0 ? "left" : "right", Linear(4, 4));
        fully_shard(net);
      },
      {"left.weight", "right.weight"});
  expect_models_differ([](int rank) { fully_shard(Linear(4, rank == 0 ? 4 : 5)); }, {"[4, 4]", "[5, 4]"});  // shapes
  expect_models_differ(
      [](int rank) {
        Linear net(4, 4);
        if (rank == 1) net->to(at::kDouble);
        fully_shard(net);
      },
      {"Float", "Double"});
  expect_models_differ(
      [](int rank) {
        Linear net(4, 4);
        net->weight.requires_grad_(rank == 0);
        fully_shard(net);
      },
      {"weight", "frozen"});
  expect_models_differ([](int rank) { fully_shard(Linear(torch::nn::LinearOptions(4, 4).bias(rank == 0))); }, {"bias"});
  expect_models_differ(  // number of groups: one rank forgets to shard a block
      [](int rank) {
        Stack net;
        if (rank == 0) fully_shard(net->blocks[0]);
        fully_shard(net);
      },
      {"weight"});
  expect_models_differ(
      [](int rank) {
        fully_shard(Linear(4, 4), {.mp_policy = {.param_dtype = rank ? std::nullopt : std::optional(at::kBFloat16)}});
      },
      {"param_dtype BFloat16", "param_dtype -"});
}

TEST(BadInputThreads, OptionsThatDiffer) {
  expect_models_differ([](int rank) { fully_shard(Linear(4, 4), {.reshard_after_forward = rank == 0}); },
                       {"reshard_after_forward"});
  expect_models_differ(
      [](int rank) {
        Linear net(4, 4);
        fully_shard(net, {.ignored_params = rank ? std::vector<at::Tensor>{net->bias} : std::vector<at::Tensor>{}});
      },
      {"bias"});
}

TEST(BadInputThreads, AMeshLargerThanTheWorld) {
  expect_every_rank_says(errors_of(2, [](int) { init_device_mesh(at::kCPU, {4}, {"dp"}); }), {"4", "2"});
  expect_every_rank_says(errors_of(2, [](int) { init_device_mesh(at::kCPU, {2, 2}, {"a", "b"}); }), {"4", "2"});
}

struct PlacedImpl : torch::nn::Module {
  explicit PlacedImpl(at::Device device) {
    first = register_parameter("first", at::ones({4}));
    second = register_parameter("second", at::ones({4}, device));
  }
  at::Tensor first, second;
};

TEST(BadInputThreads, ParametersOnAnotherDevice) {
  const auto shard = [](at::DeviceType device) { fully_shard(std::make_shared<PlacedImpl>(device)); };
  expect_every_rank_says(errors_of(2, [&](int) { shard(at::kMeta); }), {"'second'", "meta", "cpu"});
  // One rank alone: the other hears whose.
  const auto errors = errors_of(2, [&](int rank) { shard(rank == 1 ? at::kMeta : at::kCPU); });
  expect_every_rank_says(errors, {"'second'", "meta"});
  EXPECT_NE(errors[0].find("rank 1"), std::string::npos) << errors[0];
}

// A buffer on the meta device has no values, and a state dict need not hold it. PyTorch's gives it memory and trains on
// what lies there.
TEST(BadInputThreads, Row12BufferOnMeta) {
  struct CountedImpl : torch::nn::Module {
    CountedImpl() {
      linear = register_module("linear", torch::nn::Linear(4, 4));
      count = register_buffer("count", at::arange(4).to(at::kMeta));
    }
    at::Tensor forward(const at::Tensor& x) { return linear(x) + count; }
    torch::nn::Linear linear{nullptr};
    at::Tensor count;
  };
  const auto model = [] { return torch::nn::Sequential(std::make_shared<CountedImpl>()); };
  expect_every_rank_says(errors_of(2, [&](int) { fully_shard(model()); }), {"buffer '0.count'", "meta"});
  expect_every_rank_says(errors_of(2, [&](int) { FullyShardedDataParallel<torch::nn::Sequential> wrapped(model()); }),
                         {"buffer '0.count'", "meta"});
}

// Nothing is changed by a fully_shard that is refused: the model trains plain, and can be sharded rightly after.
TEST(BadInputThreads, ARefusalChangesNothing) {
  run_ranks(2, [](int rank) {
    auto net = ones_linear(4, 4);
    EXPECT_NE(error_of([&] { fully_shard({net.ptr(), net.ptr()}); }), "");
    EXPECT_NE(error_of([&] { fully_shard(net, {.mp_policy = {.param_dtype = rank ? at::kHalf : at::kBFloat16}}); }),
              "");
    EXPECT_FALSE(is_dtensor(net->weight));
    net->forward(at::ones({1, 4})).sum().backward();
    net->zero_grad();
    auto model = fully_shard(net);
    model(at::ones({1, 4})).sum().backward();
    EXPECT_TRUE(at::equal(whole(net->weight), at::ones({4, 4})));
  });
}

TEST(BadInputThreads, ForwardOutsideTheHandle) {
  for (const bool grad_mode : {true, false}) {
    for (const bool trained : {false, true}) {
      const auto errors = errors_of(2, [&](int) {
        Stack net;
        auto model = shard_blocks(net, {});
        if (trained) model(at::ones({1, 6})).sum().backward();
        at::AutoGradMode mode(grad_mode);
        net->forward(at::ones({1, 6}));
      });
      expect_every_rank_says(errors, {"'blocks.0.weight'", "model(x)"});
    }
  }
  expect_every_rank_says(errors_of(2,
                                   [](int) {
                                     Stack net;
                                     shard_blocks(net, {});
                                     c10::InferenceMode inference;
                                     net->forward(at::ones({1, 6}));
                                   }),
                         {"'blocks.0.weight'", "model(x)"});
}

TEST(BadInputThreads, ForwardOfOtherModulesOutsideTheHandle) {
  const auto refused = [](auto make, const auto& forward, const std::string& name) {
    for (const bool grad_mode : {true, false}) {
      expect_every_rank_says(errors_of(2,
                                       [&](int) {
                                         auto net = make();
                                         fully_shard(net);
                                         at::AutoGradMode mode(grad_mode);
                                         forward(net);
                                       }),
                             {"'" + name + "'", "model(x)"});
    }
  };
  refused([] { return torch::nn::LSTM(4, 4); }, [](auto& net) { net->forward(at::ones({3, 1, 4})); }, "weight_ih_l0");
  refused([] { return torch::nn::Embedding(8, 4); }, [](auto& net) { net->forward(at::zeros({3}, at::kLong)); },
          "weight");
  refused([] { return torch::nn::Conv2d(2, 3, 3); }, [](auto& net) { net->forward(at::ones({1, 2, 5, 5})); }, "weight");
  refused([] { return torch::nn::LayerNorm(torch::nn::LayerNormOptions({4})); },
          [](auto& net) {
            net->forward(at::ones({2, 4}));
          },
          "weight");
  refused([] { return torch::nn::BatchNorm1d(4); }, [](auto& net) { net->forward(at::ones({2, 4})); }, "weight");
  // An operator that takes shards elsewhere: what a forward would make of it is still refused in grad mode.
  const auto errors = errors_of(2, [](int) {
    auto net = ones_linear(4, 4);
    fully_shard(net);
    (net->weight * 2).sum().backward();
  });
  expect_every_rank_says(errors, {"'weight'", "model(x)"});
}

}  // namespace
}  // namespace fsdp::testing
