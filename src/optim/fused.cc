#include <fsdp/optim.h>

#include <map>
#include <tuple>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/full.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros_like.h>
#include <fsdp/error.h>

#include "tensor/facade.h"

namespace fsdp::optim {
namespace {

/// What this rank holds of one parameter, or of its gradient or state.
at::Tensor held(const at::Tensor& tensor) {
  const auto* tag = tensor::facade_of(tensor);
  const auto& local = tag ? tag->local : tensor;
  return local.is_complex() ? at::view_as_real(local) : local;
}

std::string name_of(const at::Tensor& parameter) {
  const auto* tag = tensor::facade_of(parameter);
  return tag ? "parameter '" + tag->spec->name + "'" : "a parameter of sizes " + c10::str(parameter.sizes());
}

/// Whether `tensor` lies as `parameter` does.
bool lies_like(const at::Tensor& tensor, const at::Tensor& parameter) {
  const auto *tag = tensor::facade_of(tensor), *wanted = tensor::facade_of(parameter);
  return tag && wanted ? tag->spec->lies_like(*wanted->spec) : tag == wanted && tensor.sizes() == parameter.sizes();
}

void check_gradient(const at::Tensor& parameter) {
  const auto& gradient = parameter.grad();
  if (gradient.is_sparse()) {
    throw InvalidArgument("libfsdp: " + name_of(parameter) + " has a sparse gradient; fused steps take dense ones");
  }
  if (!lies_like(gradient, parameter) || gradient.scalar_type() != parameter.scalar_type()) {
    throw InvalidArgument("libfsdp: the gradient of " + name_of(parameter) + " (sizes " + c10::str(gradient.sizes()) +
                          ", " + c10::toString(gradient.scalar_type()) +
                          ") does not lie as it does; leave .grad to backward, or give it a tensor made by zeros_like");
  }
}

/// A state tensor for `parameter`: `state` itself, made to lie as the parameter does (one from before sharding is cut),
/// or zeros.
at::Tensor& state_for(const at::Tensor& parameter, at::Tensor& state) {
  if (!state.defined()) {
    state = at::zeros_like(parameter);
  } else if (!lies_like(state, parameter)) {
    const auto* tag = tensor::facade_of(parameter);
    if (!tag || tensor::facade_of(state) || state.sizes() != parameter.sizes()) {
      throw InvalidArgument("libfsdp: the optimizer's state of " + name_of(parameter) + " (sizes " +
                            c10::str(state.sizes()) + ") does not lie as it does; was it another model's?");
    }
    state = tensor::make_facade(tag->spec, tag->spec->part_of(state).clone(at::MemoryFormat::Contiguous));
  }
  return state;
}

/// The parameters' state of class State, made where there is none.
template <class State, class States>
State& state_of(States& states, const at::Tensor& parameter) {
  auto& state = states[parameter.unsafeGetTensorImpl()];
  if (!state) state = std::make_unique<State>();
  return static_cast<State&>(*state);
}

at::Tensor run(const torch::optim::Optimizer::LossClosure& closure) {
  if (!closure) return {};
  at::AutoGradMode record(true);
  return closure();
}

/// Tensors that one kernel may take together.
struct Batch {
  std::vector<at::Tensor> params, grads, first, second, third;
  /// After the kernel: whoever watches the parameters' versions (a graph, a group that is whole) sees the write.
  void note_write() const {
    for (const auto& param : params) param.unsafeGetTensorImpl()->bump_version();
  }
};
/// By dtype, device, and what else must be equal.
template <class... More>
using Batches = std::map<std::tuple<at::ScalarType, c10::DeviceType, int, More...>, Batch>;

template <class... More>
Batch& batch_of(Batches<More...>& batches, const at::Tensor& held, More... more) {
  return batches[{held.scalar_type(), held.device().type(), held.device().index(), more...}];
}

}  // namespace

at::Tensor AdamW::step(LossClosure closure) {
  at::NoGradGuard no_grad;
  auto loss = run(closure);
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const torch::optim::AdamWOptions&>(group.options());
    Batches<int64_t> batches;
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      check_gradient(parameter);
      auto& state = state_of<torch::optim::AdamWParamState>(state_, parameter);
      state.step(state.step() + 1);
      state_for(parameter, state.exp_avg());
      state_for(parameter, state.exp_avg_sq());
      if (options.amsgrad()) state_for(parameter, state.max_exp_avg_sq());
      const auto local = held(parameter);
      if (local.numel() == 0) continue;
      auto& batch = batch_of(batches, local, state.step());
      batch.params.push_back(local);
      batch.grads.push_back(held(parameter.grad()));
      batch.first.push_back(held(state.exp_avg()));
      batch.second.push_back(held(state.exp_avg_sq()));
      if (options.amsgrad()) batch.third.push_back(held(state.max_exp_avg_sq()));
    }
    for (auto& [key, batch] : batches) {
      const auto count = at::full({}, std::get<3>(key), batch.params[0].options().dtype(at::kFloat));
      const std::vector<at::Tensor> counts(batch.params.size(), count);
      const auto& [beta1, beta2] = options.betas();
      at::_fused_adamw_(batch.params, batch.grads, batch.first, batch.second, batch.third, counts, options.lr(), beta1,
                        beta2, options.weight_decay(), options.eps(), options.amsgrad(), /*maximize=*/false);
      batch.note_write();
    }
  }
  return loss;
}

at::Tensor SGD::step(LossClosure closure) {
  at::NoGradGuard no_grad;
  auto loss = run(closure);
  for (auto& group : param_groups_) {
    const auto& options = static_cast<const torch::optim::SGDOptions&>(group.options());
    Batches<bool> batches;  // and whether it is the parameter's first step
    for (const auto& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      check_gradient(parameter);
      const auto local = held(parameter);
      at::Tensor* momentum = nullptr;
      bool first = false;
      if (options.momentum() != 0) {
        auto& state = state_of<torch::optim::SGDParamState>(state_, parameter);
        first = !state.momentum_buffer().defined();
        momentum = &state_for(parameter, state.momentum_buffer());
      }
      if (local.numel() == 0) continue;
      auto& batch = batch_of(batches, local, first);
      batch.params.push_back(local);
      batch.grads.push_back(held(parameter.grad()));
      if (momentum) batch.first.push_back(held(*momentum));
    }
    for (auto& [key, batch] : batches) {
      at::_fused_sgd_(batch.params, batch.grads, batch.first, options.weight_decay(), options.momentum(), options.lr(),
                      options.dampening(), options.nesterov(), /*maximize=*/false, std::get<3>(key));
      batch.note_write();
    }
  }
  return loss;
}

}  // namespace fsdp::optim
