// Activation checkpointing by hand: a custom Function that runs its part again in backward, with a backward inside the
// backward (re-entrant).
#include "nets.h"

namespace fsdp::testing {
namespace {

using namespace torch::nn;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

using Part = std::function<at::Tensor(const at::Tensor&)>;

struct Recompute : torch::autograd::Function<Recompute> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Part* part) {
    context->save_for_backward({x});
    context->saved_data["part"] = reinterpret_cast<int64_t>(part);
    at::NoGradGuard no_grad;
    return (*part)(x);
  }
  static variable_list backward(AutogradContext* context, variable_list gradients) {
    const auto& part = *reinterpret_cast<const Part*>(context->saved_data["part"].toInt());
    auto x = context->get_saved_variables()[0].detach().set_requires_grad(true);
    at::Tensor y;
    {
      at::AutoGradMode record(true);
      y = part(x);
    }
    torch::autograd::backward({y}, {gradients[0]});
    return {x.grad(), at::Tensor()};
  }
};

/// Two or three parts, each run again in backward. The input must require a gradient for backward to reach a part.
struct RecomputeNet : Net {
  explicit RecomputeNet(bool tied) {
    first = register_module("first", Linear(6, 6));
    second = register_module("second", Linear(6, 6));
    third = register_module("third", Linear(6, 6));
    auto shared = tied ? first : second;
    parts.push_back([this](const at::Tensor& x) { return at::tanh(first(x)); });
    parts.push_back([this, shared](const at::Tensor& x) mutable { return at::tanh(shared(at::tanh(second(x)))); });
    parts.push_back([this](const at::Tensor& x) { return at::tanh(third(at::sin(x))); });
  }
  at::Tensor forward(const at::Tensor& x) override {
    auto y = x.detach().requires_grad_(true);
    for (const auto& part : parts) y = recompute ? Recompute::apply(y, &part) : part(y);
    return third(y);
  }
  Linear first{nullptr}, second{nullptr}, third{nullptr};
  std::vector<Part> parts;
  bool recompute = true;
};

struct RecomputeThreads : OnRanks {
  Case net(bool tied) const {
    Case c;
    c.make = [tied] { return std::make_shared<RecomputeNet>(tied); };
    c.batch = ramp({2 * ranks(), 6});
    return c;
  }
};

TEST_P(RecomputeThreads, PartsAreRunAgain) { expect_parity(ranks(), net(false)); }

TEST_P(RecomputeThreads, ParameterUsedInTwoParts) { expect_parity(ranks(), net(true)); }

TEST_P(RecomputeThreads, PlainDoesNotRecompute) {
  for (auto grouping : {Grouping::kOne, Grouping::kChildren}) {
    run_twins(ranks(), net(true), grouping, [](Twin& twin, int) {
      dynamic_cast<RecomputeNet&>(twin.plain()).recompute = false;
      for (int step = 0; step < 3; ++step) twin.train_step();
      twin.expect_equal_parameters();
    });
  }
}

// Every group is reduced once, though its gradients arrive in several pieces.
TEST_P(RecomputeThreads, ReducesOnceWhenSteady) {
  run_twins(ranks(), net(true), Grouping::kChildren, [](Twin& twin, int) {
    for (int step = 0; step < 4; ++step) {
      const auto reduces = twin.context().stats().reduces;
      twin.train_step();
      if (step >= 2) {
        EXPECT_EQ(twin.context().stats().reduces - reduces, 3);
      }
    }
  });
}

TEST_P(RecomputeThreads, AcrossAccumulation) {
  run_twins(ranks(), net(true), Grouping::kChildren, [](Twin& twin, int) {
    for (int step = 0; step < 3; ++step) {
      twin.zero_grad();
      for (int i = 0; i < 2; ++i) {
        twin.model().set_requires_gradient_sync(i == 1);
        const auto batch = twin.the_case().batch * (1.0 + i);
        twin.plain_loss(batch).backward();
        twin.sharded_loss(batch).backward();
      }
      twin.expect_equal_gradients();
      twin.optimizer_step();
    }
    twin.expect_equal_parameters();
  });
}

FSDP_ON_RANKS(RecomputeThreads, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
