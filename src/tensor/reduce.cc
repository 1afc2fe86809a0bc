#include "tensor/reduce.h"

#include <cmath>
#include <limits>
#include <string_view>

#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/dot.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/vdot.h>
#include <ATen/ops/zeros.h>
#include <fsdp/error.h>

#include "tensor/facade.h"

namespace fsdp::tensor {
namespace {

using comm::ReduceOp;
using torch::jit::Stack;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

at::Tensor all_reduce(const Spec& spec, at::Tensor value, ReduceOp op) {
  value = value.reshape({1}).contiguous();
  // Booleans and half types are joined in a type that every engine reduces exactly.
  const auto dtype = value.scalar_type();
  const auto device = value.device();
  if (dtype == at::kBool) value = value.to(at::kInt);
  if (dtype == at::kHalf || dtype == at::kBFloat16) value = value.to(at::kFloat);
  value = spec.for_channel(value);
  spec.channel()->all_reduce(value, op)->wait();
  return value.to(device, dtype).reshape({});
}

/// The identity of a maximum or minimum, for ranks that hold nothing.
at::Tensor extreme(const at::Tensor& local, bool maximum) {
  if (local.numel() > 0) return maximum ? local.max() : local.min();
  const auto options = local.options();
  if (local.is_floating_point()) return at::full({}, maximum ? -kInfinity : kInfinity, options);
  const auto limits = maximum ? std::numeric_limits<int64_t>::min() : std::numeric_limits<int64_t>::max();
  return at::full({}, limits, options.dtype(at::kLong));
}

}  // namespace

at::Tensor NormOrder::local(const at::Tensor& local) const {
  const auto value = local.is_floating_point() ? local.abs() : local.to(at::kFloat).abs();
  if (order_ == kInfinity || order_ == -kInfinity) {
    if (value.numel() == 0) return at::full({}, order_ > 0 ? 0.0 : kInfinity, value.options());
    return order_ > 0 ? value.max() : value.min();
  }
  if (order_ == 0) return value.ne(0).sum().to(value.scalar_type());
  if (order_ == 1) return value.sum();
  // The local norm raised again, rather than a sum of powers: torch's kernel accumulates in a wider type.
  return value.numel() == 0 ? at::zeros({}, value.options()) : at::linalg_vector_norm(value, order_).pow(order_);
}

ReduceOp NormOrder::combine() const {
  if (order_ == kInfinity) return ReduceOp::kMax;
  if (order_ == -kInfinity) return ReduceOp::kMin;
  return ReduceOp::kSum;
}

at::Tensor NormOrder::finish(const at::Tensor& joined) const {
  if (order_ == kInfinity || order_ == -kInfinity || order_ == 0 || order_ == 1) return joined;
  return order_ == 2 ? joined.sqrt() : joined.pow(1.0 / order_);
}

bool reduces_to_scalar(const c10::OperatorHandle& op) {
  const std::string_view name = op.schema().name();
  const std::string_view overload = op.schema().overload_name();
  if (name == "aten::norm") return overload == "Scalar" || overload == "ScalarOpt_dtype";
  if (name == "aten::linalg_vector_norm") return overload.empty();
  if (name == "aten::sum" || name == "aten::mean" || name == "aten::max" || name == "aten::min" ||
      name == "aten::any" || name == "aten::all") {
    return overload.empty();
  }
  return name == "aten::dot" || name == "aten::vdot" || name == "aten::equal";
}

void run_reduction(const c10::OperatorHandle& op, Stack* stack) {
  const std::string_view name = op.schema().name();
  const size_t count = op.schema().arguments().size();
  const size_t base = stack->size() - count;
  const at::Tensor self = (*stack)[base].toTensor();
  const auto* tag = facade_of(self);
  const auto* other = count > 1 && (*stack)[base + 1].isTensor() ? facade_of((*stack)[base + 1].toTensor()) : nullptr;
  const bool binary = name == "aten::dot" || name == "aten::vdot" || name == "aten::equal";
  const auto& named = tag ? *tag : *other;
  if (!tag || (binary && (!other || !tag->spec->lies_like(*other->spec)))) {
    throw NotSupported("libfsdp: " + op.schema().name() + " joins sharded '" + named.spec->name +
                       "' with a tensor that does not lie like it; take full_tensor() of both");
  }
  const auto& spec = *tag->spec;
  at::NoGradGuard no_grad;
  const at::Tensor local = tag->local.detach();
  const auto argument = [&](size_t i) -> const c10::IValue& { return (*stack)[base + i]; };
  const auto dtype_at = [&](size_t i) {
    return i < count && !argument(i).isNone() ? std::optional(argument(i).toScalarType()) : std::nullopt;
  };

  c10::IValue result;
  if (name == "aten::norm" || name == "aten::linalg_vector_norm") {
    const bool vector_norm = name == "aten::linalg_vector_norm";
    if (vector_norm && !argument(2).isNone() && !argument(2).toDimVector().empty()) {
      throw NotSupported("libfsdp: a norm over some dims of sharded '" + spec.name + "'; take full_tensor() first");
    }
    const auto dtype = dtype_at(vector_norm ? 4 : 2);
    const NormOrder order(argument(1).isNone() ? 2.0 : argument(1).toScalar().toDouble());
    result = order.finish(all_reduce(spec, order.local(dtype ? local.to(*dtype) : local), order.combine()));
  } else if (name == "aten::sum") {
    result = all_reduce(spec, at::sum(local, dtype_at(1)), ReduceOp::kSum);
  } else if (name == "aten::mean") {
    result = all_reduce(spec, at::sum(local, dtype_at(1)), ReduceOp::kSum).div(self.numel());
  } else if (name == "aten::max" || name == "aten::min") {
    const bool maximum = name == "aten::max";
    result =
        all_reduce(spec, extreme(local, maximum), maximum ? ReduceOp::kMax : ReduceOp::kMin).to(local.scalar_type());
  } else if (name == "aten::any" || name == "aten::all") {
    const bool any = name == "aten::any";
    result = all_reduce(spec, any ? local.any() : local.all(), any ? ReduceOp::kMax : ReduceOp::kMin);
  } else if (name == "aten::equal") {
    const auto same = at::full({}, at::equal(local, other->local), at::TensorOptions().dtype(at::kBool));
    result = all_reduce(spec, same, ReduceOp::kMin).item<bool>();
  } else {
    result = all_reduce(spec, name == "aten::dot" ? at::dot(local, other->local) : at::vdot(local, other->local),
                        ReduceOp::kSum);
  }
  torch::jit::drop(*stack, count);
  stack->push_back(std::move(result));
}

}  // namespace fsdp::tensor
