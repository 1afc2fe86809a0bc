// Rows 9, 14 - 17 and 21: odd parameters, meshes, many groups, a group of several modules, models that read sizes.
#include <cmath>

#include "cases.h"
#include "engine/context.h"
#include "module/module_state.h"

namespace fsdp::testing {
namespace {

TEST(ShapesThreads, Row9DivideFactorOnOneAndTwoAxes) {
  for (const bool two_axes : {false, true}) {
    run_ranks(2, [two_axes](int rank) {
      auto mesh = two_axes ? init_device_mesh(at::kCPU, {2, 1}, {"replicate", "shard"})
                           : init_device_mesh(at::kCPU, {2}, {"dp"});
      auto net = ones_linear(1, 2);
      auto model = fully_shard(net, {.mesh = mesh});
      for (const double factor : {8.0, 2.0}) {
        model.set_gradient_divide_factor(factor);
        net->zero_grad();
        model(at::full({1, 1}, rank + 1.0)).sum().backward();
        const auto gradient = whole(net->weight.grad());
        EXPECT_TRUE(at::equal(gradient, at::full({2, 1}, 3 / factor))) << gradient;
      }
    });
  }
}

// One module of any parameters and a function of them.
struct FreeImpl : torch::nn::Module {
  using Fn = std::function<at::Tensor(FreeImpl&, const at::Tensor&)>;
  FreeImpl(std::vector<std::pair<std::string, at::Tensor>> params, Fn f) : fn(std::move(f)) {
    for (auto& [name, tensor] : params) register_parameter(name, tensor);
  }
  at::Tensor forward(const at::Tensor& x) { return fn(*this, x); }
  at::Tensor p(size_t i) const { return parameters()[i]; }
  Fn fn;
};
TORCH_MODULE(Free);
using Params = std::vector<std::pair<std::string, at::Tensor>>;

template <class Make>
void expect_trains_like_plain(Make make, const at::Tensor& x) {
  Recipe<Free> recipe;
  recipe.make = make;
  recipe.body = [x](Side<Free>& run) {
    torch::optim::SGD optimizer(run.net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      run.forward(x).pow(2).mean().backward();
      optimizer.step();
    }
    return parameters_and_gradients(*run.net);
  };
  expect_like_plain(recipe);
}

TEST(ShapesThreads, Row14TransposedParameter) {
  const auto make = [] {
    return Free(Params{{"w", at::arange(16, at::kFloat).view({4, 4}).t()}},
                [](FreeImpl& m, const at::Tensor& x) { return x.matmul(m.p(0)); });
  };
  run_ranks(2, [&](int) {
    auto net = make();
    auto model = fully_shard(net);
    const auto row = whole(net->p(0))[0];
    EXPECT_TRUE(at::equal(row, at::tensor({0.f, 4.f, 8.f, 12.f}))) << row;
    const auto y = model(at::eye(4));
    EXPECT_TRUE(at::equal(y.detach()[0], at::tensor({0.f, 4.f, 8.f, 12.f}))) << y;
  });
  expect_trains_like_plain(make, at::eye(4) * 0.01);
}

TEST(ShapesThreads, Row15ZeroDimParameter) {
  const auto make = [] {
    return Free(Params{{"s", at::full({}, 2.f)}, {"w", at::ones({4})}},
                [](FreeImpl& m, const at::Tensor& x) { return x * m.p(0) * m.p(1); });
  };
  run_ranks(2, [&](int) {
    auto net = make();
    auto model = fully_shard(net);
    model(at::ones({4})).sum().backward();
    const auto ds = whole(net->p(0).grad()), dw = whole(net->p(1).grad());
    EXPECT_TRUE(at::equal(ds, at::full({}, 4.f))) << ds;
    EXPECT_TRUE(at::equal(dw, at::full({4}, 2.f))) << dw;
  });
  expect_trains_like_plain(make, at::ones({4}));
}

// Row 16: what 200 groups cost is counted here, and timed by the benchmarks.
struct NormsImpl : torch::nn::Module {
  NormsImpl() {
    norms = register_module("norms", torch::nn::ModuleList());
    for (int i = 0; i < 200; ++i) norms->push_back(torch::nn::LayerNorm(torch::nn::LayerNormOptions({8})));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& norm : *norms) x = x + norm->as<torch::nn::LayerNorm>()->forward(x);
    return x;
  }
  torch::nn::ModuleList norms{nullptr};
};
TORCH_MODULE(Norms);

TEST(ShapesThreads, Row16ManySmallGroups) {
  Recipe<Norms> recipe;
  recipe.make = [] { return Norms(); };
  recipe.shard = [](Norms& net, const DeviceMesh& mesh) {
    for (const auto& norm : *net->norms) fully_shard(norm, {.mesh = mesh});
    return fully_shard(net, {.mesh = mesh});
  };
  recipe.tolerance = 1e-4;
  recipe.body = [](Side<Norms>& run) {
    torch::optim::AdamW optimizer(run.net->parameters(), 1e-3);
    for (int step = 0; step < 3; ++step) {
      engine::Stats before;
      if (run.handle) before = run.handle->state()->context().stats();
      optimizer.zero_grad();
      run.forward(at::linspace(-1, 1, 16).view({2, 8})).pow(2).mean().backward();
      optimizer.step();
      if (!run.handle || step == 0) continue;
      // Once recorded: a gather a group in forward and one in backward, one reduction, and three meetings of the
      // ranks for the whole iteration. The optimizer sends nothing.
      const auto& after = run.handle->state()->context().stats();
      EXPECT_EQ(after.gathers - before.gathers, 400);
      EXPECT_EQ(after.reduces - before.reduces, 200);
      EXPECT_EQ(after.all_reduces - before.all_reduces, 0);
      EXPECT_EQ(after.agreements - before.agreements, 3);
    }
    return parameters_and_gradients(*run.net);
  };
  expect_like_plain(recipe);
}

// Row 17: mtp owns the head as a child and calls it; the root calls it again; all three are one group.
struct MtpImpl : torch::nn::Module {
  explicit MtpImpl(torch::nn::Linear h) {
    proj = register_module("proj", torch::nn::Linear(6, 6));
    head = register_module("head", h);
  }
  at::Tensor forward(const at::Tensor& x) { return head(torch::tanh(proj(x))); }
  torch::nn::Linear proj{nullptr}, head{nullptr};
};
TORCH_MODULE(Mtp);

struct RootImpl : torch::nn::Module {
  RootImpl() {
    body = register_module("body", torch::nn::Linear(6, 6));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
    head = register_module("head", torch::nn::Linear(6, 3));
    mtp = register_module("mtp", Mtp(head));
  }
  at::Tensor forward(const at::Tensor& x) {
    const auto h = norm(body(x));
    return mtp(h) + head(h);
  }
  torch::nn::Linear body{nullptr}, head{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  Mtp mtp{nullptr};
};
TORCH_MODULE(Root);

TEST(ShapesThreads, Row17OneGroupOfModulesThatContainEachOther) {
  Recipe<Root> recipe;
  recipe.make = [] { return Root(); };
  recipe.shard = [](Root& net, const DeviceMesh& mesh) {
    fully_shard({net->norm.ptr(), net->mtp.ptr(), net->head.ptr()}, {.mesh = mesh});
    return fully_shard(net, {.mesh = mesh});
  };
  recipe.body = [](Side<Root>& run) {
    torch::optim::SGD optimizer(run.net->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      run.forward(at::linspace(-1, 1, 12).view({2, 6})).pow(2).mean().backward();
      optimizer.step();
    }
    return parameters_and_gradients(*run.net);
  };
  expect_like_plain(recipe);
}

TEST(ShapesThreads, Row21ModelsThatReadSizes) {
  const auto make = [] {
    return Free(Params{{"w", at::linspace(-1, 1, 15).view({5, 3})}}, [](FreeImpl& m, const at::Tensor& x) {
      const auto w = m.p(0);
      EXPECT_EQ(w.sizes(), (std::vector<int64_t>{5, 3}));
      EXPECT_EQ(w.stride(0), 3);
      const auto rows = static_cast<double>(w.size(0));
      return x.matmul(w.t()) / std::sqrt(rows) + static_cast<double>(w.numel()) * w.new_ones({5}) +
             at::ones(w.sizes()).sum() + at::zeros_like(w).sum();
    });
  };
  expect_trains_like_plain(make, at::linspace(-1, 1, 6).view({2, 3}));
  run_ranks(2, [&](int) {
    auto net = make();
    fully_shard(net);
    EXPECT_EQ(net->p(0).sizes(), (std::vector<int64_t>{5, 3}));  // outside too
    EXPECT_EQ(net->p(0).numel(), 15);
    EXPECT_EQ(net->p(0).size(0), 5);
  });
}

}  // namespace
}  // namespace fsdp::testing
