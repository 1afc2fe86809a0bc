#include <fsdp/clip_grad.h>

#include <cmath>
#include <map>

#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <fsdp/error.h>

#include "engine/context.h"
#include "mesh/mesh_state.h"
#include "tensor/facade.h"
#include "tensor/reduce.h"

namespace fsdp {
namespace {

at::Tensor join(const std::vector<at::Tensor>& parts, comm::ReduceOp op) {
  auto all = at::stack(parts);
  if (op == comm::ReduceOp::kMax) return all.max();
  return op == comm::ReduceOp::kMin ? all.min() : all.sum();
}

}  // namespace

at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type,
                           bool error_if_nonfinite) {
  if (!(norm_type > 0)) {
    throw InvalidArgument("libfsdp: clip_grad_norm_: norm_type must be positive (infinity included), got " +
                          std::to_string(norm_type));
  }
  at::NoGradGuard no_grad;
  const tensor::NormOrder order(norm_type);
  const auto wide = at::TensorOptions().dtype(at::kDouble);
  auto dtype = at::kFloat;  // of the result: that of the gradients

  // What each rank holds, by mesh; ordinary gradients are the same on all ranks and count once.
  struct Held {
    DeviceMesh mesh;
    std::shared_ptr<comm::Channel> channel;
    std::vector<at::Tensor> parts;
    DeviceMesh model{};  // the whole model's, where that has more ranks
  };
  std::vector<Held> meshes;
  std::vector<at::Tensor> plain, locals;
  const auto held_on = [&](const tensor::Spec& spec) -> Held& {
    for (auto& held : meshes) {
      if (held.mesh == spec.mesh) return held;
    }
    meshes.push_back({spec.mesh, spec.channel(), {}});
    return meshes.back();
  };
  for (const auto& parameter : parameters) {
    // A sharded parameter counts on its mesh with or without a gradient: which have one may differ between ranks.
    if (const auto* tag = tensor::facade_of(parameter)) {
      auto& held = held_on(*tag->spec);
      if (tag->param) {
        const auto& model = tag->param->group().context().mesh();
        if (model.size() > held.mesh.size()) held.model = model;
      }
    }
    const auto& gradient = parameter.grad();
    if (!gradient.defined()) continue;
    dtype = c10::promoteTypes(dtype, gradient.scalar_type());
    if (const auto* tag = tensor::facade_of(gradient)) {
      locals.push_back(tag->local);
      held_on(*tag->spec).parts.push_back(order.local(tag->local).to(wide));
    } else {
      locals.push_back(gradient);
      plain.push_back(order.local(gradient).to(wide));
    }
  }
  std::vector<at::Tensor> totals = plain;
  for (auto& held : meshes) {
    auto mine = held.parts.empty() ? at::zeros({}, wide) : join(held.parts, order.combine());
    mine = mine.reshape({1}).to(c10::Device(held.mesh.device_type()));
    held.channel->all_reduce(mine, order.combine())->wait();
    if (held.model.defined()) {
      // Ranks outside of the mesh hold parameters of their own, which count as well: all ranks must scale alike.
      if (order.combine() == comm::ReduceOp::kSum) mine.div_(static_cast<double>(held.mesh.size()));
      held.model.state()->flat_channel(mesh::Lane::kGather)->all_reduce(mine, order.combine())->wait();
    }
    totals.push_back(mine.reshape({}).to(plain.empty() ? mine.device() : plain[0].device()));
  }
  const auto total = totals.empty() ? at::zeros({}, wide) : order.finish(join(totals, order.combine()));
  if (error_if_nonfinite && !std::isfinite(total.item<double>())) {
    throw Error("libfsdp: clip_grad_norm_: the gradients' norm of order " + std::to_string(norm_type) + " is " +
                std::to_string(total.item<double>()) + "; look for the overflow, or pass error_if_nonfinite = false");
  }
  const auto scale = total.add(1e-6).reciprocal().mul(max_norm).clamp_max(1.0);
  for (const auto& local : locals) local.mul_(scale.to(local.options()));
  return total.to(dtype);
}

}  // namespace fsdp
