#include <fsdp/fully_sharded_data_parallel.h>

#include <algorithm>
#include <sstream>
#include <unordered_set>

#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/InferenceMode.h>
#include <fsdp/distributed.h>
#include <fsdp/dtensor.h>
#include <fsdp/error.h>

#include "engine/context.h"
#include "mesh/mesh_state.h"
#include "module/module_state.h"
#include "module/same_model.h"
#include "module/tree.h"
#include "tensor/facade.h"

namespace fsdp {
namespace module {
namespace {

using engine::ParamGroup;
using ModulePtr = std::shared_ptr<torch::nn::Module>;

constexpr const char* kName = "FullyShardedDataParallel";

bool is_hybrid(ShardingStrategy strategy) {
  return strategy == ShardingStrategy::kHybridShard || strategy == ShardingStrategy::kHybridShardZero2;
}

const char* name_of(ShardingStrategy strategy) {
  switch (strategy) {
    case ShardingStrategy::kFullShard:
      return "kFullShard";
    case ShardingStrategy::kShardGradOp:
      return "kShardGradOp";
    case ShardingStrategy::kNoShard:
      return "kNoShard";
    case ShardingStrategy::kHybridShard:
      return "kHybridShard";
    case ShardingStrategy::kHybridShardZero2:
      return "kHybridShardZero2";
  }
  throw InvalidArgument("libfsdp: " + std::string(kName) + ": this sharding strategy is none of the five");
}

/// The ranks of `mesh` as {replicate, shard}, the second axis of one rank.
DeviceMesh as_replicas(const DeviceMesh& mesh) {
  return DeviceMesh(std::make_shared<mesh::MeshState>(mesh.state()->world(), mesh.device_type(),
                                                      std::vector<int64_t>{mesh.size(), 1},
                                                      std::vector<std::string>{"replicate", "shard"}, mesh.ranks()));
}

DeviceMesh given_mesh(const FullyShardedDataParallelOptions& options) {
  if (options.mesh.defined()) return options.mesh;
  const auto world = default_mesh();
  return is_hybrid(options.sharding_strategy) && world.size() == 1 ? as_replicas(world) : world;
}

/// "" if the strategy goes with it.
std::string problem_of_mesh(const DeviceMesh& mesh, ShardingStrategy strategy) {
  const bool hybrid = is_hybrid(strategy);
  if (mesh.ndim() == (hybrid ? 2 : 1)) return "";
  std::ostringstream out;
  out << name_of(strategy) << " expects a mesh of " << (hybrid ? "two axes, {replicate, shard}" : "one axis")
      << ", got " << mesh << "; make one with init_device_mesh";
  return out.str();
}

using Tensors = std::unordered_set<c10::TensorImpl*>;
using Modules = std::unordered_set<const torch::nn::Module*>;

/// What is left alone.
struct Ignored {
  Modules modules;
  std::vector<at::Tensor> params;
};

Ignored ignored_by(const FullyShardedDataParallelOptions& options) {
  Ignored ignored{{}, options.ignored_params};
  for (const auto& module : options.ignored_modules) {
    if (!module) throw InvalidArgument("libfsdp: " + std::string(kName) + ": an ignored module is empty");
    for (const auto& each : module->modules()) ignored.modules.insert(each.get());
    for (const auto& parameter : module->parameters()) ignored.params.push_back(parameter);
  }
  for (const auto& parameter : ignored.params) {
    if (auto* group = group_of(parameter)) {
      throw InvalidArgument("libfsdp: " + std::string(kName) + ": an ignored parameter belongs to unit '" +
                            group->name() + "' already; ignore it where that is wrapped");
    }
  }
  return ignored;
}

Tensors identities(const std::vector<at::Tensor>& tensors) {
  Tensors out;
  for (const auto& tensor : tensors) out.insert(tensor.unsafeGetTensorImpl());
  return out;
}

/// The values of the mesh's first rank, on all of its ranks.
void copy_from_first(const ModulePtr& module, const Ignored& ignored, const DeviceMesh& mesh) {
  auto skipped = identities(ignored.params);
  std::vector<at::Tensor> tensors;
  std::vector<std::string> lines;
  for (const auto& visit : walk({module})) {
    if (ignored.modules.count(visit.module.get())) continue;
    for (const auto& items : {visit.module->named_parameters(false), visit.module->named_buffers(false)}) {
      for (const auto& item : items) {
        const auto& tensor = item.value();
        if (!tensor.defined() || tensor::facade_of(tensor)) continue;
        if (!skipped.insert(tensor.unsafeGetTensorImpl()).second) continue;
        std::ostringstream line;
        line << (visit.path.empty() ? "" : visit.path + ".") << item.key() << " " << tensor.sizes() << " "
             << c10::toString(tensor.scalar_type());
        lines.push_back(line.str());
        tensors.push_back(tensor.detach());
      }
    }
  }
  require_same_on_all_ranks(mesh, std::string(kName) + " (sync_module_states) of module '" + module->name() + "'",
                            lines, "");
  at::NoGradGuard no_grad;
  // Along the last axis first: then every rank of the first one's row 0 has the values of rank 0.
  for (int64_t axis = mesh.ndim() - 1; axis >= 0; --axis) {
    if (mesh.shape()[static_cast<size_t>(axis)] == 1) continue;
    const auto channel = mesh.state()->axis_channel(axis, mesh::Lane::kGather);
    for (const auto& tensor : tensors) {
      if (tensor.numel() == 0) continue;
      // As bytes: not every engine knows every dtype.
      const auto sent = tensor.contiguous();
      channel->broadcast(sent.view({-1}).view(at::kByte), 0)->wait();
      if (!sent.is_same(tensor)) tensor.copy_(sent);
    }
  }
}

/// Of the modules that no unit was made of before.
void cast_buffers(const ModulePtr& module, const Ignored& ignored, at::ScalarType dtype) {
  at::NoGradGuard no_grad;
  const auto visits = walk({module});
  const auto before = groups_in(visits);
  const auto is_wrapped = [&](const torch::nn::Module* each) {
    return std::any_of(before.begin(), before.end(), [&](auto* group) { return stands_for(*group, each); });
  };
  for (const auto& visit : visits) {
    if (ignored.modules.count(visit.module.get())) continue;
    if (std::any_of(visit.ancestors.begin(), visit.ancestors.end(), is_wrapped)) continue;
    for (auto& buffer : visit.module->buffers(/*recurse=*/false)) {
      if (buffer.defined() && buffer.is_floating_point()) buffer.set_data(buffer.to(dtype));
    }
  }
}

/// A comm hook for what is cut.
class HookedReduceScatter final : public CustomReduceScatter {
 public:
  explicit HookedReduceScatter(CommHook hook) : hook_(std::move(hook)) {}
  WaitFn run(const at::Tensor& output, const at::Tensor& input) override {
    hook_(input, output);
    return {};
  }

