#include <fsdp/fully_shard.h>

#include <algorithm>
#include <iomanip>
#include <sstream>

#include <c10/util/StringUtil.h>
#include <fsdp/distributed.h>
#include <fsdp/error.h>

#include "engine/context.h"
#include "mesh/mesh_state.h"
#include "mesh/world.h"
#include "module/extension.h"
#include "module/module_state.h"
#include "module/same_model.h"
#include "module/survey.h"
#include "module/tree.h"
#include "tensor/facade.h"

namespace fsdp::module {
namespace {

using engine::ParamGroup;

/// The axes of `mesh` that `dims` name, as one axis (shard) or two (replicate, shard). Not collective.
DeviceMesh data_parallel_part(const std::string& caller, const DeviceMesh& mesh, const DataParallelMeshDims& dims) {
  const auto refuse = [&](const std::string& what) {
    throw InvalidArgument("libfsdp: " + caller + ": dp_mesh_dims " + what + "; " + c10::str(mesh) + " was given");
  };
  if (dims.shard.empty() && dims.replicate.empty()) refuse("name no axis: give shard, replicate or both");
  const auto& known = mesh.names();
  for (const auto& names : {dims.replicate, dims.shard}) {
    for (const auto& name : names) {
      if (std::find(known.begin(), known.end(), name) == known.end()) {
        refuse("name the axis '" + name + "', which the mesh does not have");
      }
    }
  }
  using Axes = std::vector<mesh::MeshState::Joined>;
  const mesh::MeshState::Joined shard{dims.shard.empty() ? "whole" : c10::Join("_", dims.shard), dims.shard};
  if (dims.replicate.empty()) return DeviceMesh(mesh.state()->joined(Axes{shard}));
  return DeviceMesh(mesh.state()->joined(Axes{{c10::Join("_", dims.replicate), dims.replicate}, shard}));
}

/// Where parameters are on the CPU, their shards are in host memory anyway.
std::optional<engine::Offload> offload_of(const FullyShardOptions& options, const Face& face, const NewGroup& plan) {
  if (!options.offload_policy || plan.params.empty()) return std::nullopt;
  const auto device = plan.params[0].named.tensor.device();
  if (device.is_cpu() && !face.offloads_on_cpu) return std::nullopt;
  return engine::Offload{device, options.offload_policy->pin_memory && !device.is_cpu()};
}

/// Makes one group, turns its parameters into sharded tensors, and gives them their extensions.
std::shared_ptr<ModuleState> make_group(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                                        const FullyShardOptions& options, const Face& face, const NewGroup& plan,
                                        const std::shared_ptr<ModuleState>& leader) {
  std::vector<const torch::nn::Module*> identities;
  for (const auto& module : modules) identities.push_back(module.get());
  std::vector<engine::NamedParam> named;
  for (const auto& param : plan.params) named.push_back(param.named);
  auto state = std::make_shared<ModuleState>(std::move(identities), options, plan.mesh, named, face, leader,
                                             offload_of(options, face, plan));
  for (const auto& param : state->group().params()) {
    const auto& original = *std::find_if(plan.params.begin(), plan.params.end(),
                                         [&](const auto& each) { return each.named.name == param->name(); });
    tensor::become_parameter(
        original.named.tensor,
        tensor::Spec::of_parameter(param->name(), plan.mesh, param->sizes(), param->dim(), param->array(1)),
        std::shared_ptr<engine::ShardedParam>(state, param.get()));
    if (!original.extension) continue;
    auto extension = std::make_shared<RowsExtension>(*param, plan.mesh.shape().back(), original.extension);
    state->group().set_extension(*param, std::move(extension), original.sends);
  }
  return state;
}

}  // namespace

DeviceMesh default_mesh() {
  auto world = mesh::World::current();
  if (auto state = world->default_mesh().lock()) return DeviceMesh(std::move(state));
  auto made = init_device_mesh(at::kCPU, {world->size()}, {"dp"});
  world->default_mesh() = made.state();
  return made;
}

std::shared_ptr<ModuleState> make_state(std::vector<std::shared_ptr<torch::nn::Module>> modules,
                                        const FullyShardOptions& options) {
  return make_state(std::move(modules), options, {.name = "fully_shard", .layout = engine::Layout::kRows});
}

std::shared_ptr<ModuleState> make_state(std::vector<std::shared_ptr<torch::nn::Module>> modules,
                                        const FullyShardOptions& given, const Face& face) {
  const std::string caller = face.name;
  if (modules.empty() || std::any_of(modules.begin(), modules.end(), [](const auto& m) { return !m; })) {
    throw InvalidArgument("libfsdp: " + caller + " needs at least one module, and none of them empty");
  }
  auto options = given;
  if (!options.mesh.defined()) options.mesh = default_mesh();
  if (options.dp_mesh_dims) options.mesh = data_parallel_part(caller, options.mesh, *options.dp_mesh_dims);
  if (options.mesh.ndim() > 2) {
    throw InvalidArgument("libfsdp: " + caller + " takes a mesh of one axis (shard) or two (replicate, shard), got " +
                          std::to_string(options.mesh.ndim()) + "; name those of a larger one by dp_mesh_dims");
  }
  auto plan = survey(modules, options, face);
  require_same_on_all_ranks(options.mesh, caller + " of module '" + modules[0]->name() + "'", plan.lines, plan.problem);

  std::shared_ptr<ModuleState> state;
  std::vector<ParamGroup*> groups;
  for (const auto& each : plan.groups) {
    auto made = make_group(modules, options, face, each, state);
    groups.push_back(&made->group());
    if (!state) state = std::move(made);
  }
  auto& group = state->group();
  if (groups.size() > 1) {
    for (auto* each : groups) each->place.leader = &group;
  }
  groups.insert(groups.end(), plan.inner.begin(), plan.inner.end());
  arrange(plan.visits, groups, group);
  for (auto* each : groups) {
    const auto asked = reshard_of(ModuleState::of(*each).options(), each->mesh());
    const bool outermost = of_one_call(*each, group);
    if (outermost) each->keep_over(asked.over);
    each->flags().reshard_after_forward = asked.set ? asked.free : !outermost;
  }
  const auto context = engine::Context::create(groups, options.mesh);
  for (auto* each : groups) each->place.explicit_backward_prefetch = !ModuleState::of(*each).prefetches_backward;
  context->note_config_change();
  return state;
}

std::shared_ptr<ModuleState> find_state(const torch::nn::Module& module) {
  for (const auto& parameter : module.parameters()) {
    for (auto* group = group_of(parameter); group; group = group->place.parent) {
      if (stands_for(*group, &module)) return ModuleState::of(*group).leader().shared_from_this();
    }
  }
  throw InvalidArgument("libfsdp: fully_shard was not applied to this module (" + module.name() +
                        "), or its parameters are summoned now");
}

// --- forward --------------------------------------------------------------------------------------------------------

ForwardScope::ForwardScope(const std::shared_ptr<ModuleState>& state) : state_(state) {
  if (state_->summoned) {
    if (at::GradMode::is_enabled()) {
      throw InvalidArgument("libfsdp: a forward of '" + state_->group().name() +
                            "' inside summon_full_params would train copies of its parameters: leave the scope first, "
                            "or run it under no_grad");
    }
    open_ = false;
    return;
  }
  state_->context().enter_forward(state_->group());
}

ForwardScope::~ForwardScope() {
  if (open_) fail("the forward was left without an end");
}

void ForwardScope::complete() {
  if (!open_) return;  // of summoned parameters
  open_ = false;
  state_->context().leave_forward(state_->group());
}

void ForwardScope::fail(const char* what) noexcept {
  if (!open_) return;
  open_ = false;
  try {
    state_->context().fail_forward(state_->group(), what);
  } catch (...) {
    // The caller is about to see the error that matters.
  }
}

const MixedPrecisionPolicy& policy(const ModuleState& state) { return state.options().mp_policy; }

at::Tensor cast_input(const ModuleState& state, const at::Tensor& tensor) {
  const auto& mp = policy(state);
  if (!mp.param_dtype || !mp.cast_forward_inputs || !tensor.defined() || !tensor.is_floating_point()) return tensor;
  if (!state.casts_inside && state.group().place.parent) return tensor;
  return tensor.to(*mp.param_dtype);
}

at::Tensor cast_output(const ModuleState& state, const at::Tensor& tensor) {
  const auto& mp = policy(state);
  if (!mp.output_dtype || !tensor.defined() || !tensor.is_floating_point()) return tensor;
  return tensor.to(*mp.output_dtype);
}

}  // namespace fsdp::module

