#include <fsdp/grad_scaler.h>

#include <cmath>
#include <limits>
#include <map>
#include <string>

#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <fsdp/distributed.h>
#include <fsdp/error.h>

#include "mesh/mesh_state.h"
#include "tensor/facade.h"

namespace fsdp {
namespace {

enum class Stage { kUnscaled, kStepped };

struct Seen {
  Stage stage;
  bool overflowed;  // on any rank
};

GradScalerState checked(GradScalerState state) {
  const auto refuse = [](const char* what, double got) {
    throw InvalidArgument(std::string("libfsdp: ShardedGradScaler: ") + what + ", got " + std::to_string(got));
  };
  if (!(state.scale > 0)) refuse("the scale must be positive", state.scale);
  if (!(state.growth_factor > 1)) refuse("the growth factor must be above 1", state.growth_factor);
  if (!(state.backoff_factor > 0 && state.backoff_factor < 1)) {
    refuse("the backoff factor must be between 0 and 1", state.backoff_factor);
  }
  if (state.growth_interval < 1) {
    refuse("the growth interval must be positive", static_cast<double>(state.growth_interval));
  }
  return state;
}

/// The gradients that this rank holds of the optimizer's parameters.
std::vector<at::Tensor> local_gradients(torch::optim::Optimizer& optimizer, bool allow_fp16) {
  std::vector<at::Tensor> locals;
  for (auto& group : optimizer.param_groups()) {
    for (const auto& parameter : group.params()) {
      const auto& gradient = parameter.grad();
      if (!gradient.defined()) continue;
      const auto* tag = tensor::facade_of(parameter);
      const auto name = tag ? "parameter '" + tag->spec->name + "'" : "a parameter of " + c10::str(parameter.sizes());
      if (gradient.layout() != at::kStrided || !gradient.is_floating_point()) {
        throw InvalidArgument("libfsdp: ShardedGradScaler: the gradient of " + name + " is " +
                              c10::str(gradient.layout()) + " of " + c10::toString(gradient.scalar_type()) +
                              "; it takes dense ones of a floating-point dtype");
      }
      if (!allow_fp16 && gradient.scalar_type() == at::kHalf) {
        throw InvalidArgument("libfsdp: attempting to unscale FP16 gradients: that of " + name +
                              "; keep parameters in float32, or allow_fp16_gradients");
      }
      const auto* held = tensor::facade_of(gradient);
      locals.push_back(held ? held->local : gradient);
    }
  }
  return locals;
}

/// Multiplies by `factor`; whether something was not finite.
bool unscale(const std::vector<at::Tensor>& gradients, double factor) {
  std::map<std::pair<c10::DeviceType, at::ScalarType>, std::vector<at::Tensor>> alike;
  for (const auto& gradient : gradients) {
    if (gradient.numel() > 0) alike[{gradient.device().type(), gradient.scalar_type()}].push_back(gradient);
  }
  bool overflowed = false;
  for (const auto& [kind, tensors] : alike) {
    const auto options = tensors[0].options().dtype(at::kFloat);
    auto found = at::zeros({1}, options);
    at::_amp_foreach_non_finite_check_and_unscale_(tensors, found, at::full({}, factor, options));
    overflowed = overflowed || found.item<float>() > 0;
  }
  return overflowed;
}

}  // namespace

struct ShardedGradScaler::Impl {
  GradScalerState state;
  bool enabled, allow_fp16;
  DeviceMesh mesh;
  std::map<torch::optim::Optimizer*, Seen> seen;