 private:
  CommHook hook_;
};

/// Makes units of the modules inside that the policy names.
class AutoWrap {
 public:
  using Make = std::function<std::shared_ptr<ModuleState>(const ModulePtr&)>;
  AutoWrap(const AutoWrapPolicy& policy, const Ignored& ignored, Make make)
      : policy_(policy), ignored_(ignored), make_(std::move(make)), counted_(identities(ignored.params)) {}

  void below(const ModulePtr& module) {
    for (const auto& child : module->named_children()) visit(child.value(), child.key());
  }

 private:
  /// The elements at and below `module` that no unit took; their parameters count where they are met first.
  int64_t visit(const ModulePtr& module, const std::string& path) {
    if (!module || ignored_.modules.count(module.get()) || !met_.insert(module.get()).second) return 0;
    int64_t left = 0;
    for (const auto& child : module->named_children()) left += visit(child.value(), path + "." + child.key());
    for (const auto& parameter : module->parameters(/*recurse=*/false)) {
      if (!parameter.defined() || tensor::facade_of(parameter)) continue;
      if (counted_.insert(parameter.unsafeGetTensorImpl()).second) left += parameter.numel();
    }
    if (left == 0 || !policy_(*module, left)) return left;
    make_(module)->set_fqn(path);  // for messages until the outermost unit names all
    return 0;
  }

