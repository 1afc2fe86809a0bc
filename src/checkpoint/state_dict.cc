#include <string_view>
#include <unordered_map>

#include <c10/core/GradMode.h>
#include <fsdp/checkpoint.h>
#include <fsdp/distributed.h>
#include <fsdp/dtensor.h>

#include "checkpoint/collect.h"
#include "tensor/sharded_tensor.h"

namespace fsdp::checkpoint {
namespace {

// Parameters, then buffers, under each of their names.
template <class Fn>
void each_tensor(const torch::nn::Module& model, Fn fn) {
  for (const auto& tensors : {model.named_parameters(), model.named_buffers()}) {
    for (const auto& item : tensors) {
      if (item.value().defined()) {
        fn(item.key(), item.value());
      }
    }
  }
}

at::Tensor whole(const at::Tensor& tensor) {
  const bool sharded = tensor::is_sharded(tensor);
  const auto full = sharded ? dtensor(tensor).full_tensor() : tensor.detach();
  return sharded || !full.is_cpu() ? full.cpu() : full.clone();
}

}  // namespace

StateDict state_dict(const torch::nn::Module& model) {
  StateDict out;
  each_tensor(model, [&](const std::string& name, const at::Tensor& tensor) { out.insert(name, tensor); });
  return out;
}

StateDict local_state_dict(const torch::nn::Module& model) {
  StateDict out;
  each_tensor(model, [&](const std::string& name, const at::Tensor& tensor) {
    out.insert(name, tensor::is_sharded(tensor) ? tensor::local_of(tensor) : tensor);
  });
  return out;
}

StateDict full_state_dict(const torch::nn::Module& model, const FullStateDictOptions& options) {
  const at::NoGradGuard no_grad;
  const bool keeps = !options.rank0_only || rank() == 0;
  StateDict out;
  std::unordered_map<const void*, at::Tensor> done;  // a tied tensor is gathered once
  each_tensor(model, [&](const std::string& name, const at::Tensor& tensor) {
    const auto [at, first] = done.try_emplace(tensor.unsafeGetTensorImpl());
    if (first) {
      const auto full = whole(tensor);
      if (keeps) {
        at->second = full;
      }
    }
    if (keeps) {
      out.insert(name, at->second);
    }
  });
  return out;
}

OptimizerStateDict optimizer_state_dict(const torch::nn::Module& model, const torch::optim::Optimizer& optimizer) {
  std::vector<HeldTensor> held;
  const OptimizerIndex index = collect_optimizer(optimizer, collect_model(model), held);
  OptimizerStateDict out;
  out.type = index.type;
  out.counters = index.counters;
  for (const auto& group : index.groups) {
    out.groups.push_back({group.params, group.options});
  }
  for (const auto& state : held) {
    out.tensors.insert(state.spec.name.substr(std::string_view(kOptimizerPrefix).size()), state.tensor);
  }
  return out;
}

OptimizerStateDict full_optimizer_state_dict(const torch::nn::Module& model, const torch::optim::Optimizer& optimizer,
                                             const FullStateDictOptions& options) {
  const at::NoGradGuard no_grad;
  auto out = optimizer_state_dict(model, optimizer);
  StateDict wholes;
  for (const auto& item : out.tensors) {
    auto full = whole(item.value());
    if (!options.rank0_only || rank() == 0) {
      wholes.insert(item.key(), std::move(full));
    }
  }
  if (options.rank0_only && rank() != 0) {
    return OptimizerStateDict();
  }
  out.tensors = std::move(wholes);
  return out;
}

}  // namespace fsdp::checkpoint
