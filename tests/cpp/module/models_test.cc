// Models whose modules are used in ways that make a group's beginning and end hard to see.
#include "nets.h"

namespace fsdp::testing {
namespace {

using namespace torch::nn;

struct ModelsThreads : OnRanks {};

TEST_P(ModelsThreads, ModuleUsedTwice) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        net.add("in", Linear(6, 6));
        net.add("twice", Linear(6, 6));
        net.add("out", Linear(6, 3));
      },
      [](FunctionNet& net, const at::Tensor& x) {
        auto& twice = net.module<LinearImpl>("twice");
        const auto y = at::tanh(twice.forward(at::tanh(net.module<LinearImpl>("in").forward(x))));
        return net.module<LinearImpl>("out").forward(at::tanh(twice.forward(y)));
      });
  c.batch = ramp({2 * ranks(), 6});
  expect_parity(ranks(), c);
}

// The child is used, left, and entered again: its group is gathered twice in one forward.
TEST_P(ModelsThreads, ModuleUsedTwiceWithAnotherBetween) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        net.add("a", Linear(6, 6));
        net.add("b", Linear(6, 6));
      },
      [](FunctionNet& net, const at::Tensor& x) {
        auto& a = net.module<LinearImpl>("a");
        auto& b = net.module<LinearImpl>("b");
        return b.forward(at::tanh(a.forward(at::tanh(b.forward(at::tanh(a.forward(x)))))));
      });
  c.batch = ramp({2 * ranks(), 6});
  expect_parity(ranks(), c);
}

/// outer { weight, middle { weight, inner Linear, weight again }, weight again }
struct Shell : torch::nn::Module {
  Shell(int64_t width, std::shared_ptr<Shell> i)
      : weight(register_parameter("weight", torch::randn({width, width}) / 3)), inner(std::move(i)) {
    if (inner) register_module("inner", inner);
  }
  at::Tensor forward(const at::Tensor& x) {
    auto y = at::tanh(at::mm(x, weight));
    if (inner) y = inner->forward(y) + y;
    return at::tanh(at::mm(y, weight.t()));  // after the inner one: the outer group is still open
  }
  at::Tensor weight;
  std::shared_ptr<Shell> inner;
};
struct ShellNet : Net {
  ShellNet()
      : shell(register_module(
            "shell", std::make_shared<Shell>(5, std::make_shared<Shell>(5, std::make_shared<Shell>(5, nullptr))))) {}
  at::Tensor forward(const at::Tensor& x) override { return shell->forward(shell->forward(x)); }
  std::shared_ptr<Shell> shell;
};

TEST_P(ModelsThreads, GroupsInsideGroups) {
  Case c;
  c.make = [] { return std::make_shared<ShellNet>(); };
  c.batch = ramp({2 * ranks(), 5});
  c.shard_parts = [](Net& net, const FullyShardOptions& options) {
    auto& shell = dynamic_cast<ShellNet&>(net).shell;
    fully_shard(shell->inner->inner, options);
    fully_shard(shell->inner, options);
    fully_shard(shell, options);
  };
  expect_parity(ranks(), c, Grouping::kChildren);
  c.options.reshard_after_forward = true;  // the root's too
  expect_parity(ranks(), c, Grouping::kChildren);
  c.options.reshard_after_forward = false;
  expect_parity(ranks(), c, Grouping::kChildren);
}

// A transposed view of a's weight is made first and read after b ran, when a's group was resharded.
TEST_P(ModelsThreads, ViewHeldWhileAnotherGroupRuns) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        net.add("a", Linear(6, 6));
        net.add("b", Linear(6, 6));
        net.add("c", Linear(6, 6));
      },
      [](FunctionNet& net, const at::Tensor& x) {
        auto& a = net.module<LinearImpl>("a");
        const auto held = a.weight.t();
        const auto row = a.weight[1];
        auto y = at::tanh(a.forward(x));
        y = at::tanh(net.module<LinearImpl>("b").forward(y));
        y = at::tanh(net.module<LinearImpl>("c").forward(y));
        return at::mm(y, held) * row + held.sum();
      });
  c.batch = ramp({2 * ranks(), 6});
  expect_parity(ranks(), c);
}

/// A layer of its own that reads a tensor registered elsewhere too.
struct HeadImpl : torch::nn::Module {
  explicit HeadImpl(const at::Tensor& tied) : weight(register_parameter("weight", tied)) {}
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, weight); }
  at::Tensor weight;
};
TORCH_MODULE(Head);