  const AutoWrapPolicy& policy_;
  const Ignored& ignored_;
  Make make_;
  Tensors counted_;
  Modules met_;
};

}  // namespace

std::shared_ptr<ModuleState> wrap(const ModulePtr& module, const FullyShardedDataParallelOptions& options) {
  if (!module) throw InvalidArgument("libfsdp: " + std::string(kName) + " was given an empty module");
  const auto strategy = options.sharding_strategy;
  const auto ignored = ignored_by(options);
  const auto mesh = given_mesh(options);
  const auto& precision = options.mixed_precision;
  if (options.cpu_offload.offload_params && mesh.device_type() != at::kCPU) {
    throw NotSupported("libfsdp: " + std::string(kName) + ": CPUOffload on " +
                       c10::DeviceTypeName(mesh.device_type(), true) + " devices: keep state where the module is");
  }
  require_same_on_all_ranks(
      mesh, std::string(kName) + " of module '" + module->name() + "'",
      {std::string(name_of(strategy)) + (options.backward_prefetch ? "" : ", no backward prefetch") +
       (options.sync_module_states ? ", sync_module_states" : "") +
       (precision.buffer_dtype ? ", buffers " + std::string(c10::toString(*precision.buffer_dtype)) : "")},
      problem_of_mesh(mesh, strategy));
  FullyShardOptions each;
  each.mesh = strategy == ShardingStrategy::kNoShard ? as_replicas(mesh) : mesh;
  each.mp_policy = {.param_dtype = precision.param_dtype,
                    .reduce_dtype = precision.reduce_dtype,
                    .cast_forward_inputs = precision.cast_forward_inputs || precision.cast_root_forward_inputs};
  each.ignored_params = ignored.params;
  if (strategy != ShardingStrategy::kFullShard && strategy != ShardingStrategy::kHybridShard) {
    each.reshard_after_forward = false;
  }
  if (options.sync_module_states) copy_from_first(module, ignored, each.mesh);
  if (precision.buffer_dtype) cast_buffers(module, ignored, *precision.buffer_dtype);
  const Face face{.name = kName,
                  .layout = engine::Layout::kFlat,
                  .prefetches_backward = options.backward_prefetch.has_value(),
                  .keeps_reduced = precision.keep_low_precision_grads,
                  .casts_inside = precision.cast_forward_inputs};
  if (options.auto_wrap_policy) {
    AutoWrap(options.auto_wrap_policy, ignored, [&](const ModulePtr& inside) {
      return make_state({inside}, each, face);
    }).below(module);
  }
  return make_state({module}, each, face);
}

bool is_outermost(ModuleState& state) { return !state.group().place.parent; }

void require_outermost(ModuleState& state, const char* method) {
  if (is_outermost(state)) return;
  throw InvalidArgument("libfsdp: " + std::string(method) + "() must be called on the outermost wrapper; '" +
                        state.fqn() + "' is inside '" + state.group().place.parent->name() + "'");
}

std::vector<FSDPModuleBase> units_in(ModuleState& state) {
  std::vector<FSDPModuleBase> units;
  for (auto* group : state.context().groups()) {
    if (group && group->is_inside(state.group())) units.emplace_back(ModuleState::of(*group).shared_from_this());
  }
  return units;
}

void register_comm_hook(ModuleState& state, const CommHook& hook) {
  require_outermost(state, "register_comm_hook");
  if (!hook) throw InvalidArgument("libfsdp: register_comm_hook() was given an empty function");
  const auto units = units_in(state);
  for (const auto& unit : units) {
    const auto& group = unit.state()->group();
    const auto& shape = group.mesh().shape();
    if (shape.size() > 1 && shape.back() > 1) {
      throw InvalidArgument("libfsdp: communication hooks are not for hybrid strategies, which '" + group.name() +
                            "' has");
    }
    if (unit.state()->hooked) {
      throw InvalidArgument("libfsdp: a communication hook is registered already, on '" + group.name() + "'");
    }
  }
  for (const auto& unit : units) {
    auto& group = unit.state()->group();
    if (group.mesh().shape().back() == 1) {
      group.set_custom_all_reduce([hook](const at::Tensor& gradients) { hook(gradients, {}); });
    } else {
      group.set_custom_reduce(std::make_shared<HookedReduceScatter>(hook));
      group.flags().divide_factor = 1;
    }
    unit.state()->hooked = true;
  }
  state.context().note_config_change();
}

}  // namespace module

AutoWrapPolicy size_based_auto_wrap_policy(int64_t min_num_params) {
  if (min_num_params < 1) {
    throw InvalidArgument("libfsdp: size_based_auto_wrap_policy expects at least 1, got " +
                          std::to_string(min_num_params));
  }
  return
      [min_num_params](const torch::nn::Module&, int64_t unwrapped_numel) { return unwrapped_numel >= min_num_params; };
}

// --- no_sync --------------------------------------------------------------------------------------------------------

struct NoSync::Before {
  std::shared_ptr<module::ModuleState> state;
  bool sync_gradients, all_reduce_gradients;
};

NoSync::NoSync(std::shared_ptr<module::ModuleState> state) {
  for (auto* group : state->context().groups()) {
    if (!group) continue;
    auto& flags = group->flags();
    before_.push_back(
        {module::ModuleState::of(*group).shared_from_this(), flags.sync_gradients, flags.all_reduce_gradients});
    flags.sync_gradients = flags.all_reduce_gradients = false;
  }
  state->context().note_config_change();
}

NoSync::~NoSync() {
  for (const auto& before : before_) {
    auto& flags = before.state->group().flags();
    flags.sync_gradients = before.sync_gradients;
    flags.all_reduce_gradients = before.all_reduce_gradients;
    before.state->context().note_config_change();
  }
}

// --- summon_full_params ---------------------------------------------------------------------------------------------

struct SummonedParams::Shown {
  std::vector<std::shared_ptr<module::ModuleState>> units;
  std::vector<std::unique_ptr<tensor::ShownWhole>> params;
  bool writeback;
  ~Shown() {
    for (const auto& unit : units) unit->summoned = false;
  }
};

SummonedParams::SummonedParams(std::shared_ptr<module::ModuleState> state, const std::vector<at::Tensor>& parameters,
                               const SummonOptions& options)
    : shown_(std::make_unique<Shown>()) {
  if (options.rank0_only && (options.writeback || options.with_grads)) {
    throw NotSupported(
        "libfsdp: summon_full_params of '" + state->fqn() +
        "': rank0_only shows parameters on rank 0 to read; it needs writeback = false, and no with_grads");
  }
  const bool shows = !options.rank0_only || rank() == 0;
  auto& context = state->context();
  shown_->writeback = options.writeback;
  std::vector<module::ModuleState*> units;
  for (auto* group : context.groups()) {
    if (group == &state->group() || (options.recurse && group && group->is_inside(state->group()))) {
      units.push_back(&module::ModuleState::of(*group));
    }
  }
  for (const auto* unit : units) {
    if (unit->summoned || context.phase() != engine::Phase::kIdle) {
      throw InvalidArgument("libfsdp: rank " + std::to_string(rank()) + ": summon_full_params of '" + state->fqn() +
                            "' inside " + (unit->summoned ? "another summon_full_params" : "a forward or backward") +
                            ", or after one that failed; leave that first");
    }
  }
  at::NoGradGuard no_grad;
  c10::InferenceMode normal(false);
  for (const auto& parameter : parameters) {
    auto* group = module::group_of(parameter);  // null where it is summoned by now: tied
    if (!group || std::find(units.begin(), units.end(), &module::ModuleState::of(*group)) == units.end()) continue;
    const auto whole = dtensor(parameter).full_tensor();
    const auto& held = parameter.grad();
    const auto gradient = options.with_grads && held.defined() ? dtensor(held).full_tensor() : at::Tensor();
    if (shows) shown_->params.push_back(std::make_unique<tensor::ShownWhole>(parameter, whole, gradient));
  }
  if (!shows) return;
  for (auto* unit : units) {
    unit->summoned = true;
    shown_->units.push_back(unit->shared_from_this());
  }
}

SummonedParams::~SummonedParams() {
  try {
    close();
  } catch (const std::exception& error) {
    TORCH_WARN(error.what());
  }
}

void SummonedParams::close() {
  if (!shown_) return;
  const auto shown = std::move(shown_);
  std::exception_ptr failed;
  for (const auto& param : shown->params) {
    try {
      param->end(shown->writeback);
    } catch (...) {
      if (!failed) failed = std::current_exception();
    }
  }
  if (failed) std::rethrow_exception(failed);
}

}  // namespace fsdp
