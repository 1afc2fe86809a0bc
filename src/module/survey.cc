#include "module/survey.h"

#include <algorithm>
#include <sstream>
#include <unordered_set>

#include <fsdp/error.h>

#include "mesh/mesh_state.h"
#include "module/extension.h"
#include "tensor/facade.h"

namespace fsdp::module {
namespace {

std::string dotted(const Visit& visit, const std::string& name) {
  return visit.path.empty() ? name : visit.path + "." + name;
}

std::string type_name(const std::optional<at::ScalarType>& type) { return type ? c10::toString(*type) : "-"; }

/// Whether all ranks of `inner` are of `outer` too.
bool is_within(const DeviceMesh& inner, const DeviceMesh& outer) {
  const auto& all = outer.ranks();
  return inner.state()->world() == outer.state()->world() &&
         std::all_of(inner.ranks().begin(), inner.ranks().end(),
                     [&](int rank) { return std::find(all.begin(), all.end(), rank) != all.end(); });
}

/// What is the matter with a parameter's own mesh, "" if nothing is.
std::string problem_of_own(const DeviceMesh& own, const DeviceMesh& mesh) {
  std::ostringstream out;
  if (own.ndim() > 2) {
    out << "its own mesh " << own << " has " << own.ndim() << " axes, expected one (shard) or two (replicate, shard)";
  } else if (own.device_type() != mesh.device_type() || !is_within(own, mesh)) {
    out << "its own mesh " << own << " has ranks or a device that " << mesh << " does not have, the mesh of the call";
  }
  return out.str();
}

/// How one parameter is to lie.
struct Lie {
  DeviceMesh mesh;
  int64_t dim = 0;
};

/// `wrong` gets what is the matter with it.
template <class Wrong>
Lie lie_of(const std::string& name, const at::Tensor& tensor, const FullyShardOptions& options, Wrong&& wrong) {
  const auto chosen = options.shard_placement_fn ? options.shard_placement_fn(tensor) : std::nullopt;
  if (!chosen) return {options.mesh};
  const auto& placement = chosen->placement;
  const std::string asked =
      "shard_placement_fn for parameter '" + name + "' (sizes " + c10::str(tensor.sizes()) + "): ";
  const auto mesh = chosen->mesh.defined() ? chosen->mesh : options.mesh;
  if (auto problem = problem_of_own(mesh, options.mesh); !problem.empty()) {
    wrong(asked + problem);
    return {options.mesh};
  }
  if (placement.kind != Placement::Kind::kShard) {
    wrong(asked + "expected Shard(n), got Replicate(); give the parameter to ignored_params to keep it whole");
    return {mesh};
  }
  const int64_t dims = std::max<int64_t>(tensor.dim(), 1), axis = mesh.shape().back();
  const int64_t dim = placement.dim < 0 ? placement.dim + dims : placement.dim;
  if (dim < 0 || dim >= dims) {
    wrong(asked + "it has no dim " + std::to_string(placement.dim));
  } else if (dim > 0 && tensor.size(dim) % axis != 0) {
    wrong(asked + "dim " + std::to_string(dim) + " has " + std::to_string(tensor.size(dim)) +
          " rows, expected a multiple of " + std::to_string(axis) +
          ", the size of the shard axis; only dim 0 is cut unevenly");
  } else {
    return {mesh, dim};
  }
  return {mesh};
}

/// "" if reshard_after_forward can be had over `mesh`.
std::string problem_of_reshard(const FullyShardOptions& options, const DeviceMesh& mesh) {
  const auto& given = options.reshard_after_forward;
  const auto* over = given ? std::get_if<int64_t>(&*given) : nullptr;
  const int64_t axis = mesh.shape().back();
  if (!over || (*over >= 1 && axis % *over == 0)) return "";
  return "reshard_after_forward is " + std::to_string(*over) + ", expected a factor of " + std::to_string(axis) +
         ", the size of the shard axis" + (mesh == options.mesh ? "" : " of a parameter's own mesh") +
         "; true or false are possible always";
}

/// The extension that `options` give a parameter, if any, with what it sends.
template <class Wrong>
void extend(NewParam& param, const DeviceMesh& mesh, const FullyShardOptions& options, Wrong&& wrong) {
  if (!options.tensor_extension_fn) return;
  const auto& [name, tensor, dim, shard] = param.named;
  param.extension = options.tensor_extension_fn(tensor);
  if (!param.extension) return;
  if (reshard_of(options, mesh).over > 0) {
    wrong("tensor_extension_fn for parameter '" + name +
          "': an extension gathers over the whole shard axis alone, and reshard_after_forward is a number; use true or "
          "false");
    return;
  }
  try {
    param.sends = first_sent(*param.extension, tensor, dim, mesh);
  } catch (const std::exception& error) {
    wrong("pre_all_gather of parameter '" + name + "' threw: " + error.what());
  }
}

/// A state dict holds buffers too, but only where somebody registered them to be saved: here nobody could tell which
/// were given values.
template <class Wrong>
void check_buffers(const Visit& visit, Wrong&& wrong) {
  for (const auto& item : visit.module->named_buffers(/*recurse=*/false)) {
    if (!item.value().defined() || !item.value().is_meta()) continue;
    wrong("buffer '" + dotted(visit, item.key()) +
          "' is on meta, where it has no values; make it on the mesh's device before sharding");
  }
}

std::string described(const NewParam& param, const DeviceMesh& mesh, const FullyShardOptions& options) {
  const auto& tensor = param.named.tensor;
  std::ostringstream line;
  line << param.named.name << " " << tensor.sizes() << " " << c10::toString(tensor.scalar_type())
       << (tensor.requires_grad() ? "" : " frozen");
  if (param.named.dim != 0) line << " Shard(" << param.named.dim << ")";
  if (mesh != options.mesh) line << " over " << mesh;
  for (const auto& sent : param.sends) line << " sends " << sent.sizes() << " " << c10::toString(sent.scalar_type());
  return line.str();
}

NewGroup& group_over(std::vector<NewGroup>& groups, const DeviceMesh& mesh) {
  const auto found = std::find_if(groups.begin(), groups.end(), [&](const auto& group) { return group.mesh == mesh; });
  return found != groups.end() ? *found : groups.emplace_back(NewGroup{mesh, {}});
}

}  // namespace

Reshard reshard_of(const FullyShardOptions& options, const DeviceMesh& mesh) {
  const auto& given = options.reshard_after_forward;
  if (!given) return {};
  if (const auto* flag = std::get_if<bool>(&*given)) return {true, *flag, 0};
  const int64_t over = std::get<int64_t>(*given);
  return {true, over != 1, over == 1 || over == mesh.shape().back() ? 0 : over};
}

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
  result.groups.push_back({options.mesh, {}});
  for (const auto& visit : result.visits) {
    check_buffers(visit, wrong);
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
      const auto lie = lie_of(name, tensor, options, wrong);
      NewParam param{{name, tensor, lie.dim}, nullptr, {}};
      if (result.problem.empty()) extend(param, lie.mesh, options, wrong);
      result.lines.push_back(described(param, lie.mesh, options));
      auto& group = group_over(result.groups, lie.mesh);
      group.params.push_back(std::move(param));
      const auto& head = group.params[0].named;
      if (face.layout == engine::Layout::kFlat && tensor.scalar_type() != head.tensor.scalar_type()) {
        wrong("the parameters of one unit must have one dtype: '" + head.name + "' is " +
              c10::toString(head.tensor.scalar_type()) + ", '" + name + "' is " + c10::toString(tensor.scalar_type()) +
              "; wrap them apart, or cast one");
      }
    }
  }
  if (met.empty() && result.inner.empty()) {
    wrong(caller + " found no parameters in module '" + modules[0]->name() + "' to shard");
  }
  for (auto* group : result.inner) {
    if (face.layout == engine::Layout::kFlat && group->mesh() != options.mesh) {
      wrong("group '" + group->name() + "' was sharded on another mesh than its enclosing module; use one mesh");
    }
    if (!is_within(group->mesh(), options.mesh)) {
      wrong("group '" + group->name() + "' was sharded over " + c10::str(group->mesh()) +
            ", which has ranks that the mesh of its enclosing module does not have, " + c10::str(options.mesh) +
            "; use one mesh, or a part of it inside");
    }
  }
  const auto& policy = options.mp_policy;
  result.lines.push_back("param_dtype " + type_name(policy.param_dtype) + ", reduce_dtype " +
                         type_name(policy.reduce_dtype));
  for (const auto& group : result.groups) {
    if (auto problem = problem_of_reshard(options, group.mesh); !problem.empty()) wrong(std::move(problem));
  }
  const auto reshard = reshard_of(options, options.mesh);
  result.lines.push_back("reshard_after_forward " + (reshard.over > 0 ? std::to_string(reshard.over)
                                                     : !reshard.set   ? "-"
                                                     : reshard.free   ? "true"
                                                                      : "false"));
  result.lines.push_back(std::to_string(result.inner.size()) + " inner groups");
  if (result.groups.size() > 1 && result.groups[0].params.empty()) result.groups.erase(result.groups.begin());
  return result;
}

}  // namespace fsdp::module
