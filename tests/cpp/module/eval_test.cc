// Forwards without gradients, around training steps and between a forward and its backward.
#include <chrono>
#include <thread>

#include "nets.h"

namespace fsdp::testing {
namespace {

struct EvalThreads : OnRanks {};

enum class Mode { kNoGrad, kInference };

void expect_equal_outputs(Twin& twin, Mode mode) {
  const auto& c = twin.the_case();
  at::Tensor expected, got;
  {
    at::NoGradGuard no_grad;
    expected = twin.plain().forward(twin.samples_here(c.batch));
  }
  if (mode == Mode::kNoGrad) {
    at::NoGradGuard no_grad;
    got = twin.model()(twin.samples_here(c.batch));
  } else {
    c10::InferenceMode inference;
    got = twin.model()(twin.samples_here(c.batch)).clone();
  }
  EXPECT_FALSE(got.requires_grad());
  EXPECT_LT(difference(got, expected), c.tolerance);
}

TEST_P(EvalThreads, BeforeBetweenAndAfterSteps) {
  for (auto grouping : {Grouping::kOne, Grouping::kChildren}) {
    for (auto mode : {Mode::kNoGrad, Mode::kInference}) {
      run_twins(ranks(), mlp({6, 17, 9, 4}, 2 * ranks()), grouping, [&](Twin& twin, int) {
        expect_equal_outputs(twin, mode);
        for (int step = 0; step < 3; ++step) {
          twin.train_step();
          expect_equal_outputs(twin, mode);
          if (step == 1) expect_equal_outputs(twin, mode);
        }
        twin.expect_equal_parameters();
      });
    }
  }
}

// A validation pass in the middle of a step: the forward's graph is alive.
TEST_P(EvalThreads, BetweenForwardAndBackward) {
  for (auto grouping : {Grouping::kOne, Grouping::kChildren}) {
    for (auto mode : {Mode::kNoGrad, Mode::kInference}) {
      run_twins(ranks(), mlp({6, 17, 9, 4}, 2 * ranks()), grouping, [&](Twin& twin, int) {
        for (int step = 0; step < 3; ++step) {
          twin.zero_grad();
          const auto plain = twin.plain_loss();
          const auto sharded = twin.sharded_loss();
          expect_equal_outputs(twin, mode);
          plain.backward();
          sharded.backward();
          twin.expect_equal_gradients();
          twin.optimizer_step();
        }
        twin.expect_equal_parameters();
      });
    }
  }
}

// A part of a forward without gradients: a teacher, or features that are not trained.
TEST_P(EvalThreads, NoGradInsideForward) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        net.add("a", torch::nn::Linear(5, 5));
        net.add("b", torch::nn::Linear(5, 5));
      },
      [](FunctionNet& net, const at::Tensor& x) {
        auto& a = net.module<torch::nn::LinearImpl>("a");
        at::Tensor features;
        {
          at::NoGradGuard no_grad;
          features = at::tanh(a.forward(x));
        }
        return net.module<torch::nn::LinearImpl>("b").forward(features) + a.forward(x);
      });
  c.batch = ramp({2 * ranks(), 5});
  expect_parity(ranks(), c);
}

// Inputs that are part of the graph: their gradients are this rank's own.
TEST_P(EvalThreads, GradientsOfInputs) {
  run_twins(ranks(), mlp({6, 7, 4}, 2 * ranks()), Grouping::kChildren, [](Twin& twin, int) {
    for (int step = 0; step < 2; ++step) {
      auto ours = twin.samples_here(twin.the_case().batch).clone().set_requires_grad(true);
      auto theirs = ours.detach().clone().set_requires_grad(true);
      twin.zero_grad();
      twin.model()(ours).pow(2).mean().backward();
      twin.plain().forward(theirs).pow(2).mean().backward();
      EXPECT_LT(difference(ours.grad(), theirs.grad()), 1e-9);
    }
  });
}

// A rank that skips the last blocks is done first. What it writes to its shards then is not what the others gather.
TEST(EvalSkipThreads, WritesAfterAForwardReachNobodyInIt) {
  static thread_local bool skips, sleeps;
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        for (const char* name : {"a", "b", "c"}) net.add(name, torch::nn::Linear(6, 6));
      },
      [](FunctionNet& net, const at::Tensor& x) {
        auto y = at::tanh(net.module<torch::nn::LinearImpl>("a").forward(x));
        if (skips) return y;
        if (sleeps) std::this_thread::sleep_for(std::chrono::milliseconds(60));
        y = at::tanh(net.module<torch::nn::LinearImpl>("b").forward(y));
        return net.module<torch::nn::LinearImpl>("c").forward(y);
      });
  for (const int ranks : {2, 3}) {
    c.batch = ramp({2 * ranks, 6});
    run_twins(ranks, c, Grouping::kChildren, [](Twin& twin, int rank) {
      at::NoGradGuard no_grad;
      skips = sleeps = false;
      for (int i = 0; i < 2; ++i) expect_equal_outputs(twin, Mode::kNoGrad);  // from here on the order is known
      skips = rank == 0;
      const auto expected = twin.plain().forward(twin.samples_here(twin.the_case().batch));
      sleeps = rank != 0;
      const auto got = twin.model()(twin.samples_here(twin.the_case().batch));
      if (rank == 0) {
        for (auto& parameter : twin.net().parameters()) dtensor(parameter).to_local().mul_(3);
      }
      EXPECT_LT(difference(got, expected), twin.the_case().tolerance) << "rank " << rank;
      barrier();
      skips = sleeps = false;
    });
  }
}

FSDP_ON_RANKS(EvalThreads, 1, 2, 3);

}  // namespace
}  // namespace fsdp::testing
