#include "module/tree.h"

#include <algorithm>
#include <unordered_map>

#include "module/module_state.h"
#include "tensor/facade.h"

namespace fsdp::module {
namespace {

void visit(const std::shared_ptr<torch::nn::Module>& module, const std::string& path,
           std::vector<const torch::nn::Module*>& above, std::vector<Visit>& out) {
  above.push_back(module.get());
  out.push_back({path, module, above});
  for (const auto& child : module->named_children()) {
    if (child.value()) visit(child.value(), path.empty() ? child.key() : path + "." + child.key(), above, out);
  }
  above.pop_back();
}

}  // namespace

std::vector<Visit> walk(const std::vector<std::shared_ptr<torch::nn::Module>>& tops) {
  std::vector<Visit> out;
  for (size_t i = 0; i < tops.size(); ++i) {
    std::vector<const torch::nn::Module*> above;
    visit(tops[i], tops.size() == 1 ? "" : std::to_string(i), above, out);
  }
  return out;
}

engine::ParamGroup* group_of(const at::Tensor& parameter) {
  const auto* tag = tensor::facade_of(parameter);
  return tag && tag->param ? &tag->param->group() : nullptr;
}

std::vector<engine::ParamGroup*> groups_in(const std::vector<Visit>& visits) {
  std::vector<engine::ParamGroup*> groups;
  for (const auto& visit : visits) {
    for (const auto& parameter : visit.module->named_parameters(/*recurse=*/false)) {
      auto* group = group_of(parameter.value());
      if (group && std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
    }
  }
  return groups;
}

bool stands_for(engine::ParamGroup& group, const torch::nn::Module* module) {
  const auto& modules = ModuleState::of(group).modules();
  return std::find(modules.begin(), modules.end(), module) != modules.end();
}

void arrange(const std::vector<Visit>& visits, const std::vector<engine::ParamGroup*>& groups,
             engine::ParamGroup& top) {
  std::unordered_map<const torch::nn::Module*, engine::ParamGroup*> by_module;  // leaders, of those of one call
  for (auto* group : groups) {
    group->place.parent = nullptr;
    auto* leader = &ModuleState::of(*group).leader().group();
    for (const auto* module : ModuleState::of(*group).modules()) by_module[module] = leader;
  }
  const auto place = [&](engine::ParamGroup& leader, const std::string* path, engine::ParamGroup* parent) {
    for (auto* group : groups) {
      if (!of_one_call(*group, leader)) continue;
      if (path) ModuleState::of(*group).set_fqn(*path);
      if (&leader != &top) group->place.parent = parent;
    }
  };
  std::unordered_map<engine::ParamGroup*, bool> placed;
  for (const auto& visit : visits) {
    // Names: the group's, from the first of its modules that is met; its parameters', wherever they are met first.
    const auto found = by_module.find(visit.module.get());
    if (found != by_module.end()) {
      auto* group = found->second;
      engine::ParamGroup* parent = nullptr;
      for (auto above = visit.ancestors.rbegin() + 1; above != visit.ancestors.rend() && !parent; ++above) {
        const auto enclosing = by_module.find(*above);
        if (enclosing != by_module.end() && enclosing->second != group) parent = enclosing->second;
      }
      if (!placed[group]) {
        place(*group, &visit.path, parent ? parent : &top);
      } else if (group->place.parent != parent) {
        place(*group, nullptr, &top);  // its modules lie in several groups: inside none of them but the outermost
      }
      placed[group] = true;
    }
    for (const auto& parameter : visit.module->named_parameters(/*recurse=*/false)) {
      auto* tag = tensor::facade_of(parameter.value());
      if (!tag || !tag->param) continue;
      auto name = visit.path.empty() ? parameter.key() : visit.path + "." + parameter.key();
      tensor::rename_facade(parameter.value(), name);
      tag->param->set_name(std::move(name));
    }
  }
}

}  // namespace fsdp::module
