// Rows 8, 10, 13 and 24: optimizers, clipping and averages on sharded parameters.
#include <limits>

#include <torch/nn/utils/clip_grad.h>

#include "cases.h"

namespace fsdp::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

TEST(OptimizersThreads, Row8BuiltAfterAForward) {
  struct ScaleImpl : torch::nn::Module {
    ScaleImpl() { p = register_parameter("p", at::ones({8})); }
    at::Tensor forward(const at::Tensor& x) { return p * x; }
    at::Tensor p;
  };
  run_ranks(2, [](int) {
    auto net = std::make_shared<ScaleImpl>();
    auto model = fully_shard(net);
    const auto y = model(at::ones({8}));
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    y.sum().backward();
    optimizer.step();
    EXPECT_TRUE(at::allclose(whole(net->p), at::full({8}, 0.9f))) << whole(net->p);
  });
}

TEST(OptimizersThreads, Row10NormsWithAnEmptyShard) {
  run_ranks(2, [](int rank) {
    auto net = ones_linear(4, 1);
    auto model = fully_shard(net);
    model(at::ones({1, 4})).sum().backward();
    EXPECT_EQ(dtensor(net->weight).to_local().numel(), rank == 0 ? 4 : 0);
    const std::vector<std::pair<double, double>> norms{{2, 2.0}, {kInfinity, 1.0}, {1, 4.0}, {3, std::cbrt(4.0)}};
    for (const auto& [order, expected] : norms) {
      EXPECT_NEAR(clip_grad_norm_(net->parameters(), 1e9, order).item<double>(), expected, 1e-5);
      EXPECT_NEAR(torch::nn::utils::clip_grad_norm_(net->parameters(), 1e9, order), expected, 1e-5);
      EXPECT_NEAR(net->weight.grad().norm(order).item<double>(), expected, 1e-5);
    }
  });
}

using MakeOptimizer = std::function<std::shared_ptr<torch::optim::Optimizer>(std::vector<at::Tensor>)>;
struct Kind {
  std::string name;
  MakeOptimizer make;
};
void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

template <class O, class Options>
Kind kind(std::string name, Options options) {
  return {std::move(name), [options](std::vector<at::Tensor> p) { return std::make_shared<O>(std::move(p), options); }};
}

std::vector<Kind> kinds() {
  using namespace torch::optim;
  return {kind<SGD>("SgdMomentum", SGDOptions(0.05).momentum(0.9).weight_decay(0.1).nesterov(true)),
          kind<Adagrad>("Adagrad", AdagradOptions(0.05).weight_decay(0.1)),
          kind<Adam>("Adam", AdamOptions(0.02).weight_decay(0.1).amsgrad(true)),
          kind<AdamW>("AdamW", AdamWOptions(0.02).weight_decay(0.1)),
          kind<RMSprop>("RMSprop", RMSpropOptions(0.01).momentum(0.9).centered(true)),
          kind<LBFGS>("LBFGS", LBFGSOptions(0.5).max_iter(4)),
          kind<LBFGS>("LBFGSWolfe", LBFGSOptions(0.5).max_iter(4).line_search_fn("strong_wolfe"))};
}

struct OptimizersThreads : ::testing::TestWithParam<Kind> {};

/// 3 steps; 5 rows on 2 ranks, and a bias of one row, so that rank 1's shard of it is empty.
Values train(Stack& net, const Forward& forward, torch::optim::Optimizer& optimizer) {
  Values values;
  for (int step = 0; step < 3; ++step) {
    const auto loss = optimizer.step([&] {
      optimizer.zero_grad();
      auto l = forward(at::linspace(-1, 1, 10).view({2, 5})).pow(2).mean();
      l.backward();
      return l;
    });
    values.push_back(loss);
  }
  const auto rest = parameters_and_gradients(*net);
  values.insert(values.end(), rest.begin(), rest.end());
  return values;
}

Stack make_net() {
  Stack net(2, 5);
  net->head = net->replace_module("head", torch::nn::Linear(5, 1));
  return net;
}

TEST_P(OptimizersThreads, AfterSharding) {
  Recipe<Stack> recipe;
  recipe.make = make_net;
  recipe.shard = shard_blocks;
  recipe.tolerance = 1e-4;
  recipe.body = [](Side<Stack>& run) { return train(run.net, run.forward, *GetParam().make(run.net->parameters())); };
  expect_like_plain(recipe);
}

// Row 13 is Adagrad's, which makes its state when it is built.
TEST_P(OptimizersThreads, BeforeSharding) {
  Recipe<Stack> recipe;
  std::map<torch::nn::Module*, std::shared_ptr<torch::optim::Optimizer>> optimizers;
  recipe.make = [&] {
    auto net = make_net();
    optimizers[net.get()] = GetParam().make(net->parameters());
    return net;
  };
  recipe.shard = shard_blocks;
  recipe.tolerance = 1e-4;
  recipe.body = [&](Side<Stack>& run) { return train(run.net, run.forward, *optimizers.at(run.net.get())); };
  expect_like_plain(recipe);
}

