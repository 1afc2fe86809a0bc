#pragma once
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include "checkpoint/index.h"
#include "checkpoint/plan.h"
#include "tensor/sharded_tensor.h"

/// What a model, an optimizer and the random generators hold, as named rows.
namespace fsdp::checkpoint {

constexpr const char* kModelPrefix = "model.";
constexpr const char* kOptimizerPrefix = "optimizer.";

/// A tensor of which this rank has a part: where it is, and what it is called.
struct HeldTensor {
  LocalTensor spec;  ///< with the rows (of dim 0) that this rank saves
  at::Tensor tensor;
  at::Tensor local;  ///< its part on this rank, sharing memory: the tensor itself if it is not sharded
  /// The dim that is cut (or tensor::kElements), and of it the rows (elements) in `local`. Files hold rows of dim 0
  /// whatever this is.
  int64_t dim = 0;
  tensor::RowRange cut;
};

/// For saving: tensors that are cut along another dim or by elements get their rows of dim 0 as `local`, a copy.
/// Collective.
void gather_rows(std::vector<HeldTensor>& held);

/// A model's parameters and buffers. A tied tensor is held under its first name; its others are aliases.
struct ModelTensors {
  std::vector<HeldTensor> held;
  std::map<std::string, std::string> aliases;  ///< both with kModelPrefix
  std::map<const void*, std::string> names;    ///< TensorImpl -> first FQN, without prefix
};
ModelTensors collect_model(const torch::nn::Module& model);

/// Rows of `tensor` under `name`. NotSupported if safetensors has no such dtype.
HeldTensor hold(std::string name, const at::Tensor& tensor);

/// Their descriptions alone, in order.
std::vector<LocalTensor> specs_of(const std::vector<HeldTensor>& held);

/// The FQN of an optimizer's parameter. InvalidArgument if it is not the model's.
const std::string& name_of(const at::Tensor& parameter, const ModelTensors& model);

/// Type, options and counters of an optimizer; its tensors are appended to `held`.
OptimizerIndex collect_optimizer(const torch::optim::Optimizer& optimizer, const ModelTensors& model,
                                 std::vector<HeldTensor>& held);

/// "rng.cpu.rank-00003": the state of a rank's default CPU generator.
std::string generator_name(int rank);
at::Tensor generator_state();
void set_generator_state(const at::Tensor& state);

DType to_dtype(at::ScalarType type, const std::string& name);
at::ScalarType to_scalar_type(DType dtype);

}  // namespace fsdp::checkpoint
