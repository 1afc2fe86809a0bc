#pragma once
#include <map>
#include <memory>
#include <vector>

#include <torch/optim/optimizer.h>

#include "checkpoint/collect.h"
#include "checkpoint/index.h"

/// An optimizer's state as a checkpoint has it, made ready beside the old one.
namespace fsdp::checkpoint {

/// By parameter (its TensorImpl): the tensors are written to, then the states replace the old ones.
using NewStates = std::map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

/// CheckpointError if `index` has no optimizer, or one of another type, other groups or other options.
void check_optimizer(const torch::optim::Optimizer& optimizer, const Index& index, const ModelTensors& model);

/// The states that `index` has for the optimizer's parameters; their tensors are appended to `targets`.
NewStates prepare_states(const torch::optim::Optimizer& optimizer, const Index& index, const ModelTensors& model,
                         std::vector<HeldTensor>& targets);

/// Gives the optimizer the options of `index`, and `states` in place of its own.
void set_optimizer(torch::optim::Optimizer& optimizer, const Index& index, NewStates states);

}  // namespace fsdp::checkpoint
