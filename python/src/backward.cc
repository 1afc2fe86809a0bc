// Group's part in a backward.
#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>

#include "group.h"

namespace fsdp::python {
namespace {

/// On the node that made an output of sharded modules. Not a hook on the tensor: a user's register_hook replaces those.
struct OutputHook : torch::autograd::FunctionPreHook {
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    py::gil_scoped_acquire gil;  // groups are destroyed with it held
    for (const auto& group : groups) {
      if (const auto alive = group.lock()) (*alive)->begin_backward();
    }
    return gradients;
  }
  /// Several where modules return what an inner one made. Outer ones first: opening a group closes what is not around
  /// it.
  std::vector<std::weak_ptr<Group*>> groups;
};

OutputHook& hook_of(torch::autograd::Node& node) {
  for (const auto& hook : node.pre_hooks()) {
    if (auto* ours = dynamic_cast<OutputHook*>(hook.get())) return *ours;
  }
  auto made = std::make_unique<OutputHook>();
  auto& hook = *made;
  node.add_pre_hook(std::move(made));
  return hook;
}

/// Begins a backward of the group's model.
struct BeginHook : torch::autograd::FunctionPreHook {
  explicit BeginHook(engine::ParamGroup& g) : group(g) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    group.context().need(group);
    return gradients;
  }
  engine::ParamGroup& group;
};

/// Lives in the graph task of a backward, as its final callback's capture: the task drops it, run or not, so that what
/// a backward showed goes when it ended and when it threw.
struct Showing {
  ~Showing() { end(); }
  void end() {
    if (groups.empty()) return;
    py::gil_scoped_acquire gil;
    for (const auto& group : groups) {
      if (const auto alive = group.lock()) (*alive)->end_backward();
    }
    groups.clear();
  }
  std::vector<std::weak_ptr<Group*>> groups;
};

}  // namespace

void Group::watch(const std::vector<at::Tensor>& outputs) {
  for (const auto& output : outputs) {
    const auto& node = output.grad_fn();
    if (!node) continue;
    auto& groups = hook_of(*node).groups;
    groups.insert(groups.begin(), self_);
  }
}

void Group::begin_backward() {
  show_in_backward();
  if (!gathers_in_backward_ || params_.empty()) return;
  py::gil_scoped_release release;
  group_->context().need(*group_);
}

void Group::show_in_backward() {
  if (in_backward_ || !group_->shared_context()) return;
  auto showing = std::make_shared<Showing>();
  for (auto* each : group_->context().groups()) {
    if (!each) continue;
    auto& group = of(*each);
    if (group.in_backward_) continue;
    group.show_whole();
    group.in_backward_ = true;
    showing->groups.push_back(group.self_);
  }
  torch::autograd::Engine::get_default_engine().queue_callback([showing] { showing->end(); });
}

void Group::reduce_held() {
  engine::ParamGroup* first = nullptr;  // with parameters: a backward begins with the need of some
  for (auto* each : group_->context().groups()) {
    if (!first && each && of(*each).size() > 0) first = each;
  }
  if (!first) return;
  py::gil_scoped_release release;
  // Reductions belong to a backward: its end is where ranks agree on what is left. So this is one, of nothing.
  at::AutoGradMode recording(true);
  const auto end = at::zeros({}).requires_grad_(true).clone();
  end.grad_fn()->add_pre_hook(std::make_unique<BeginHook>(*first));
  torch::autograd::backward({end}, {at::ones({})});
}

void Group::end_backward() {
  in_backward_ = false;
  show_sharded();
}

}  // namespace fsdp::python
