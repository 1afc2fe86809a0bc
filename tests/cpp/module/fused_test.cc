// fsdp::optim against torch::optim: the same results, state and checkpoints.
#include <fsdp/optim.h>

#include "nets.h"
#include "support/ranks.h"

namespace fsdp::testing {
namespace {

using Parameters = std::vector<at::Tensor>;
using Optimizer = std::shared_ptr<torch::optim::Optimizer>;

/// The same options for torch::optim's and for ours.
struct Kind {
  std::string name;
  std::function<Optimizer(Parameters)> theirs, ours;
};
void PrintTo(const Kind& kind, std::ostream* out) { *out << kind.name; }

template <class Theirs, class Ours, class Options>
Kind kind(std::string name, Options options) {
  return {std::move(name), [options](Parameters p) { return std::make_shared<Theirs>(std::move(p), options); },
          [options](Parameters p) { return std::make_shared<Ours>(std::move(p), options); }};
}

std::vector<Kind> kinds() {
  using torch::optim::AdamWOptions;
  using torch::optim::SGDOptions;
  const auto adamw = [](std::string name, AdamWOptions options) {
    return kind<torch::optim::AdamW, optim::AdamW>(std::move(name), options);
  };
  const auto sgd = [](std::string name, SGDOptions options) {
    return kind<torch::optim::SGD, optim::SGD>(std::move(name), options);
  };
  return {adamw("AdamW", AdamWOptions(0.02).weight_decay(0.1)),
          adamw("AdamWAmsgrad", AdamWOptions(0.02).amsgrad(true).betas({0.8, 0.95}).eps(1e-6)),
          sgd("Sgd", SGDOptions(0.05)),
          sgd("SgdDecay", SGDOptions(0.05).weight_decay(0.1)),
          sgd("SgdMomentum", SGDOptions(0.05).momentum(0.9).dampening(0.2).weight_decay(0.1)),
          sgd("SgdNesterov", SGDOptions(0.05).momentum(0.9).nesterov(true))};
}

/// 17 and 2 rows, a scalar, a float among doubles, one that is frozen and one that is not used.
NetPtr mixed_net() {
  auto net = std::make_shared<FunctionNet>([](FunctionNet& self, const at::Tensor& x) {
    auto h = at::tanh(self.module<torch::nn::LinearImpl>("a").forward(x)) * self.at("scale");
    h = h + self.at("single").to(at::kDouble);
    return self.module<torch::nn::LinearImpl>("b").forward(h) + self.at("frozen");
  });
  net->add("a", torch::nn::Linear(6, 17));
  net->add("b", torch::nn::Linear(17, 2));
  for (auto& parameter : net->parameters()) parameter.set_data(ramp(parameter.sizes().vec()));
  net->add("scale", at::full({}, 0.7, at::kDouble));
  net->add("single", ramp({17}).to(at::kFloat));
  net->add("frozen", ramp({2}), false);
  net->add("unused", ramp({5}));
  return net;
}

/// One step of both on the same data.
template <class Forward>
void step_both(Net& plain, torch::optim::Optimizer& theirs, Forward&& forward, torch::optim::Optimizer& ours) {
  theirs.zero_grad();
  ours.zero_grad();
  plain.forward(ramp({4, 6})).pow(2).mean().backward();
  forward(ramp({4, 6})).pow(2).mean().backward();
  theirs.step();
  ours.step();
}

Parameters parameters_of(const NetPtr& net) { return net->parameters(); }

void expect_equal(const NetPtr& net, const NetPtr& plain, double tolerance = 1e-6) {
  const auto expected = plain->named_parameters();
  for (const auto& item : net->named_parameters()) {
    const auto& p = item.value();
    const auto got = is_dtensor(p) ? dtensor(p).full_tensor() : p.detach();
    EXPECT_LT(difference(got, expected[item.key()].detach()), tolerance) << item.key();
  }
}

struct FusedThreads : ::testing::TestWithParam<std::tuple<Kind, int>> {
  const Kind& kind() const { return std::get<0>(GetParam()); }
  int ranks() const { return std::get<1>(GetParam()); }
};

TEST_P(FusedThreads, StepsLikeTorchs) {
  run_ranks(ranks(), [&](int) {
    const auto plain = mixed_net(), net = mixed_net();
    auto model = fully_shard(net);
    auto theirs = kind().theirs(parameters_of(plain)), ours = kind().ours(parameters_of(net));
    const auto x = ramp({4, 6});
    for (int step = 0; step < 4; ++step) {
      const auto train = [&](auto&& forward, torch::optim::Optimizer& optimizer) {
        return optimizer.step([&] {
          optimizer.zero_grad();
          auto loss = forward(x).pow(2).mean();
          loss.backward();
          return loss;
        });
      };
      const auto expected = train([&](const at::Tensor& t) { return plain->forward(t); }, *theirs);
      const auto got = train(model, *ours);
      EXPECT_NEAR(got.item<double>(), expected.item<double>(), 1e-6 * (1 + expected.item<double>()));
    }
    expect_equal(net, plain);
    // One state for each parameter that was ever stepped, and sharded like it.
    EXPECT_EQ(ours->state().size(), theirs->state().size());
  });
}

TEST_P(FusedThreads, StepsPlainParameters) {
  const auto plain = mixed_net(), net = mixed_net();
  auto theirs = kind().theirs(parameters_of(plain)), ours = kind().ours(parameters_of(net));
  for (int step = 0; step < 3; ++step) {
    for (const auto& [module, optimizer] : {std::pair{plain, theirs}, std::pair{net, ours}}) {
      optimizer->zero_grad();
      module->forward(ramp({4, 6})).pow(2).mean().backward();
      optimizer->step();
    }
  }
  expect_equal(net, plain);
}

INSTANTIATE_TEST_SUITE_P(All, FusedThreads,
                         ::testing::Combine(::testing::ValuesIn(kinds()), ::testing::Values(1, 2, 3)),
                         [](const auto& info) {
                           return std::get<0>(info.param).name + "On" + std::to_string(std::get<1>(info.param));
                         });

TEST(FusedStateThreads, GroupsWithOptionsOfTheirOwn) {
  run_ranks(2, [](int) {
    const auto plain = mixed_net(), net = mixed_net();
    auto model = fully_shard(net);
    const auto groups = [](const NetPtr& of) {
      auto all = of->parameters();
      const auto half = static_cast<int64_t>(all.size()) / 2;
      std::vector<torch::optim::OptimizerParamGroup> made;
      made.emplace_back(Parameters(all.begin(), all.begin() + half));
      made.emplace_back(Parameters(all.begin() + half, all.end()),
                        std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(0.3)));
      return made;
    };
    torch::optim::AdamW theirs(groups(plain), torch::optim::AdamWOptions(0.01));
    optim::AdamW ours(groups(net), torch::optim::AdamWOptions(0.01));
    for (int step = 0; step < 3; ++step) step_both(*plain, theirs, model, ours);
    expect_equal(net, plain);
  });
}

// Parameters that stay whole must be gathered again after a step: the kernel's write has to be seen.
TEST(FusedStateThreads, AStepIsSeenByWhatIsWhole) {
  run_ranks(2, [](int) {
    const auto plain = mixed_net(), net = mixed_net();
    auto model = fully_shard(net, {.reshard_after_forward = false});
    model.set_reshard_after_backward(false);
    torch::optim::AdamW theirs(plain->parameters(), torch::optim::AdamWOptions(0.1));
    optim::AdamW ours(net->parameters(), torch::optim::AdamWOptions(0.1));
    for (int step = 0; step < 3; ++step) step_both(*plain, theirs, model, ours);
    expect_equal(net, plain);
    // Operators on lists by hand, and a fused kernel called as such.
    const auto write = [](const NetPtr& of) {
      const auto all = of->parameters();
      const Parameters weights{all[4], all[6]};  // those of a and b
      at::_foreach_mul_(weights, 0.5);
      at::_fused_sgd_(weights, {at::ones_like(weights[0]), at::ones_like(weights[1])}, {}, 0, 0, 0.1, 0, false, false,
                      false);
    };
    {
      at::NoGradGuard no_grad;
      model(ramp({4, 6}));
      write(plain);
      write(net);
      EXPECT_LT(difference(model(ramp({4, 6})), plain->forward(ramp({4, 6}))), 1e-6);
    }
    // And a graph that was built before it is refused, as in plain torch.
    const auto loss = model(ramp({4, 6})).pow(2).mean();
    ours.step();
    EXPECT_THROW(loss.backward(), std::exception);
    model.reset_iter_state();
  });
}

TEST(FusedStateThreads, AStateFromBeforeShardingGoesOn) {
  run_ranks(2, [](int) {
    const auto plain = mixed_net(), net = mixed_net();
    torch::optim::AdamW theirs(plain->parameters(), torch::optim::AdamWOptions(0.1));
    optim::AdamW ours(net->parameters(), torch::optim::AdamWOptions(0.1));
    step_both(
        *plain, theirs, [&](const at::Tensor& x) { return net->forward(x); }, ours);
    ours.zero_grad();
    auto model = fully_shard(net);
    for (int step = 0; step < 2; ++step) step_both(*plain, theirs, model, ours);
    expect_equal(net, plain);
    for (const auto& parameter : net->parameters()) {
      const auto state = ours.state().find(parameter.unsafeGetTensorImpl());
      if (state == ours.state().end()) continue;
      EXPECT_TRUE(is_dtensor(static_cast<torch::optim::AdamWParamState&>(*state->second).exp_avg()));
    }
  });
}

// A complex parameter steps as its real and imaginary parts do, which is what Python's torch.optim makes of it.
TEST(FusedStateThreads, ComplexParameters) {
  const auto initial = at::complex(ramp({3}), ramp({3}).flip(0)), pull = at::complex(ramp({3}).flip(0), ramp({3}));
  auto parts = at::view_as_real(initial).clone().requires_grad_();
  torch::optim::AdamW theirs({parts}, torch::optim::AdamWOptions(0.1).amsgrad(true));
  for (int step = 0; step < 3; ++step) {
    parts.mutable_grad() = at::view_as_real(pull * (step + 1));
    theirs.step();
  }
  run_ranks(2, [&](int) {
    auto net = std::make_shared<FunctionNet>([](FunctionNet& self, const at::Tensor& x) { return self.at("p") * x; });
    net->add("p", initial.clone());
    auto model = fully_shard(std::static_pointer_cast<Net>(net));
    optim::AdamW ours(net->parameters(), torch::optim::AdamWOptions(0.1).amsgrad(true));
    at::NoGradGuard no_grad;
    for (int step = 0; step < 3; ++step) {
      net->at("p").mutable_grad() = at::zeros_like(net->at("p")).copy_(pull * (step + 1));
      ours.step();
    }
    EXPECT_LT(difference(at::view_as_real(dtensor(net->at("p")).full_tensor()), parts.detach()), 1e-9);
  });
}

TEST(FusedStateThreads, RefusesWhatItWouldGetWrong) {
  run_ranks(2, [](int) {
    torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(5, 3).sparse(true));
    optim::SGD plain(embedding->parameters(), torch::optim::SGDOptions(0.1));
    embedding->forward(at::zeros({2}, at::kLong)).sum().backward();
    EXPECT_THROW(plain.step(), InvalidArgument);

    const auto net = mixed_net();
    auto model = fully_shard(net);
    optim::SGD ours(net->parameters(), torch::optim::SGDOptions(0.1));
    net->parameters()[0].mutable_grad() = at::ones({1});
    try {
      ours.step();
      ADD_FAILURE() << "an ordinary gradient was taken";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("parameter 'scale'"), std::string::npos) << error.what();
    }
  });
}

}  // namespace
}  // namespace fsdp::testing
