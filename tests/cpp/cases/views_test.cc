// Row 25: a view of a parameter that is held while its group is resharded.
#include "cases.h"

namespace fsdp::testing {
namespace {

using View = at::Tensor (*)(const at::Tensor&);
using Read = at::Tensor (*)(const at::Tensor&);

const std::vector<std::pair<const char*, View>> kViews{
    {"transpose", [](const at::Tensor& w) { return w.t(); }},
    {"row", [](const at::Tensor& w) { return w[1]; }},
    {"rows", [](const at::Tensor& w) { return w.narrow(0, 1, 3); }},
    {"flat", [](const at::Tensor& w) { return w.view({-1}); }},
    {"detached", [](const at::Tensor& w) { return w.detach(); }},
    {"expanded",
     [](const at::Tensor& w) {
       return w.unsqueeze(0).expand({2, 5, 5});
     }},
    {"view of a view", [](const at::Tensor& w) { return w.t().select(0, 2).narrow(0, 0, 4); }},
};
const std::vector<std::pair<const char*, Read>> kReads{
    {"sum", [](const at::Tensor& v) { return v.sum(); }},
    {"clone", [](const at::Tensor& v) { return v.clone().pow(2).sum(); }},
    {"add", [](const at::Tensor& v) { return v.add(1).pow(2).sum(); }},
};

/// Takes a view of its first block's weight, runs the second block (which frees the first), then reads the view.
struct HolderImpl : torch::nn::Module {
  HolderImpl() {
    first = register_module("first", torch::nn::Linear(5, 5));
    second = register_module("second", torch::nn::Linear(5, 5));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto h = torch::tanh(first(x));
    held = view(first->weight);
    h = torch::tanh(second(h));
    if (in_backward && h.requires_grad()) {
      // Runs in backward, where the second block is in use.
      h.register_hook([v = held.detach(), r = read](const at::Tensor& g) { return g * r(v); });
      return h.sum();
    }
    return h.sum() * read(held);
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  View view = nullptr;
  Read read = nullptr;
  bool in_backward = false;
  at::Tensor held;
};
TORCH_MODULE(Holder);

FSDPModule<Holder> shard(Holder& net, const DeviceMesh& mesh) {
  fully_shard(net->first, {.mesh = mesh});
  fully_shard(net->second, {.mesh = mesh});
  return fully_shard(net, {.mesh = mesh, .reshard_after_forward = true});
}

Recipe<Holder> recipe(bool in_backward) {
  Recipe<Holder> recipe;
  recipe.make = [] { return Holder(); };
  recipe.shard = shard;
  recipe.body = [in_backward](Side<Holder>& run) {
    run.net->in_backward = in_backward;
    torch::optim::SGD optimizer(run.net->parameters(), 0.01);
    Values values;
    for (const auto& [view_name, view] : kViews) {
      for (const auto& [read_name, read] : kReads) {
        run.net->view = view;
        run.net->read = read;
        optimizer.zero_grad();
        const auto loss = run.forward(at::linspace(-1, 1, 10).view({2, 5}));
        loss.backward();
        optimizer.step();
        values.push_back(loss);
        for (const auto& p : run.net->parameters()) values.push_back(whole(p.grad()));
      }
    }
    return values;
  };
  return recipe;
}

TEST(ViewsThreads, Row25ReadInsideForward) { expect_like_plain(recipe(false)); }
TEST(ViewsThreads, Row25ReadInsideBackward) { expect_like_plain(recipe(true)); }

TEST(ViewsThreads, Row25ReadOutside) {
  for (const bool grad_mode : {true, false}) {
    for (const auto& [view_name, view] : kViews) {
      for (const auto& [read_name, read] : kReads) {
        SCOPED_TRACE(std::string(view_name) + " " + read_name);
        run_ranks(2, [&, view = view, read = read](int) {
          Holder net;
          auto model = shard(net, {});
          net->view = view;
          net->read = read;
          const auto loss = model(at::ones({2, 5}));
          at::AutoGradMode mode(grad_mode);
          const auto refused = [&](const char* when) {
            const auto what = error_of([&] { read(net->held); });
            EXPECT_NE(what.find("'first.weight'"), std::string::npos) << when << ": " << what;
            EXPECT_NE(what.find("unshard()"), std::string::npos) << when << ": " << what;
          };
          refused("after forward");
          {
            at::AutoGradMode grad(true);
            loss.backward();
          }
          refused("after backward");
        });
      }
    }
  }
}

// Where a group stays whole, a held view is readable until its shard is written; then it would be old.
TEST(ViewsThreads, Row25OutsideWhileTheGroupStaysWhole) {
  run_ranks(2, [](int) {
    auto net = ones_linear(4, 6);
    auto model = fully_shard(net, {.reshard_after_forward = false});
    model.set_reshard_after_backward(false);
    torch::optim::SGD optimizer(net->parameters(), 0.5);
    at::Tensor held;
    {
      module::ForwardScope scope(model.state());
      held = net->weight.t().detach();
      net->forward(at::ones({1, 4}));
      scope.complete();
    }
    EXPECT_EQ(held.sum().item<double>(), 24);
    model(at::ones({1, 4})).sum().backward();
    EXPECT_EQ(held.sum().item<double>(), 24);
    optimizer.step();
    const auto what = error_of([&] { EXPECT_EQ(held.sum().item<double>(), 12); });
    EXPECT_NE(what.find("'weight'"), std::string::npos) << what;
    EXPECT_NE(what.find("unshard()"), std::string::npos) << what;
    model(at::ones({1, 4}));  // gathers anew
    EXPECT_EQ(held.sum().item<double>(), 12);
  });
}

// The same by hand: unshard() shows the whole, and what is written to the shards meanwhile is seen.
TEST(ViewsThreads, UnshardedByHandNeverShowsOldValues) {
  run_ranks(2, [](int) {
    auto net = ones_linear(4, 6);
    auto model = fully_shard(net);
    at::NoGradGuard no_grad;
    model.unshard();
    const auto view = net->weight.t();
    EXPECT_EQ(view.sizes(), (std::vector<int64_t>{4, 6}));
    EXPECT_EQ(view.sum().item<double>(), 24);
    net->weight.mul_(3);
    EXPECT_EQ(net->weight.sum().item<double>(), 72);
    const auto what = error_of([&] { EXPECT_EQ(view.sum().item<double>(), 72); });
    EXPECT_TRUE(what.empty() || what.find("'weight'") != std::string::npos) << what;
    model.unshard();
    EXPECT_EQ(net->weight.t().sum().item<double>(), 72);
    model.reshard();
    EXPECT_NE(error_of([&] { net->weight.t(); }).find("'weight'"), std::string::npos);
  });
}

// A view that outlives its model.
TEST(ViewsThreads, Row25TheModelIsGone) {
  run_ranks(2, [](int) {
    at::Tensor held, parameter;
    {
      Holder net;
      auto model = shard(net, {});
      net->view = kViews[0].second;
      net->read = kReads[0].second;
      model(at::ones({2, 5}));
      held = net->held;
      net->held.reset();
    }
    EXPECT_NE(error_of([&] { held.sum(); }).find("libfsdp"), std::string::npos);
    EXPECT_NE(error_of([&] { held.clone(); }).find("libfsdp"), std::string::npos);
  });
}

}  // namespace
}  // namespace fsdp::testing
