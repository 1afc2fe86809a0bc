#pragma once
#include <functional>
#include <map>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "checkpoint/index.h"

namespace fsdp::checkpoint {

/// The fields of one of torch::optim's optimizers, by name.
class OptimizerFields {
 public:
  /// NotSupported if there is none for this optimizer.
  static const OptimizerFields& of(const torch::optim::Optimizer& optimizer);
  virtual ~OptimizerFields() = default;

  virtual const char* type() const = 0;
  virtual std::unique_ptr<torch::optim::OptimizerParamState> make_state() const = 0;

  using TensorFn = std::function<void(const char* field, at::Tensor& value)>;
  using CounterFn = std::function<void(const char* field, int64_t& value)>;
  /// Calls the functions for each field of `state`; a tensor that is not used is undefined.
  virtual void visit(torch::optim::OptimizerParamState& state, const TensorFn& tensor,
                     const CounterFn& counter) const = 0;

  virtual std::map<std::string, OptionValue> options(const torch::optim::OptimizerOptions& options) const = 0;
  /// CheckpointError if a name or a type is not that of these options.
  virtual void set_options(torch::optim::OptimizerOptions& options,
                           const std::map<std::string, OptionValue>& values) const = 0;

  virtual bool fits(const torch::optim::Optimizer& optimizer) const = 0;
};

}  // namespace fsdp::checkpoint
