// Rows 1, 2 and 19: ranks that use different parameters.
#include "cases.h"
#include "engine/context.h"
#include "module/module_state.h"
#include "support/processes.h"

namespace fsdp::testing {
namespace {

struct PairImpl : torch::nn::Module {
  PairImpl() {
    a = register_module("a", ones_linear(4, 4));
    b = register_module("b", ones_linear(4, 4));
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor sum = at::zeros({});
    if (use_a) sum = sum + a(x).sum();
    if (use_b) sum = sum + b(x).sum();
    return sum;
  }
  torch::nn::Linear a{nullptr}, b{nullptr};
  bool use_a = true, use_b = true;
};
TORCH_MODULE(Pair);

void expect_gradient(const at::Tensor& parameter, double value) {
  ASSERT_TRUE(parameter.grad().defined());
  const auto gradient = whole(parameter.grad());
  EXPECT_TRUE(at::equal(gradient, at::full_like(gradient, value))) << gradient << "\nexpected " << value;
}

void row_1(int rank) {
  for (const bool asked_for : {false, true}) {
    Pair net;
    auto model = fully_shard(net);
    if (asked_for) model.set_reduce_scatter_unused_params(true);
    net->use_b = rank == 0;
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model(at::ones({1, 4})).backward();
      expect_gradient(net->a->weight, 1.0);
      expect_gradient(net->b->weight, 0.5);
    }
  }
}

void row_2(int rank) {
  Pair net;
  auto model = fully_shard(net);
  net->use_a = rank == 0;
  net->use_b = rank == 1;
  for (int step = 0; step < 3; ++step) {
    net->zero_grad();
    model(at::full({1, 4}, rank + 1.0)).backward();
    expect_gradient(net->a->weight, 0.5);
    expect_gradient(net->b->weight, 1.0);
  }
}

// Two scales in a group of their own; the sum's gradients are `factors`, once per unit of input.
struct ScalesImpl : torch::nn::Module {
  explicit ScalesImpl(std::vector<double> f) : factors(std::move(f)) {
    first = register_parameter("first", at::ones({2, 2}));
    second = register_parameter("second", at::ones({2, 2}));
  }
  at::Tensor forward(const at::Tensor& x, bool use_second) {
    auto sum = (first * factors[0] * x).sum();
    return use_second ? sum + (second * factors[1] * x).sum() : sum;
  }
  at::Tensor first, second;
  std::vector<double> factors;
};
TORCH_MODULE(Scales);

struct TwoGroupsImpl : torch::nn::Module {
  TwoGroupsImpl() {
    a = register_module("a", Scales(std::vector<double>{10, 30}));
    b = register_module("b", Scales(std::vector<double>{40, 20}));
  }
  at::Tensor forward(const at::Tensor& x) {
    // Autograd runs the later operation's gradient first: with b first, a is the group whose gradients are due first.
    if (a_last) {
      const auto sum = b(x, true);
      return sum + a(x, use_all_of_a);
    }
    const auto sum = a(x, use_all_of_a);
    return sum + b(x, true);
  }
  Scales a{nullptr}, b{nullptr};
  bool use_all_of_a = true, a_last = false;
};
TORCH_MODULE(TwoGroups);

void row_19(int rank) {
  for (const bool a_last : {false, true}) {
    TwoGroups net;
    fully_shard(net->a);
    fully_shard(net->b);
    auto model = fully_shard(net);
    net->use_all_of_a = rank == 0;
    net->a_last = a_last;
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      model(at::full({}, rank + 1.0)).backward();
      expect_gradient(net->a->first, 15);   // (10 + 20) / 2
      expect_gradient(net->a->second, 15);  // (30 + 0) / 2
      expect_gradient(net->b->first, 60);   // (40 + 80) / 2
      expect_gradient(net->b->second, 30);  // (20 + 40) / 2
    }
  }
}

void on_gloo(void (*row)(int)) {
  init_process_group({.timeout = std::chrono::seconds(20)});
  row(rank());
  destroy_process_group();
}

TEST(UnusedThreads, Row1OneRankUsesPartOfAGroup) { run_ranks(2, row_1); }
TEST(UnusedThreads, Row2RanksUseDifferentParts) { run_ranks(2, row_2); }
TEST(UnusedThreads, Row19GroupsOfEqualSizeInOneOrder) { run_ranks(2, row_19); }

FSDP_PROCESS_BODY(cases_row_1) { on_gloo(row_1); }
FSDP_PROCESS_BODY(cases_row_2) { on_gloo(row_2); }
FSDP_PROCESS_BODY(cases_row_19) { on_gloo(row_19); }
TEST(UnusedProcs, Row1) { run_processes(2, "cases_row_1"); }
TEST(UnusedProcs, Row2) { run_processes(2, "cases_row_2"); }
TEST(UnusedProcs, Row19) { run_processes(2, "cases_row_19"); }

// A parameter that no rank uses has no gradient, as in plain torch.
TEST(UnusedThreads, UnusedEverywhereStaysWithoutAGradient) {
  run_ranks(2, [](int) {
    Pair net;
    auto model = fully_shard(net);
    net->use_b = false;
    model(at::ones({1, 4})).backward();
    expect_gradient(net->a->weight, 1.0);
    EXPECT_FALSE(net->b->weight.grad().defined());
  });
}

// What a model stopped using is gathered a few times more, in case some rank uses it, and then left out; when it is
// used again it is gathered again.
TEST(UnusedThreads, WhatNobodyUsesAnyMoreIsGatheredNoMore) {
  run_ranks(2, [](int rank) {
    Pair net;
    fully_shard(net->a);
    fully_shard(net->b);
    auto model = fully_shard(net);
    const auto step = [&](bool use_b, double expected_b) {
      net->use_b = use_b;
      net->zero_grad();
      const auto before = model.state()->group().context().stats().gathers;
      model(at::ones({1, 4}).requires_grad_()).backward();  // so that backward reads the weights
      expect_gradient(net->a->weight, 1.0);
      if (expected_b > 0) {
        expect_gradient(net->b->weight, expected_b);
      } else {
        EXPECT_FALSE(net->b->weight.grad().defined());
      }
      return model.state()->group().context().stats().gathers - before;
    };
    for (int i = 0; i < 2; ++i) EXPECT_EQ(step(true, 1.0), 4);
    for (int i = 0; i < engine::Schedule::kSpared; ++i) EXPECT_EQ(step(false, 0), 4) << i;
    for (int i = 0; i < 2; ++i) EXPECT_EQ(step(false, 0), 2);
    EXPECT_GE(step(true, 1.0), 4);  // it was not foreseen
    for (int i = 0; i < 2; ++i) EXPECT_EQ(step(true, 1.0), 4);
    // One rank's need is enough.
    for (int i = 0; i < 2 * engine::Schedule::kSpared; ++i) EXPECT_EQ(step(rank == 0, 0.5), 4) << i;
  });
}

}  // namespace
}  // namespace fsdp::testing
