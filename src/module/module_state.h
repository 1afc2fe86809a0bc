#pragma once
#include <memory>
#include <string>
#include <vector>

#include <fsdp/fully_shard.h>

#include "engine/param_group.h"

namespace fsdp::module {

/// What one call of fully_shard made: the group, the modules it stands for, and the options. The module's parameters
/// (their facades) keep it alive; handles share it.
class ModuleState : public std::enable_shared_from_this<ModuleState> {
 public:
  ModuleState(std::vector<const torch::nn::Module*> modules, FullyShardOptions options,
              const std::vector<engine::NamedParam>& params);

  engine::ParamGroup& group() { return group_; }
  engine::Context& context() { return group_.context(); }
  const FullyShardOptions& options() const { return options_; }
  /// Identities only: a module may be gone.
  const std::vector<const torch::nn::Module*>& modules() const { return modules_; }
  const std::string& fqn() const { return fqn_; }
  void set_fqn(std::string fqn);

  static ModuleState& of(engine::ParamGroup& group) { return *static_cast<ModuleState*>(group.face); }

 private:
  std::vector<const torch::nn::Module*> modules_;
  FullyShardOptions options_;
  std::string fqn_;
  engine::ParamGroup group_;
};

}  // namespace fsdp::module
