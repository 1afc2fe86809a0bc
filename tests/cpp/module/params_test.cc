// Parameters of awkward shapes, dtypes and use.
#include "nets.h"

namespace fsdp::testing {
namespace {

using namespace torch::nn;

struct ParamsThreads : OnRanks {};

/// y = x * scale * w, ...: every parameter multiplies the sum of the input.
Case products(const std::vector<std::vector<int64_t>>& shapes, int ranks) {
  Case c;
  c.make = function_net(
      [shapes](FunctionNet& net) {
        for (size_t i = 0; i < shapes.size(); ++i) net.add("p" + std::to_string(i), torch::randn(shapes[i]));
      },
      [](FunctionNet& net, const at::Tensor& x) {
        auto y = x.sum(1);
        for (const auto& parameter : net.parameters()) y = y + at::sin(parameter * x.sum()).sum() * parameter.numel();
        return y;
      });
  c.batch = ramp({2 * ranks, 3});
  c.apart = true;
  return c;
}

TEST_P(ParamsThreads, SeventeenRows) { expect_parity(ranks(), mlp({3, 17, 17, 2}, 2 * ranks())); }

TEST_P(ParamsThreads, FewerRowsThanRanks) { expect_parity(ranks(), products({{1, 4}, {2}, {3, 2}, {1}}, ranks())); }

TEST_P(ParamsThreads, ScalarsAndEmpties) {
  expect_parity(ranks(), products({{}, {0}, {4, 0}, {0, 3}, {5}, {}}, ranks()));
}

TEST_P(ParamsThreads, ScalarAlone) { expect_parity(ranks(), products({{}}, ranks())); }

TEST_P(ParamsThreads, NonContiguous) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        net.add("transposed", torch::randn({4, 7}).t());
        net.add("strided", torch::randn({10, 6}).slice(0, 0, 10, 2).slice(1, 0, 6, 3));
        net.add("channels_last", torch::randn({4, 3, 2, 2}).contiguous(at::MemoryFormat::ChannelsLast));
      },
      [](FunctionNet& net, const at::Tensor& x) {  // x: [n, 4]
        const auto y = at::linear(x, net.at("transposed")).narrow(1, 0, 5);
        return at::tanh(at::mm(y, net.at("strided"))) + at::tanh(net.at("channels_last")).pow(2).sum();
      });
  c.batch = ramp({2 * ranks(), 4});
  c.dtype = at::kFloat;  // as they were made: a conversion would make them contiguous
  c.tolerance = 2e-5;
  expect_parity(ranks(), c, Grouping::kOne);
}

// Two dtypes that compute, one that does not.
TEST_P(ParamsThreads, MixedDtypesInOneGroup) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        net.add("half", torch::randn({3, 3}).to(at::kBFloat16));
        net.add("double", torch::randn({7, 3}).to(at::kDouble));
        net.add("float", torch::randn({5, 3}));
        net.add("steps", torch::arange(5), /*requires_grad=*/false);
        net.add("mask", torch::tensor({true, false, true}), /*requires_grad=*/false);
      },
      [](FunctionNet& net, const at::Tensor& x) {  // x: [n, 3]
        const auto y = at::linear(x, net.at("float")) * net.at("steps");
        const auto z = at::linear(x.to(at::kDouble), net.at("double")).masked_fill(x.sum(1, true) > 0, 0.5);
        const auto h = at::linear(x, net.at("half").to(at::kFloat) * net.at("mask"));
        return y.pow(2).mean(1) + z.pow(2).mean(1).to(at::kFloat) + h.pow(2).mean(1);
      });
  c.batch = ramp({2 * ranks(), 3});
  c.dtype = at::kFloat;
  c.tolerance = 1e-2;  // the bfloat16 one's steps
  expect_parity(ranks(), c, Grouping::kOne);
}

Case branching(int ranks, std::function<bool(const at::Tensor& x)> takes_b) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        net.add("a", Linear(4, 4));
        net.add("b", Linear(4, 4));
        net.add("never", Linear(4, 4));
        net.add("c", Linear(4, 3));
      },
      [takes_b](FunctionNet& net, const at::Tensor& x) {
        auto y = at::tanh(net.module<LinearImpl>("a").forward(x));
        if (takes_b(x)) y = at::tanh(net.module<LinearImpl>("b").forward(y));
        return net.module<LinearImpl>("c").forward(y);
      });
  // Rank r's samples begin with r.
  c.batch = ramp({2 * ranks, 4});
  for (int r = 0; r < ranks; ++r) c.batch[2 * r][0] = r;
  c.apart = true;
  return c;
}
int64_t rank_of(const at::Tensor& x) { return std::lround(x[0][0].item<double>()); }

TEST_P(ParamsThreads, UnusedOnAllRanks) {
  expect_parity(ranks(), branching(ranks(), [](const at::Tensor&) { return false; }));
}
TEST_P(ParamsThreads, UsedOnTheFirstRankOnly) {
  expect_parity(ranks(), branching(ranks(), [](const at::Tensor& x) { return rank_of(x) == 0; }));
}
TEST_P(ParamsThreads, UnusedOnTheFirstRankOnly) {
  expect_parity(ranks(), branching(ranks(), [](const at::Tensor& x) { return rank_of(x) != 0; }));
}

// The order of two groups differs by rank, and which rank goes which way changes at every step.
TEST_P(ParamsThreads, OrderDiffersByRank) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        net.add("a", Linear(4, 4));
        net.add("b", Linear(4, 4));
      },
      [](FunctionNet& net, const at::Tensor& x) {
        auto& a = net.module<LinearImpl>("a");
        auto& b = net.module<LinearImpl>("b");
        if (rank_of(x) % 2) return b.forward(at::tanh(a.forward(x)));
        return a.forward(at::tanh(b.forward(x)));
      });
  c.apart = true;
  c.batch = ramp({2 * ranks(), 4});
  for (auto grouping : {Grouping::kOne, Grouping::kChildren}) {
    run_twins(ranks(), c, grouping, [&](Twin& twin, int) {
      for (int step = 0; step < 5; ++step) {
        auto batch = twin.the_case().batch.clone();
        for (int r = 0; r < ranks(); ++r) batch[2 * r][0] = r + step;
        twin.train_step(batch);
      }
      twin.expect_equal_parameters();
    });
  }
}

// Used in some steps, on some ranks: gradients appear, vanish and come back.
TEST_P(ParamsThreads, UseChangesByStep) {
  const auto c = branching(ranks(), [](const at::Tensor& x) { return rank_of(x) % 3 == 1; });
  for (auto grouping : {Grouping::kOne, Grouping::kChildren}) {
    run_twins(ranks(), c, grouping, [&](Twin& twin, int) {
      for (int step = 0; step < 6; ++step) {
        auto batch = twin.the_case().batch.clone();
        for (int r = 0; r < ranks(); ++r) batch[2 * r][0] = r + step;
        twin.train_step(batch);
      }
      twin.expect_equal_parameters();
    });
  }
}

FSDP_ON_RANKS(ParamsThreads, 1, 2, 3, 5);

}  // namespace
}  // namespace fsdp::testing