// An optimizer that has already stepped keeps its state. LBFGS's, flat and not by parameter, cannot be cut: refused.
TEST_P(OptimizersThreads, BetweenTwoSteps) {
  Recipe<Stack> recipe;
  std::map<torch::nn::Module*, std::shared_ptr<torch::optim::Optimizer>> optimizers;
  recipe.make = [&] {
    auto net = make_net();
    auto& optimizer = optimizers[net.get()] = GetParam().make(net->parameters());
    train(
        net, [&](const at::Tensor& x) { return net->forward(x); }, *optimizer);
    return net;
  };
  recipe.shard = shard_blocks;
  recipe.tolerance = 1e-4;
  const bool refused = GetParam().name.find("LBFGS") == 0;
  recipe.body = [&](Side<Stack>& run) {
    Values values;
    const auto what = error_of([&] { values = train(run.net, run.forward, *optimizers.at(run.net.get())); });
    EXPECT_EQ(what.empty(), !refused || !run.handle) << what;
    EXPECT_TRUE(what.empty() || what.find("'blocks.0.weight'") != std::string::npos) << what;
    return refused ? Values() : values;
  };
  expect_like_plain(recipe);
}

INSTANTIATE_TEST_SUITE_P(All, OptimizersThreads, ::testing::ValuesIn(kinds()),
                         [](const auto& info) { return info.param.name; });

TEST(OptimizersThreads, Row24ClippingAndAnAverage) {
  for (const double order : {1.0, 2.0, 3.0, kInfinity}) {
    for (const bool torchs : {true, false}) {
      SCOPED_TRACE(::testing::Message() << "order " << order << (torchs ? ", torch's" : ", fsdp's"));
      Recipe<Stack> recipe;
      recipe.make = make_net;
      recipe.shard = shard_blocks;
      recipe.tolerance = 1e-4;
      recipe.body = [=](Side<Stack>& run) {
        torch::optim::Adam optimizer(run.net->parameters(), torch::optim::AdamOptions(0.02).weight_decay(0.1));
        Values average, values;
        for (const auto& p : run.net->parameters()) average.push_back(p.detach().clone());
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          run.forward(at::linspace(-1, 1, 10).view({2, 5})).pow(2).mean().backward();
          const double norm = torchs || !run.handle
                                  ? torch::nn::utils::clip_grad_norm_(run.net->parameters(), 0.05, order)
                                  : clip_grad_norm_(run.net->parameters(), 0.05, order).item<double>();
          values.push_back(at::scalar_tensor(norm));
          optimizer.step();
          at::NoGradGuard no_grad;
          size_t i = 0;
          for (const auto& p : run.net->parameters()) average[i++].lerp_(p, 0.3);
        }
        for (const auto& a : average) {
          EXPECT_EQ(is_dtensor(a), run.handle != nullptr);
          values.push_back(a);
        }
        const auto rest = parameters_and_gradients(*run.net);
        values.insert(values.end(), rest.begin(), rest.end());
        return values;
      };
      expect_like_plain(recipe);
    }
  }
}

// An average made before sharding is an ordinary tensor; the first write makes it sharded too.
TEST(OptimizersThreads, Row24AnAverageMadeBeforeSharding) {
  Recipe<Stack> recipe;
  std::map<torch::nn::Module*, Values> averages;
  recipe.make = [&] {
    auto net = make_net();
    auto& mine = averages[net.get()];
    for (const auto& p : net->parameters()) mine.push_back(p.detach().clone());
    return net;
  };
  recipe.shard = shard_blocks;
  recipe.body = [&](Side<Stack>& run) {
    auto& average = averages.at(run.net.get());
    torch::optim::SGD optimizer(run.net->parameters(), 0.1);
    for (int step = 0; step < 2; ++step) {
      optimizer.zero_grad();
      run.forward(at::linspace(-1, 1, 10).view({2, 5})).pow(2).mean().backward();
      optimizer.step();
      at::NoGradGuard no_grad;
      size_t i = 0;
      for (const auto& p : run.net->parameters()) average[i++].lerp_(p, 0.3);
    }
    return average;
  };
  expect_like_plain(recipe);
}

TEST(OptimizersThreads, Row24NormsWrittenByHand) {
  Recipe<Stack> recipe;
  recipe.make = make_net;
  recipe.shard = shard_blocks;
  recipe.body = [](Side<Stack>& run) {
    run.forward(at::linspace(-1, 1, 10).view({2, 5})).pow(2).mean().backward();
    at::NoGradGuard no_grad;
    Values values;
    for (const auto& p : run.net->parameters()) {
      const auto& g = p.grad();
      values.push_back(g.norm());
      values.push_back(g.pow(2).sum().sqrt());
      values.push_back(g.abs().max());
      values.push_back((p * g).sum());
      values.push_back(p.mean());
      values.push_back(at::scalar_tensor(g.sum().item<double>()));
    }
    return values;
  };
  expect_like_plain(recipe);
}

}  // namespace
}  // namespace fsdp::testing