  bool on_any_rank(bool mine) {
    if (!mesh.defined()) mesh = init_device_mesh(at::kCPU, {world_size()});
    const auto channel = mesh.state()->flat_channel(mesh::Lane::kGather);
    if (channel->size() == 1) return mine;
    const auto flag = at::full({1}, mine ? 1.0 : 0.0, at::TensorOptions(mesh.device_type()).dtype(at::kFloat));
    channel->all_reduce(flag, comm::ReduceOp::kMax)->wait();
    return flag.item<float>() > 0;
  }
};

ShardedGradScaler::ShardedGradScaler(const GradScalerOptions& options, DeviceMesh mesh) {
  const GradScalerState state{options.init_scale, options.growth_factor, options.backoff_factor,
                              options.growth_interval, 0};
  impl_ = std::make_unique<Impl>(Impl{
      options.enabled ? checked(state) : state, options.enabled, options.allow_fp16_gradients, std::move(mesh), {}});
}

ShardedGradScaler::~ShardedGradScaler() = default;

at::Tensor ShardedGradScaler::scale(const at::Tensor& output) const {
  return impl_->enabled ? output.mul(impl_->state.scale) : output;
}

std::vector<at::Tensor> ShardedGradScaler::scale(const std::vector<at::Tensor>& outputs) const {
  std::vector<at::Tensor> scaled;
  for (const auto& output : outputs) scaled.push_back(scale(output));
  return scaled;
}

void ShardedGradScaler::unscale_(torch::optim::Optimizer& optimizer) {
  if (!impl_->enabled) return;
  const auto found = impl_->seen.find(&optimizer);
  if (found != impl_->seen.end()) {
    throw Error(found->second.stage == Stage::kUnscaled
                    ? "libfsdp: unscale_() has already been called on this optimizer since the last update()"
                    : "libfsdp: unscale_() is being called after step(); call update() first");
  }
  at::NoGradGuard no_grad;
  const auto gradients = local_gradients(optimizer, impl_->allow_fp16);
  const bool mine = unscale(gradients, 1 / impl_->state.scale);
  impl_->seen[&optimizer] = {Stage::kUnscaled, impl_->on_any_rank(mine)};
}

bool ShardedGradScaler::step(torch::optim::Optimizer& optimizer) {
  if (impl_->enabled) {
    if (impl_->seen.find(&optimizer) == impl_->seen.end()) unscale_(optimizer);
    auto& seen = impl_->seen.at(&optimizer);
    if (seen.stage == Stage::kStepped) {
      throw Error("libfsdp: step() has already been called on this optimizer since the last update()");
    }
    seen.stage = Stage::kStepped;
    if (seen.overflowed) return false;
  }
  optimizer.step();
  return true;
}

void ShardedGradScaler::update(std::optional<double> new_scale) {
  if (!impl_->enabled) return;
  auto& state = impl_->state;
  if (new_scale) {
    auto wanted = state;
    wanted.scale = *new_scale;
    state = checked(wanted);
    impl_->seen.clear();
    return;
  }
  if (impl_->seen.empty()) {
    throw Error("libfsdp: update() without an unscale_() or step() since the last one: nothing says whether to grow");
  }
  bool overflowed = false;
  for (const auto& [optimizer, seen] : impl_->seen) overflowed = overflowed || seen.overflowed;
  impl_->seen.clear();
  if (overflowed) {
    state.scale *= state.backoff_factor;
    state.growth_tracker = 0;
  } else if (++state.growth_tracker >= state.growth_interval) {
    const double grown = state.scale * state.growth_factor;
    if (grown <= std::numeric_limits<float>::max()) state.scale = grown;
    state.growth_tracker = 0;
  }
}

bool ShardedGradScaler::is_enabled() const { return impl_->enabled; }
double ShardedGradScaler::get_scale() const { return impl_->enabled ? impl_->state.scale : 1.0; }
double ShardedGradScaler::get_growth_factor() const { return impl_->state.growth_factor; }
double ShardedGradScaler::get_backoff_factor() const { return impl_->state.backoff_factor; }
int64_t ShardedGradScaler::get_growth_interval() const { return impl_->state.growth_interval; }

void ShardedGradScaler::set_growth_factor(double factor) {
  auto wanted = impl_->state;
  wanted.growth_factor = factor;
  impl_->state = checked(wanted);
}

void ShardedGradScaler::set_backoff_factor(double factor) {
  auto wanted = impl_->state;
  wanted.backoff_factor = factor;
  impl_->state = checked(wanted);
}

void ShardedGradScaler::set_growth_interval(int64_t interval) {
  auto wanted = impl_->state;
  wanted.growth_interval = interval;
  impl_->state = checked(wanted);
}

GradScalerState ShardedGradScaler::state_dict() const { return impl_->state; }

void ShardedGradScaler::load_state_dict(const GradScalerState& state) {
  if (impl_->enabled) impl_->state = checked(state);
}

}  // namespace fsdp
