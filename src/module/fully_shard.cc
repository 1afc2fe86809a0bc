#include <fsdp/fully_shard.h>

#include <algorithm>
#include <iomanip>
#include <sstream>
#include <unordered_set>

#include <fsdp/distributed.h>
#include <fsdp/error.h>

#include "engine/context.h"
#include "mesh/mesh_state.h"
#include "mesh/world.h"
#include "module/module_state.h"
#include "module/same_model.h"
#include "module/tree.h"
#include "tensor/facade.h"

namespace fsdp::module {
namespace {

using engine::ParamGroup;

/// What fully_shard is about to do, found out before anything is changed.
struct Survey {
  std::vector<Visit> visits;
  std::vector<engine::NamedParam> params;  // new ones, each once
  std::vector<ParamGroup*> inner;          // groups from earlier calls
  std::vector<std::string> lines;          // for the comparison across ranks
  std::string problem;
};

std::string dotted(const Visit& visit, const std::string& name) {
  return visit.path.empty() ? name : visit.path + "." + name;
}

/// The dim that `tensor` is to be cut along; `wrong` gets what is the matter with it.
template <class Wrong>
int64_t cut_dim(const std::string& name, const at::Tensor& tensor, const FullyShardOptions& options, Wrong&& wrong) {
  const auto placement = options.shard_placement_fn ? options.shard_placement_fn(tensor) : std::nullopt;
  if (!placement) return 0;
  const std::string asked =
      "shard_placement_fn for parameter '" + name + "' (sizes " + c10::str(tensor.sizes()) + "): ";
  if (placement->kind != Placement::Kind::kShard) {
    wrong(asked + "expected Shard(n), got Replicate(); give the parameter to ignored_params to keep it whole");
    return 0;
  }
  const int64_t dims = std::max<int64_t>(tensor.dim(), 1), axis = options.mesh.shape().back();
  const int64_t dim = placement->dim < 0 ? placement->dim + dims : placement->dim;
  if (dim < 0 || dim >= dims) {
    wrong(asked + "it has no dim " + std::to_string(placement->dim));
  } else if (dim > 0 && tensor.size(dim) % axis != 0) {
    wrong(asked + "dim " + std::to_string(dim) + " has " + std::to_string(tensor.size(dim)) +
          " rows, expected a multiple of " + std::to_string(axis) +
          ", the size of the shard axis; only dim 0 is cut unevenly");
  } else {
    return dim;
  }
  return 0;
}

/// What reshard_after_forward says.
struct Reshard {
  bool set = false;
  bool free = true;  // where it is set
  int64_t over = 0;  // the number of ranks over which parameters are kept; 0: all, and nothing is kept
};

Reshard reshard_of(const FullyShardOptions& options) {
  const auto& given = options.reshard_after_forward;
  if (!given) return {};
  if (const auto* flag = std::get_if<bool>(&*given)) return {true, *flag, 0};
  const int64_t over = std::get<int64_t>(*given);
  return {true, over != 1, over == 1 || over == options.mesh.shape().back() ? 0 : over};
}

/// "" if it can be had.
std::string problem_of_reshard(const FullyShardOptions& options) {
  const auto& given = options.reshard_after_forward;
  const auto* over = given ? std::get_if<int64_t>(&*given) : nullptr;
  const int64_t axis = options.mesh.shape().back();
  if (!over || (*over >= 1 && axis % *over == 0)) return "";
  return "reshard_after_forward is " + std::to_string(*over) + ", expected a factor of " + std::to_string(axis) +
         ", the size of the shard axis; true or false are possible always";
}

std::string type_name(const std::optional<at::ScalarType>& type) { return type ? c10::toString(*type) : "-"; }

Survey survey(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const FullyShardOptions& options,
              const Face& face) {
  const std::string caller = face.name;
  Survey result;
  const auto wrong = [&](std::string what) {
    if (result.problem.empty()) result.problem = std::move(what);
  };
  std::unordered_set<const torch::nn::Module*> distinct;
  for (const auto& module : modules) {
    if (!distinct.insert(module.get()).second) {
      wrong(caller + " was given the same module twice (" + module->name() + "); name each module once");
    }
  }
  result.visits = walk(modules);
  result.inner = groups_in(result.visits);
  for (auto* group : result.inner) {
    for (const auto& module : modules) {
      if (stands_for(*group, module.get())) {
        wrong(caller + " was already applied to this module (" + module->name() + "); apply it once to each");
      }
    }
  }
  std::unordered_set<c10::TensorImpl*> ignored, met;
  for (const auto& tensor : options.ignored_params) ignored.insert(tensor.unsafeGetTensorImpl());
  for (const auto& visit : result.visits) {
    for (const auto& item : visit.module->named_parameters(/*recurse=*/false)) {
      const auto& tensor = item.value();
      const auto name = dotted(visit, item.key());
      if (!tensor.defined() || ignored.count(tensor.unsafeGetTensorImpl())) continue;
      if (auto* group = group_of(tensor)) {
        const bool inside = std::any_of(visit.ancestors.begin(), visit.ancestors.end(),
                                        [&](const auto* module) { return stands_for(*group, module); });
        if (!inside) {
          wrong("parameter '" + name + "' belongs to group '" + group->name() +
                "' already, whose module does not contain it here: a parameter shared by modules must be in one "
                "group. Shard those modules together, as one list or through a common parent");
        }
        continue;
      }
      if (!met.insert(tensor.unsafeGetTensorImpl()).second) continue;  // tied within the group
      if (tensor::facade_of(tensor)) wrong("parameter '" + name + "' is a gradient or state of another sharded model");
      if (tensor.device().type() != options.mesh.device_type()) {
        wrong("parameter '" + name + "' is on " + tensor.device().str() + ", the mesh on " +
              c10::DeviceTypeName(options.mesh.device_type(), true) + "; move the module to the mesh's device first");
      }
      if (tensor.layout() != at::kStrided) wrong("parameter '" + name + "' is not a dense tensor");
      if (!tensor.is_leaf()) wrong("parameter '" + name + "' is not a leaf of autograd");
      std::ostringstream line;
      line << name << " " << tensor.sizes() << " " << c10::toString(tensor.scalar_type())
           << (tensor.requires_grad() ? "" : " frozen");
      const int64_t dim = cut_dim(name, tensor, options, wrong);
      if (dim != 0) line << " Shard(" << dim << ")";
      result.lines.push_back(line.str());
      result.params.push_back({name, tensor, dim});
      if (face.layout == engine::Layout::kFlat && tensor.scalar_type() != result.params[0].tensor.scalar_type()) {
        wrong("the parameters of one unit must have one dtype: '" + result.params[0].name + "' is " +
              c10::toString(result.params[0].tensor.scalar_type()) + ", '" + name + "' is " +
              c10::toString(tensor.scalar_type()) + "; wrap them apart, or cast one");
      }
    }
  }
  if (result.params.empty() && result.inner.empty()) {
    wrong(caller + " found no parameters in module '" + modules[0]->name() + "' to shard");
  }
  for (auto* group : result.inner) {
    if (group->mesh() != options.mesh) {
      wrong("group '" + group->name() + "' was sharded on another mesh than its enclosing module; use one mesh");
    }
  }
  const auto& policy = options.mp_policy;
  result.lines.push_back("param_dtype " + type_name(policy.param_dtype) + ", reduce_dtype " +
                         type_name(policy.reduce_dtype));
  if (auto problem = problem_of_reshard(options); !problem.empty()) wrong(std::move(problem));
  const auto reshard = reshard_of(options);
  result.lines.push_back("reshard_after_forward " + (reshard.over > 0 ? std::to_string(reshard.over)
                                                     : !reshard.set   ? "-"
                                                     : reshard.free   ? "true"
                                                                      : "false"));
  result.lines.push_back(std::to_string(result.inner.size()) + " inner groups");
  return result;
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
  if (options.mesh.ndim() > 2) {
    throw InvalidArgument("libfsdp: " + caller + " takes a mesh of one axis (shard) or two (replicate, shard), got " +
                          std::to_string(options.mesh.ndim()));
  }
  auto plan = survey(modules, options, face);
  require_same_on_all_ranks(options.mesh, caller + " of module '" + modules[0]->name() + "'", plan.lines, plan.problem);

  std::vector<const torch::nn::Module*> identities;
  for (const auto& module : modules) identities.push_back(module.get());
  auto state = std::make_shared<ModuleState>(std::move(identities), options, plan.params, face);
  auto& group = state->group();
  for (const auto& param : group.params()) {
    const auto original = std::find_if(plan.params.begin(), plan.params.end(),
                                       [&](const auto& named) { return named.name == param->name(); });
    tensor::become_parameter(
        original->tensor,
        tensor::Spec::of_parameter(param->name(), options.mesh, param->sizes(), param->dim(), param->array(1)),
        std::shared_ptr<engine::ShardedParam>(state, param.get()));
  }
  auto groups = plan.inner;
  groups.insert(groups.begin(), &group);
  arrange(plan.visits, groups, group);
  group.keep_over(reshard_of(options).over);
  for (auto* each : groups) {
    const auto asked = reshard_of(ModuleState::of(*each).options());
    each->flags().reshard_after_forward = asked.set ? asked.free : each != &group;
  }
  const auto context = engine::Context::create(groups, options.mesh);
  for (auto* each : groups) each->place.explicit_backward_prefetch = !ModuleState::of(*each).prefetches_backward;
  context->note_config_change();
  return state;
}

std::shared_ptr<ModuleState> find_state(const torch::nn::Module& module) {
  for (const auto& parameter : module.parameters()) {
    for (auto* group = group_of(parameter); group; group = group->place.parent) {
      if (stands_for(*group, &module)) return ModuleState::of(*group).shared_from_this();
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

template <class Fn>
void for_each_group(module::ModuleState& state, bool recurse, Fn&& fn) {
  for (auto* group : state.context().groups()) {
    if (group == &state.group() || (recurse && group && group->is_inside(state.group()))) fn(*group);
  }
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
    groups.push_back(&group);
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
  if (state_) state_->context().unshard(state_->group(), true);
  state_.reset();
}

UnshardHandle FSDPModuleBase::unshard(bool async_op) {
  if (state_->group().params().empty()) return {};
  state_->context().unshard(state_->group(), !async_op);
  return async_op ? UnshardHandle(state_) : UnshardHandle();
}

void FSDPModuleBase::reshard() { state_->context().reshard(state_->group()); }

void FSDPModuleBase::set_requires_gradient_sync(bool requires_sync, bool recurse) {
  for_each_group(*state_, recurse, [&](auto& group) { group.flags().sync_gradients = requires_sync; });
}

void FSDPModuleBase::set_requires_all_reduce(bool requires_all_reduce, bool recurse) {
  for_each_group(*state_, recurse, [&](auto& group) { group.flags().all_reduce_gradients = requires_all_reduce; });
}

// Gradients are handed out when each backward ends, last or not: there is nothing to leave in flight between two.
void FSDPModuleBase::set_is_last_backward(bool) {}

void FSDPModuleBase::set_reshard_after_forward(bool reshard, bool recurse) {
  for_each_group(*state_, recurse, [&](auto& group) {
    group.flags().reshard_after_forward = reshard;
    group.keep_over(0);
  });
}

void FSDPModuleBase::set_reshard_after_backward(bool reshard, bool recurse) {
  for_each_group(*state_, recurse, [&](auto& group) { group.flags().reshard_after_backward = reshard; });
}

void FSDPModuleBase::set_modules_to_forward_prefetch(const std::vector<FSDPModuleBase>& modules) {
  auto& place = state_->group().place;
  place.forward_prefetch = groups_of(*state_, modules);
  place.explicit_forward_prefetch = true;
  state_->context().note_config_change();
}

void FSDPModuleBase::set_modules_to_backward_prefetch(const std::vector<FSDPModuleBase>& modules) {
  auto& place = state_->group().place;
  place.backward_prefetch = groups_of(*state_, modules);
  place.explicit_backward_prefetch = true;
  state_->context().note_config_change();
}

void FSDPModuleBase::set_gradient_divide_factor(double factor) {
  if (!(factor > 0)) {
    throw InvalidArgument("libfsdp: the gradient divide factor must be positive, got " + std::to_string(factor));
  }
  for_each_group(*state_, true, [&](auto& group) { group.flags().divide_factor = factor; });
}

void FSDPModuleBase::set_symm_mem_for_comm() {
  state_->group().share_memory();
  state_->context().note_config_change();
}

void FSDPModuleBase::set_custom_all_gather(std::shared_ptr<CustomAllGather> gather) {
  state_->group().set_custom_gather(std::move(gather));
  state_->context().note_config_change();
}

void FSDPModuleBase::set_custom_reduce_scatter(std::shared_ptr<CustomReduceScatter> reduce) {
  state_->group().set_custom_reduce(std::move(reduce));
  state_->context().note_config_change();
}

void FSDPModuleBase::set_all_reduce_hook(std::function<void(const at::Tensor&)> hook,
                                         std::optional<c10::Stream> stream) {
  state_->group().set_all_reduce_hook(std::move(hook), stream);
  state_->context().note_config_change();
}

void FSDPModuleBase::set_post_optim_event(std::shared_ptr<const c10::Event> event) {
  state_->context().set_optimizer_event(std::move(event));
}

void FSDPModuleBase::set_reduce_scatter_max_input_buffers(int64_t max_input_buffers, bool recurse) {
  if (max_input_buffers < 1) {
    throw InvalidArgument(c10::str("libfsdp: max_input_buffers is ", max_input_buffers,
                                   "; at least 1 reduction must be allowed to be in flight"));
  }
  for_each_group(*state_, recurse, [&](auto& group) { group.flags().max_reductions = max_input_buffers; });
}

void FSDPModuleBase::set_reduce_scatter_unused_params(bool, bool) {}
void FSDPModuleBase::set_force_sum_reduction_for_comms(bool) {}
void FSDPModuleBase::set_separate_reduce_scatter_group(bool, bool) {}
void FSDPModuleBase::set_allocate_memory_from_process_group_for_comm(bool) {
  constexpr int kCollectives = 3;
  if ((state_->group().customs() & kCollectives) == 0) return;
  throw InvalidArgument("libfsdp: group '" + state_->group().name() +
                        "' has a custom collective, which takes its buffers where it wants");
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
