#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>
#include <fsdp/export.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>
#include <torch/ordered_dict.h>

/// Checkpoints of sharded (and plain) models: a folder with one safetensors file a rank and an index. The format is
/// described in docs/checkpoint.md.
///
/// `model` may be a torch::nn::Module, a holder (GPT), a shared_ptr of a module, a handle that fully_shard gave, or a
/// FullyShardedDataParallel.
/// Every function here is collective: all ranks of the world call it with the same model, optimizer and path. An
/// error on one rank is thrown on every rank.
namespace fsdp {

struct SaveOptions {
  /// The training step, given back by load. At least 0.
  int64_t step = 0;
  /// Anything else that is to be given back (UTF-8).
  std::map<std::string, std::string> metadata{};
  /// Whether to save the state of each rank's default CPU generator.
  bool rng = true;
};

struct LoadOptions {
  /// Whether to restore the default CPU generator, where the checkpoint has this rank's.
  bool rng = true;
  /// Whether to compare the checksums of all data that is wanted, which reads it twice. The ranks share this work.
  bool verify_data = true;
};

/// What a checkpoint says besides tensors.
struct LoadInfo {
  int64_t step = 0;
  std::map<std::string, std::string> metadata{};
  /// Number of ranks that saved it.
  int64_t world_size = 1;
};

struct FullStateDictOptions {
  /// Only rank 0 of the world keeps the values; the others get an empty dict.
  bool rank0_only = false;
};

struct LoadStateDictOptions {
  /// The values are those that rank 0 of the world was given, whole, as rank0_only makes them; what the other ranks
  /// give is not looked at. Costs a broadcast of each and the memory of one at a time.
  bool from_rank0 = false;
};

using StateDict = torch::OrderedDict<std::string, at::Tensor>;

/// An optimizer's state with parameters by name.
struct OptimizerStateDict {
  using Option = std::variant<bool, double, std::pair<double, double>>;
  struct Group {
    std::vector<std::string> params;
    std::map<std::string, Option> options;  ///< "lr", "betas", "weight_decay", ...
  };
  std::string type;  ///< "AdamW"
  std::vector<Group> groups;
  StateDict tensors;  ///< "<parameter>.exp_avg", ...: lie as their parameter does; share memory with the optimizer
  std::map<std::string, std::map<std::string, int64_t>> counters;  ///< parameter -> "step" -> count
};

namespace checkpoint {

template <class M>
const torch::nn::Module& module_of(const M& model) {
  if constexpr (std::is_base_of_v<torch::nn::Module, M>) {
    return model;
  } else {
    return *model;
  }
}

// What the templates below call; `optimizer` may be null.
FSDP_API void save(const torch::nn::Module& model, const torch::optim::Optimizer* optimizer, const std::string& path,
                   const SaveOptions& options);
FSDP_API LoadInfo load(const torch::nn::Module& model, torch::optim::Optimizer* optimizer, const std::string& path,
                       const LoadOptions& options);
FSDP_API StateDict state_dict(const torch::nn::Module& model);
FSDP_API StateDict full_state_dict(const torch::nn::Module& model, const FullStateDictOptions& options);
FSDP_API StateDict local_state_dict(const torch::nn::Module& model);
FSDP_API void load_state_dict(const torch::nn::Module& model, const StateDict& state,
                              const LoadStateDictOptions& options);
FSDP_API OptimizerStateDict optimizer_state_dict(const torch::nn::Module& model,
                                                 const torch::optim::Optimizer& optimizer);
FSDP_API OptimizerStateDict full_optimizer_state_dict(const torch::nn::Module& model,
                                                      const torch::optim::Optimizer& optimizer,
                                                      const FullStateDictOptions& options);
FSDP_API void load_optimizer_state_dict(const torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                                        const OptimizerStateDict& state, const LoadStateDictOptions& options);

}  // namespace checkpoint

/// Saves parameters, buffers, the optimizer's state and options, the step and the random generators into the folder
/// `path`, which all ranks must see (one host, or a shared file system). Each rank writes its own rows; what is not cut
/// into rows of dim 0 (shard_placement_fn, FullyShardedDataParallel) is gathered for that, one tensor after the other.
///
/// The folder appears in one step: if any rank fails or is killed, at any moment, `path` still holds the previous
/// checkpoint whole. A checkpoint that is there is replaced; anything else there is left alone and refused. One job
/// at a time may save to a path.
///
/// CheckpointError: a rank cannot write, or ranks have different models. NotSupported: an optimizer other than
/// torch::optim's AdamW, Adam, SGD, RMSprop and Adagrad, or a dtype that safetensors does not have. InvalidArgument:
/// the optimizer has a parameter that is not the model's; a negative step.
template <class M>
void save(const M& model, const torch::optim::Optimizer& optimizer, const std::string& path,
          const SaveOptions& options = {}) {
  checkpoint::save(checkpoint::module_of(model), &optimizer, path, options);
}

/// The model alone.
template <class M>
void save(const M& model, const std::string& path, const SaveOptions& options = {}) {
  checkpoint::save(checkpoint::module_of(model), nullptr, path, options);
}

/// Loads what save wrote, on any number of ranks, into a sharded or a plain model: each rank reads only the rows that
/// it holds. The optimizer gets the saved state and options, also if it has no state yet; it must have the same
/// parameters in the same groups.
///
/// Everything is checked on all ranks before the first value is written, so after an error model and optimizer are as
/// they were (an I/O error while values are copied is the one exception; its message says so).
///
/// CheckpointError: no checkpoint, or a file is missing, truncated or damaged; the checkpoint is of another model or
/// optimizer (the message lists differences both ways) or of a newer format. NotSupported, InvalidArgument: as save.
template <class M>
LoadInfo load(const M& model, torch::optim::Optimizer& optimizer, const std::string& path,
              const LoadOptions& options = {}) {
  return checkpoint::load(checkpoint::module_of(model), &optimizer, path, options);
}

/// The model alone, also from a checkpoint that has an optimizer.
template <class M>
LoadInfo load(const M& model, const std::string& path, const LoadOptions& options = {}) {
  return checkpoint::load(checkpoint::module_of(model), nullptr, path, options);
}

/// Names to the model's own parameters and buffers, sharded ones as they are. Shares memory; never communicates.
template <class M>
StateDict state_dict(const M& model) {
  return checkpoint::state_dict(checkpoint::module_of(model));
}

/// Names to whole, plain CPU tensors of their own memory, equal on every rank. Costs one all-gather a sharded
/// parameter and the memory of the whole model on every rank that keeps it, of one parameter on the others.
template <class M>
StateDict full_state_dict(const M& model, const FullStateDictOptions& options = {}) {
  return checkpoint::full_state_dict(checkpoint::module_of(model), options);
}

/// Names to plain tensors: this rank's part of each parameter (DTensor::to_local), buffers as they are. Shares memory;
/// never communicates.
template <class M>
StateDict local_state_dict(const M& model) {
  return checkpoint::local_state_dict(checkpoint::module_of(model));
}

/// Writes values into the model's parameters and buffers, keeping the tensors: those of any of the three state dicts
/// above, of this model or one like it, on any mesh; local parts go where their sizes are. Costs one all-gather for
/// each sharded value that does not lie as its parameter does. Everything is checked on all ranks before the first
/// value is written.
///
/// CheckpointError: other names, sizes or dtypes than the model's; the message lists the differences both ways.
/// InvalidArgument: sharded values with `from_rank0`.
template <class M>
void load_state_dict(const M& model, const StateDict& state, const LoadStateDictOptions& options = {}) {
  checkpoint::load_state_dict(checkpoint::module_of(model), state, options);
}

/// The optimizer's state by parameter name. Never communicates. NotSupported, InvalidArgument: as save.
template <class M>
OptimizerStateDict optimizer_state_dict(const M& model, const torch::optim::Optimizer& optimizer) {
  return checkpoint::optimizer_state_dict(checkpoint::module_of(model), optimizer);
}

/// The same of whole, plain CPU tensors of their own memory; as full_state_dict.
template <class M>
OptimizerStateDict full_optimizer_state_dict(const M& model, const torch::optim::Optimizer& optimizer,
                                             const FullStateDictOptions& options = {}) {
  return checkpoint::full_optimizer_state_dict(checkpoint::module_of(model), optimizer, options);
}

/// Gives the optimizer the state and the options of either, as load does; the rest is as for load_state_dict.
template <class M>
void load_optimizer_state_dict(const M& model, torch::optim::Optimizer& optimizer, const OptimizerStateDict& state,
                               const LoadStateDictOptions& options = {}) {
  checkpoint::load_optimizer_state_dict(checkpoint::module_of(model), optimizer, state, options);
}

}  // namespace fsdp
