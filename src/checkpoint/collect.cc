#include "checkpoint/collect.h"

#include <cstdio>
#include <mutex>
#include <utility>

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/StringUtil.h>
#include <fsdp/dtensor.h>
#include <fsdp/error.h>

#include "checkpoint/optimizer_state.h"

namespace fsdp::checkpoint {
namespace {

constexpr std::pair<DType, at::ScalarType> kTypes[] = {
    {DType::kBool, at::kBool},
    {DType::kU8, at::kByte},
    {DType::kI8, at::kChar},
    {DType::kF8E5M2, at::kFloat8_e5m2},
    {DType::kF8E4M3, at::kFloat8_e4m3fn},
    {DType::kF8E8M0, at::kFloat8_e8m0fnu},
    {DType::kI16, at::kShort},
    {DType::kU16, at::kUInt16},
    {DType::kF16, at::kHalf},
    {DType::kBF16, at::kBFloat16},
    {DType::kI32, at::kInt},
    {DType::kU32, at::kUInt32},
    {DType::kF32, at::kFloat},
    {DType::kI64, at::kLong},
    {DType::kU64, at::kUInt64},
    {DType::kF64, at::kDouble},
    {DType::kC64, at::kComplexFloat},
};

void add_tensors(const torch::OrderedDict<std::string, at::Tensor>& tensors, ModelTensors& out) {
  for (const auto& item : tensors) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined()) {
      continue;
    }
    const std::string name = kModelPrefix + item.key();
    const auto [known, added] = out.names.emplace(tensor.unsafeGetTensorImpl(), item.key());
    if (added) {
      out.held.push_back(hold(name, tensor));
    } else {
      out.aliases.emplace(name, kModelPrefix + known->second);
    }
  }
}

}  // namespace

DType to_dtype(at::ScalarType type, const std::string& name) {
  for (const auto& [dtype, scalar_type] : kTypes) {
    if (scalar_type == type) {
      return dtype;
    }
  }
  throw NotSupported(c10::str("'", name, "' is of dtype ", type, ", which a checkpoint cannot hold"));
}

at::ScalarType to_scalar_type(DType dtype) {
  for (const auto& [known, scalar_type] : kTypes) {
    if (known == dtype) {
      return scalar_type;
    }
  }
  throw InvariantError("a dtype of safetensors has no scalar type");
}

HeldTensor hold(std::string name, const at::Tensor& tensor) {
  HeldTensor held;
  held.spec.dtype = to_dtype(tensor.scalar_type(), name);
  held.spec.name = std::move(name);
  held.spec.shape = tensor.sizes().vec();
  held.tensor = tensor;
  if (tensor::is_sharded(tensor)) {
    const auto rows = tensor::rows_along(tensor, 0);
    held.spec.begin = rows.begin;
    held.spec.end = rows.end;
    held.local = tensor::local_of(tensor);
    held.dim = tensor::dim_of(tensor);
    held.cut = tensor::range_of(tensor);
  } else {
    held.spec.end = tensor.dim() == 0 ? 1 : tensor.size(0);
    held.local = tensor;
  }
  return held;
}

void gather_rows(std::vector<HeldTensor>& held) {
  for (auto& each : held) {
    if (each.dim != 0) {
      const auto count = each.spec.end - each.spec.begin;
      const auto whole = dtensor(each.tensor).full_tensor();
      each.local = (whole.dim() == 0 ? whole.reshape({1}) : whole).narrow(0, each.spec.begin, count).clone();
    }
  }
}

ModelTensors collect_model(const torch::nn::Module& model) {
  ModelTensors out;
  add_tensors(model.named_parameters(), out);
  add_tensors(model.named_buffers(), out);
  return out;
}

const std::string& name_of(const at::Tensor& parameter, const ModelTensors& model) {
  const auto it = model.names.find(parameter.unsafeGetTensorImpl());
  if (it == model.names.end()) {
    throw InvalidArgument(c10::str("the optimizer has a parameter of sizes ", parameter.sizes(),
                                   " that is not the model's; give the optimizer of this model"));
  }
  return it->second;
}

OptimizerIndex collect_optimizer(const torch::optim::Optimizer& optimizer, const ModelTensors& model,
                                 std::vector<HeldTensor>& held) {
  const auto& fields = OptimizerFields::of(optimizer);
  OptimizerIndex out;
  out.type = fields.type();
  for (const auto& group : optimizer.param_groups()) {
    auto& saved = out.groups.emplace_back();
    saved.options = fields.options(group.options());
    for (const auto& parameter : group.params()) {
      const std::string& fqn = name_of(parameter, model);
      saved.params.push_back(fqn);
      const auto state = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (state == optimizer.state().end() || out.counters.count(fqn)) {  // none, or a tied parameter's second turn
        continue;
      }
      auto& counters = out.counters[fqn];  // also if there are none: the parameter has state
      fields.visit(
          *state->second,
          [&](const char* field, at::Tensor& value) {
            if (value.defined()) {
              held.push_back(hold(c10::str(kOptimizerPrefix, fqn, ".", field), value));
            }
          },
          [&](const char* field, int64_t& value) { counters[field] = value; });
    }
  }
  return out;
}

std::string generator_name(int rank) {
  char name[40];
  std::snprintf(name, sizeof name, "%scpu.rank-%05d", kOwnPrefix.data(), rank);
  return name;
}

at::Tensor generator_state() {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

void set_generator_state(const at::Tensor& state) {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(state);
}

std::vector<LocalTensor> specs_of(const std::vector<HeldTensor>& held) {
  std::vector<LocalTensor> specs;
  for (const auto& tensor : held) {
    specs.push_back(tensor.spec);
  }
  return specs;
}

}  // namespace fsdp::checkpoint
