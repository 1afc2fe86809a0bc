#pragma once
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "parity.h"

/// Models that several tests train.
namespace fsdp::testing {

/// Registers what its maker gives and runs a function of it: `at("name")` is a parameter of its own.
struct FunctionNet : Net {
  using Run = std::function<at::Tensor(FunctionNet& net, const at::Tensor& x)>;
  explicit FunctionNet(Run r) : run(std::move(r)) {}
  at::Tensor forward(const at::Tensor& x) override { return run(*this, x); }

  FunctionNet& add(const std::string& name, at::Tensor parameter, bool requires_grad = true) {
    register_parameter(name, std::move(parameter), requires_grad);
    return *this;
  }
  template <class Holder>
  FunctionNet& add(const std::string& name, torch::nn::ModuleHolder<Holder> module) {
    register_module(name, std::move(module));
    return *this;
  }
  const at::Tensor& at(const std::string& name) const { return *parameters_.find(name); }
  template <class Impl>
  Impl& module(const std::string& name) const {
    return *named_children()[name]->as<Impl>();
  }

  Run run;
};

using Fill = std::function<void(FunctionNet& net)>;
/// A Case's `make` for a FunctionNet: `fill` adds what `run` uses.
std::function<NetPtr()> function_net(Fill fill, FunctionNet::Run run);

/// Linear layers of these widths with tanh between them: children "layers.0", ...
struct MlpNet : Net {
  explicit MlpNet(const std::vector<int64_t>& widths);
  at::Tensor forward(const at::Tensor& x) override;
  std::vector<torch::nn::Linear> layers;
};
/// A batch of `samples` rows for it comes with the case.
Case mlp(const std::vector<int64_t>& widths, int64_t samples);
/// Two of its layers have so many bytes that their memory, and on some engines their messages, go another way.
Case wide_mlp(int64_t samples);
MlpNet& as_mlp(Net& net);
/// The handle of layer `i`'s group.
FSDPModule<torch::nn::Linear> layer_group(Net& net, size_t i);

/// Two samples a rank of a model with children "a", "b", "c": rank 0 goes through a and b, the others through a and c.
Case uneven_use_case(int ranks);

/// The GPT of examples/gpt, small; groups: each block, and the root.
Case gpt_case(int64_t samples, bool tied);

}  // namespace fsdp::testing