namespace fsdp {
namespace {

/// The groups of the state's own modules, or with those inside of them.
template <class Fn>
void for_each_group(module::ModuleState& state, bool recurse, Fn&& fn) {
  for (auto* group : state.context().groups()) {
    if (!group) continue;
    if (recurse ? group->is_inside(state.group()) : module::of_one_call(*group, state.group())) fn(*group);
  }
}

/// As above, for what ranks must have alike.
template <class Fn>
void configure(module::ModuleState& state, bool recurse, Fn&& fn) {
  for_each_group(state, recurse, fn);
  state.context().note_config_change();
}

std::vector<engine::ParamGroup*> groups_of(module::ModuleState& state, const std::vector<FSDPModuleBase>& modules) {
  std::vector<engine::ParamGroup*> groups;
  for (const auto& each : modules) {
    auto& group = each.state()->group();
    if (&group.context() != &state.context()) {
      throw InvalidArgument("libfsdp: group '" + group.name() + "' is not part of the same model as '" +
                            state.group().name() + "', so it cannot be prefetched by it");
    }
    for_each_group(*each.state(), false, [&](auto& one) { groups.push_back(&one); });
  }
  return groups;
}

std::string megabytes(int64_t bytes) {
  std::ostringstream out;
  out.precision(3);
  out << static_cast<double>(bytes) / 1e6 << " MB";
  return out.str();
}

}  // namespace

void UnshardHandle::wait() {
  if (state_) for_each_group(*state_, false, [&](auto& group) { state_->context().unshard(group, true); });
  state_.reset();
}

UnshardHandle FSDPModuleBase::unshard(bool async_op) {
  if (state_->group().params().empty()) return {};
  for_each_group(*state_, false, [&](auto& group) { state_->context().unshard(group, !async_op); });
  return async_op ? UnshardHandle(state_) : UnshardHandle();
}

void FSDPModuleBase::reshard() {
  for_each_group(*state_, false, [&](auto& group) { state_->context().reshard(group); });
}

void FSDPModuleBase::set_requires_gradient_sync(bool requires_sync, bool recurse) {
  configure(*state_, recurse, [&](auto& group) { group.flags().sync_gradients = requires_sync; });
}

void FSDPModuleBase::set_requires_all_reduce(bool requires_all_reduce, bool recurse) {
  configure(*state_, recurse, [&](auto& group) { group.flags().all_reduce_gradients = requires_all_reduce; });
}

// Gradients are handed out when each backward ends, last or not: there is nothing to leave in flight between two.
void FSDPModuleBase::set_is_last_backward(bool) {}

void FSDPModuleBase::set_reshard_after_forward(bool reshard, bool recurse) {
  configure(*state_, recurse, [&](auto& group) {
    group.flags().reshard_after_forward = reshard;
    group.keep_over(0);
  });
}

void FSDPModuleBase::set_reshard_after_backward(bool reshard, bool recurse) {
  configure(*state_, recurse, [&](auto& group) { group.flags().reshard_after_backward = reshard; });
}

void FSDPModuleBase::set_modules_to_forward_prefetch(const std::vector<FSDPModuleBase>& modules) {
  const auto groups = groups_of(*state_, modules);
  configure(*state_, false, [&](auto& group) {
    group.place.forward_prefetch = groups;
    group.place.explicit_forward_prefetch = true;
  });
}

void FSDPModuleBase::set_modules_to_backward_prefetch(const std::vector<FSDPModuleBase>& modules) {
  const auto groups = groups_of(*state_, modules);
  configure(*state_, false, [&](auto& group) {
    group.place.backward_prefetch = groups;
    group.place.explicit_backward_prefetch = true;
  });
}

void FSDPModuleBase::set_gradient_divide_factor(double factor) {
  if (!(factor > 0)) {
    throw InvalidArgument("libfsdp: the gradient divide factor must be positive, got " + std::to_string(factor));
  }
  configure(*state_, true, [&](auto& group) { group.flags().divide_factor = factor; });
}

void FSDPModuleBase::set_symm_mem_for_comm() {
  configure(*state_, false, [](auto& group) { group.share_memory(); });
}

void FSDPModuleBase::set_custom_all_gather(std::shared_ptr<CustomAllGather> gather) {
  configure(*state_, false, [&](auto& group) { group.set_custom_gather(gather); });
}

void FSDPModuleBase::set_custom_reduce_scatter(std::shared_ptr<CustomReduceScatter> reduce) {
  configure(*state_, false, [&](auto& group) { group.set_custom_reduce(reduce); });
}

void FSDPModuleBase::set_all_reduce_hook(std::function<void(const at::Tensor&)> hook,
                                         std::optional<c10::Stream> stream) {
  configure(*state_, false, [&](auto& group) { group.set_all_reduce_hook(hook, stream); });
}

void FSDPModuleBase::set_post_optim_event(std::shared_ptr<const c10::Event> event) {
  state_->context().set_optimizer_event(std::move(event));
}

void FSDPModuleBase::set_reduce_scatter_max_input_buffers(int64_t max_input_buffers, bool recurse) {
  if (max_input_buffers < 1) {
    throw InvalidArgument(c10::str("libfsdp: max_input_buffers is ", max_input_buffers,
                                   "; at least 1 reduction must be allowed to be in flight"));
  }
  configure(*state_, recurse, [&](auto& group) { group.flags().max_reductions = max_input_buffers; });
}

void FSDPModuleBase::set_reduce_scatter_unused_params(bool, bool) {}
void FSDPModuleBase::set_force_sum_reduction_for_comms(bool) {}
void FSDPModuleBase::set_unshard_in_backward(bool) {}
void FSDPModuleBase::set_separate_reduce_scatter_group(bool, bool) {}
void FSDPModuleBase::set_allocate_memory_from_process_group_for_comm(bool) {
  for_each_group(*state_, false, [](auto& group) {
    constexpr int kCollectives = 3;
    if ((group.customs() & kCollectives) == 0) return;
    throw InvalidArgument("libfsdp: group '" + group.name() +
                          "' has a custom collective, which takes its buffers where it wants");
  });
}

void FSDPModuleBase::reset_iter_state() {
  if (state_->group().place.parent) {
    throw InvalidArgument("libfsdp: reset_iter_state() must be called on the root; '" + fqn() + "' is inside '" +
                          state_->group().place.parent->name() + "'");
  }
  state_->context().reset();
}

std::string FSDPModuleBase::schedule() const {
  std::ostringstream out;
  for (const auto& event : state_->context().events()) {
    out << std::left << std::setw(9) << engine::name_of(event.phase) << std::setw(16) << event.act << event.group
        << "  " << megabytes(event.bytes) << "\n";
  }
  return out.str();
}

const std::string& FSDPModuleBase::fqn() const { return state_->fqn(); }

}  // namespace fsdp
