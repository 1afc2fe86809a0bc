// Rows 5, 6, 7 and 22: in-place writes, gradients of gradients, inference mode, a graph that is kept.
#include "cases.h"

namespace fsdp::testing {
namespace {

// Row 5: the parent writes in place into a view that its child returned.
struct ChildImpl : torch::nn::Module {
  ChildImpl() { linear = register_module("linear", torch::nn::Linear(4, 4)); }
  at::Tensor forward(const at::Tensor& x) { return linear(torch::tanh(x)).view({-1}).view({-1, 4}); }
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Child);

struct ParentImpl : torch::nn::Module {
  ParentImpl() {
    first = register_module("first", torch::nn::Linear(4, 4));
    child = register_module("child", Child());
    last = register_module("last", torch::nn::Linear(4, 3));
  }
  at::Tensor forward(const at::Tensor& x) {
    auto out = child(torch::tanh(first(x)));
    if (in_place) {
      out += x;
    } else {
      out = out + x;
    }
    return last(out);
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  Child child{nullptr};
  bool in_place = true;
};
TORCH_MODULE(Parent);

TEST(AutogradThreads, Row5InPlaceOnAViewThatAChildReturned) {
  Recipe<Parent> recipe;
  recipe.make = [] { return Parent(); };
  recipe.shard = [](Parent& net, const DeviceMesh& mesh) {
    fully_shard(net->child, {.mesh = mesh});
    return fully_shard(net, {.mesh = mesh});
  };
  recipe.body = [](Side<Parent>& run) {
    run.net->in_place = run.handle != nullptr;  // the plain model goes out of place
    Values values;
    for (int step = 0; step < 3; ++step) {
      run.net->zero_grad();
      const auto loss = run.forward(at::linspace(-1, 1, 8).view({2, 4})).pow(2).sum();
      loss.backward();
      values.push_back(loss);
    }
    const auto rest = parameters_and_gradients(*run.net);
    values.insert(values.end(), rest.begin(), rest.end());
    return values;
  };
  expect_like_plain(recipe);
}

// Row 6: a penalty on the input's gradient, with every combination of what is freed when.
TEST(AutogradThreads, Row6GradientPenalty) {
  for (const bool after_forward : {false, true}) {
    for (const bool after_backward : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "reshard after forward " << after_forward << ", backward "
                                        << after_backward);
      Recipe<Stack> recipe;
      recipe.make = [] { return Stack(2, 6); };
      recipe.shard = [=](Stack& net, const DeviceMesh& mesh) {
        auto model = shard_blocks(net, mesh);
        model.set_reshard_after_forward(after_forward);
        model.set_reshard_after_backward(after_backward);
        return model;
      };
      recipe.body = [](Side<Stack>& run) {
        torch::optim::SGD optimizer(run.net->parameters(), 0.1);
        Values values;
        for (int step = 0; step < 3; ++step) {
          auto x = at::linspace(-1, 1, 12).view({2, 6}).requires_grad_();
          const auto y = run.forward(x).sum();
          const auto g = torch::autograd::grad({y}, {x}, {}, /*retain_graph=*/true, /*create_graph=*/true)[0];
          optimizer.zero_grad();
          const auto loss = y + g.pow(2).sum();
          loss.backward();
          optimizer.step();
          values.push_back(loss);
          values.push_back(g);
          values.push_back(x.grad());
        }
        const auto rest = parameters_and_gradients(*run.net);
        values.insert(values.end(), rest.begin(), rest.end());
        return values;
      };
      expect_like_plain(recipe);
    }
  }
}

// The inner gradient may also be taken inside the forward.
struct EnergyImpl : torch::nn::Module {
  EnergyImpl() { net = register_module("net", Stack(2, 6)); }
  at::Tensor forward(const at::Tensor& input) {
    auto x = input.detach().requires_grad_();
    const auto energy = net(x).sum();
    const auto force = torch::autograd::grad({energy}, {x}, {}, true, /*create_graph=*/true)[0];
    return energy + force.pow(2).sum();
  }
  Stack net{nullptr};
};
TORCH_MODULE(Energy);

TEST(AutogradThreads, Row6InsideTheForward) {
  Recipe<Energy> recipe;
  recipe.make = [] { return Energy(); };
  recipe.shard = [](Energy& net, const DeviceMesh& mesh) {
    shard_blocks(net->net, mesh);
    return fully_shard(net, {.mesh = mesh, .reshard_after_forward = true});
  };
  recipe.body = [](Side<Energy>& run) {
    Values values;
    for (int step = 0; step < 3; ++step) {
      run.net->zero_grad();
      values.push_back(run.forward(at::linspace(-1, 1, 12).view({2, 6})));
      values.back().backward();
    }
    const auto rest = parameters_and_gradients(*run.net);
    values.insert(values.end(), rest.begin(), rest.end());
    return values;
  };
  expect_like_plain(recipe);
}

// A parameter's own gradient with a graph cannot be reduced and kept: an error names the parameter.
TEST(AutogradThreads, Row6BackwardWithCreateGraphIsRefusedByName) {
  const auto errors = errors_of(2, [](int) {
    Stack net(2, 6);
    auto model = shard_blocks(net, {});
    model(at::ones({2, 6})).pow(2).sum().backward({}, /*keep_graph=*/true, /*create_graph=*/true);
  });
  expect_every_rank_says(errors, {"parameter 'head.", "create_graph", "autograd::grad"});
}

TEST(AutogradThreads, GradWithRespectToParametersAndInputs) {
  for (const bool create_graph : {false, true}) {
    Recipe<Stack> recipe;
    recipe.make = [] { return Stack(2, 6); };
    recipe.shard = shard_blocks;
    recipe.body = [=](Side<Stack>& run) {
      Values values;
      for (int step = 0; step < 3; ++step) {
        auto x = at::linspace(-1, 1, 12).view({2, 6}).requires_grad_();
        auto inputs = run.net->parameters();
        inputs.push_back(x);
        const auto loss = run.forward(x).pow(2).sum();
        const auto gradients = torch::autograd::grad({loss}, inputs, {}, /*retain_graph=*/true, create_graph);
        for (const auto& g : gradients) values.push_back(g);
        for (const auto& p : run.net->parameters()) values.push_back(p.grad());
        run.net->zero_grad();
        if (create_graph) {
          // The gradients' own gradients: an ordinary backward through them.
          at::Tensor norm = at::zeros({});
          for (const auto& g : gradients) norm = norm + g.pow(2).sum();
          norm.backward();
        } else {
          loss.backward();
        }
        for (const auto& p : run.net->parameters()) values.push_back(p.grad());
        run.net->zero_grad();
      }
      return values;
    };
    expect_like_plain(recipe);
  }
}

TEST(AutogradThreads, Row7InferenceModeBeforeTraining) {
  for (const bool first_blocks : {false, true}) {
    Recipe<torch::nn::Linear> recipe;
    recipe.make = [] { return torch::nn::Linear(4, 4); };
    recipe.body = [=](Side<torch::nn::Linear>& run) {
      const auto x = at::linspace(-1, 1, 8).view({2, 4});
      Values values;
      for (int step = 0; step < 2; ++step) {
        {
          c10::InferenceMode inference;
          values.push_back(run.forward(x).clone());
          if (first_blocks) run.forward(x);
        }
        run.net->zero_grad();
        run.forward(x).pow(2).sum().backward();
        const auto rest = parameters_and_gradients(*run.net);
        values.insert(values.end(), rest.begin(), rest.end());
      }
      return values;
    };
    expect_like_plain(recipe);
  }
}

// Row 22: the graph saved weights that the optimizer has changed since.
TEST(AutogradThreads, Row22BackwardAgainAfterAStep) {
  for (const bool reshard : {true, false}) {
    const auto errors = errors_of(2, [reshard](int) {
      Stack net(2, 6);
      auto model = shard_blocks(net, {});
      model.set_reshard_after_forward(reshard);
      model.set_reshard_after_backward(reshard);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      const auto loss = model(at::ones({2, 6})).pow(2).sum();
      loss.backward({}, /*keep_graph=*/true);
      optimizer.step();
      loss.backward();
    });
    expect_every_rank_says(errors, {"modified by an inplace operation"});
  }
}

TEST(AutogradThreads, Row22TrainingGoesOnAfterTheError) {
  Recipe<Stack> recipe;
  recipe.make = [] { return Stack(2, 6); };
  recipe.shard = shard_blocks;
  recipe.body = [](Side<Stack>& run) {
    const auto x = at::linspace(-1, 1, 12).view({2, 6});
    torch::optim::SGD optimizer(run.net->parameters(), 0.1);
    const auto loss = run.forward(x).pow(2).sum();
    loss.backward({}, /*keep_graph=*/true);
    optimizer.step();
    // Plain: torch's C++ SGD writes through data(), which autograd does not see, and the wrong gradient goes unnoticed.
    if (run.handle) {
      EXPECT_NE(error_of([&] { loss.backward(); }), "");
      run.handle->reset_iter_state();
    }
    optimizer.zero_grad();
    run.forward(x).pow(2).sum().backward();
    return parameters_and_gradients(*run.net);
  };
  expect_like_plain(recipe);
}

TEST(AutogradThreads, BackwardTwiceOverOneGraph) {
  Recipe<Stack> recipe;
  recipe.make = [] { return Stack(2, 6); };
  recipe.shard = shard_blocks;
  recipe.body = [](Side<Stack>& run) {
    for (int step = 0; step < 2; ++step) {
      const auto loss = run.forward(at::linspace(-1, 1, 12).view({2, 6})).pow(2).sum();
      loss.backward({}, /*keep_graph=*/true);
      loss.backward();
    }
    return parameters_and_gradients(*run.net);
  };
  expect_like_plain(recipe);
}

}  // namespace
}  // namespace fsdp::testing
