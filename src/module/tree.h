#pragma once
#include <memory>
#include <string>
#include <vector>

#include <torch/nn/module.h>

#include "engine/param_group.h"

namespace fsdp::module {

/// A module met on a walk down from the modules of a fully_shard call, with its path.
struct Visit {
  std::string path;  // dotted, "" for the top module
  std::shared_ptr<torch::nn::Module> module;
  std::vector<const torch::nn::Module*> ancestors;  // outermost first, itself last
};

/// Every module at and below `tops`, depth first. With several tops, paths of the i-th begin with "i".
std::vector<Visit> walk(const std::vector<std::shared_ptr<torch::nn::Module>>& tops);

/// The group that owns a parameter, or null for an ordinary tensor.
engine::ParamGroup* group_of(const at::Tensor& parameter);

/// All groups that own parameters met on the walk, in walk order.
std::vector<engine::ParamGroup*> groups_in(const std::vector<Visit>& visits);

/// Whether one of `group`'s modules is `module`.
bool stands_for(engine::ParamGroup& group, const torch::nn::Module* module);

/// Sets parents and names of all groups from the outermost group's walk. `groups` includes the outermost, `top`.
void arrange(const std::vector<Visit>& visits, const std::vector<engine::ParamGroup*>& groups, engine::ParamGroup& top);

}  // namespace fsdp::module