// Registered in two modules, in one group: the list {embedding, head}, or the root's.
TEST_P(ModelsThreads, TiedEmbedding) {
  struct Tied : Net {
    Tied() {
      embedding = register_module("embedding", Embedding(17, 6));
      middle = register_module("middle", Linear(6, 6));
      head = register_module("head", Head(embedding->weight));
    }
    at::Tensor forward(const at::Tensor& x) override { return head(at::tanh(middle(at::tanh(embedding(x))))); }
    Embedding embedding{nullptr};
    Linear middle{nullptr};
    Head head{nullptr};
  };
  Case c;
  c.make = [] { return std::make_shared<Tied>(); };
  c.batch = ramp({2 * ranks(), 3}).add(1).mul(8).to(at::kLong);
  c.shard_parts = [](Net& net, const FullyShardOptions& options) {
    auto& tied = dynamic_cast<Tied&>(net);
    fully_shard({tied.embedding.ptr(), tied.head.ptr()}, options);
    fully_shard(tied.middle, options);
  };
  expect_parity(ranks(), c);
}

TEST_P(ModelsThreads, RawParameters) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        net.add("a", torch::randn({7, 4}) / 2);
        net.add("b", torch::randn({5, 4, 3}) / 2);
        net.add("c", torch::randn({9}) / 2);
      },
      [](FunctionNet& net, const at::Tensor& x) {  // x: [n, 7]
        const auto& a = net.at("a");
        const auto& b = net.at("b");
        const auto& c = net.at("c");
        auto y = at::einsum("nr,rc->nc", {x, a});
        y = at::einsum("nc,kcd->nkd", {y, b}).flatten(1);         // [n, 15]
        y = at::tanh(y) * c.slice(0, 1, 6).repeat({3});           // a slice
        const auto picked = a.index({torch::tensor({0, 6, 2})});  // rows by index
        const auto masked = c.index({c.detach() > 0}).sum();      // by mask
        const auto viewed = b.view({20, 3}).narrow(0, 3, 5).sum(0);
        return y.sum(1, true) + picked.sum() + masked + viewed.prod() + a.select(1, 2).norm() +
               at::stack({a[0], a[1]}).std() + at::cat({c, a.flatten()}).pow(3).mean() / static_cast<double>(a.size(0));
      });
  c.batch = ramp({2 * ranks(), 7});
  expect_parity(ranks(), c, Grouping::kOne);
}

TEST_P(ModelsThreads, FrozenParts) {
  Case c;
  c.make = function_net(
      [](FunctionNet& net) {
        net.add("a", Linear(6, 6));
        net.add("frozen", Linear(6, 6));  // a wholly frozen group where grouped by child
        net.add("c", Linear(6, 3));
        for (auto& parameter : net.module<LinearImpl>("frozen").parameters()) parameter.set_requires_grad(false);
        net.module<LinearImpl>("c").bias.set_requires_grad(false);
      },
      [](FunctionNet& net, const at::Tensor& x) {
        const auto y = net.module<LinearImpl>("frozen").forward(at::tanh(net.module<LinearImpl>("a").forward(x)));
        return net.module<LinearImpl>("c").forward(at::tanh(y));
      });
  c.batch = ramp({2 * ranks(), 6});
  expect_parity(ranks(), c);
}

// Frozen at first, thawed after the first step, frozen again after the third.
TEST_P(ModelsThreads, FreezingAndThawing) {
  for (auto grouping : {Grouping::kOne, Grouping::kChildren}) {
    run_twins(ranks(), mlp({6, 5, 4}, 2 * ranks()), grouping, [](Twin& twin, int) {
      const auto set = [&](bool wanted) {
        for (auto* net : {&twin.plain(), &twin.net()}) {
          for (auto& parameter : as_mlp(*net).layers[0]->parameters()) parameter.set_requires_grad(wanted);
        }
      };
      set(false);
      twin.train_step();
      set(true);
      twin.train_step();
      twin.train_step();
      set(false);
      twin.zero_grad();
      twin.train_step();
      twin.expect_equal_parameters();
    });
  }
}

// Parts called through their own handles, not from within the root's forward: each call is a forward of its own.
TEST_P(ModelsThreads, HandlesCalledApart) {
  run_twins(ranks(), mlp({6, 9, 7, 4}, 2 * ranks()), Grouping::kChildren, [](Twin& twin, int) {
    for (int step = 0; step < 4; ++step) {
      twin.zero_grad();
      const auto before = twin.context().stats();
      auto y = twin.samples_here(twin.the_case().batch);
      for (size_t i = 0; i < 3; ++i) {
        y = call(as_mlp(twin.net()).layers[i], i == 0 ? y : at::tanh(y));
      }
      const auto plain = twin.plain_loss(), sharded = y.pow(2).mean();
      twin.expect_equal_losses(plain, sharded);
      plain.backward();
      sharded.backward();
      twin.expect_equal_gradients();
      twin.optimizer_step();
      EXPECT_EQ(twin.context().stats().gathers - before.gathers, 5);  // 3, and again but for the first layer's
      EXPECT_EQ(twin.context().stats().reduces - before.reduces, 3);
    }
    twin.expect_equal_parameters();
  });
}

FSDP_ON_RANKS(ModelsThreads, 1, 2, 3, 5);

}  // namespace
}  // namespace fsdp::testing
