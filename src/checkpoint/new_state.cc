#include "checkpoint/new_state.h"

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>
#include <fsdp/error.h>

#include "checkpoint/match.h"
#include "checkpoint/optimizer_state.h"
#include "tensor/sharded_tensor.h"

namespace fsdp::checkpoint {
namespace {

// A state tensor of `parameter` as the checkpoint has it: the old one if it can take the values, else a new one.
at::Tensor state_tensor(const at::Tensor& old, const at::Tensor& parameter, at::ScalarType type) {
  const bool sharded = tensor::is_sharded(parameter);
  if (old.defined() && old.scalar_type() == type && old.sizes() == parameter.sizes() &&
      tensor::is_sharded(old) == sharded) {
    return old;
  }
  const auto local = sharded ? tensor::local_of(parameter) : parameter;
  auto fresh = at::empty_like(local, local.options().dtype(type).requires_grad(false));
  return sharded ? tensor::sharded_like(parameter, std::move(fresh)) : fresh;
}

}  // namespace

NewStates prepare_states(const torch::optim::Optimizer& optimizer, const Index& index, const ModelTensors& model,
                         std::vector<HeldTensor>& targets) {
  const auto& fields = OptimizerFields::of(optimizer);
  NewStates states;
  std::vector<LocalTensor> wanted;
  for (const auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const std::string& fqn = name_of(parameter, model);
      const auto counters = index.optimizer->counters.find(fqn);
      if (counters == index.optimizer->counters.end() || states.count(parameter.unsafeGetTensorImpl())) {
        continue;
      }
      const auto old = optimizer.state().find(parameter.unsafeGetTensorImpl());
      auto state = old == optimizer.state().end() ? fields.make_state() : old->second->clone();
      fields.visit(
          *state,
          [&](const char* field, at::Tensor& value) {
            const auto name = c10::str(kOptimizerPrefix, fqn, ".", field);
            const auto saved = index.tensors.find(name);
            if (saved == index.tensors.end()) {
              value = at::Tensor();
              return;
            }
            value = state_tensor(value, parameter, to_scalar_type(saved->second.dtype));
            targets.push_back(hold(name, value));
            wanted.push_back(targets.back().spec);
          },
          [&](const char* field, int64_t& value) {
            const auto count = counters->second.find(field);
            if (count == counters->second.end()) {
              throw CheckpointError("the checkpoint has no '" + std::string(field) + "' for '" + fqn + "'");
            }
            value = count->second;
          });
      states.emplace(parameter.unsafeGetTensorImpl(), std::move(state));
    }
  }
  check_match(index, kOptimizerPrefix, wanted, {}, "optimizer");
  return states;
}

void check_optimizer(const torch::optim::Optimizer& optimizer, const Index& index, const ModelTensors& model) {
  if (!index.optimizer) {
    throw CheckpointError("the checkpoint was saved without an optimizer; load the model alone");
  }
  std::vector<HeldTensor> unused;
  check_groups(*index.optimizer, collect_optimizer(optimizer, model, unused));
  const auto& fields = OptimizerFields::of(optimizer);
  for (size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    fields.set_options(*optimizer.param_groups()[i].options().clone(), index.optimizer->groups[i].options);
  }
}

void set_optimizer(torch::optim::Optimizer& optimizer, const Index& index, NewStates states) {
  const auto& fields = OptimizerFields::of(optimizer);
  for (size_t i = 0; i < optimizer.param_groups().size(); ++i) {
    fields.set_options(optimizer.param_groups()[i].options(), index.optimizer->groups[i].options);
  }
  optimizer.state().clear();
  for (auto& [parameter, state] : states) {
    optimizer.state()[parameter] = std::move(state);
  }
}

}  // namespace fsdp::checkpoint
