#pragma once
#include <memory>
#include <string>
#include <vector>

#include <fsdp/fully_shard.h>

#include "engine/param_group.h"

namespace fsdp::module {

/// How a face asks for a group.
struct Face {
  const char* name;  // in messages: "fully_shard"
  engine::Layout layout;
  bool prefetches_backward = true;
  bool keeps_reduced = false;    // gradients stay in the dtype that they were reduced in
  bool casts_inside = true;      // casts the inputs of groups inside others too
  bool offloads_on_cpu = false;  // an offload policy copies where it need not: for tests
};

/// What one call of fully_shard, or one unit of the classic wrapper, made: the group, the modules it stands for, and
/// the options. The module's parameters (their facades) keep it alive; handles share it. Where a call made several
/// groups, over different ranks, each has a state; the first is the leader, which the others keep alive.
class ModuleState : public std::enable_shared_from_this<ModuleState> {
 public:
  ModuleState(std::vector<const torch::nn::Module*> modules, FullyShardOptions options, const DeviceMesh& mesh,
              const std::vector<engine::NamedParam>& params, const Face& face, std::shared_ptr<ModuleState> leader,
              std::optional<engine::Offload> offload);

  engine::ParamGroup& group() { return group_; }
  const engine::ParamGroup& group() const { return group_; }
  engine::Context& context() { return group_.context(); }
  /// Of the states of one call, the one that handles refer to; this one, if the call made no other.
  ModuleState& leader() { return leader_ ? *leader_ : *this; }
  /// With the call's mesh, of its data-parallel axes alone.
  const FullyShardOptions& options() const { return options_; }
  /// Identities only: a module may be gone.
  const std::vector<const torch::nn::Module*>& modules() const { return modules_; }
  const std::string& fqn() const { return fqn_; }
  void set_fqn(std::string fqn);

  /// Whether its parameters are plain and whole now, outside of the engine (summon_full_params).
  bool summoned = false;
  /// Whether a user's own hook reduces its gradients.
  bool hooked = false;
  /// See Face.
  const bool prefetches_backward, casts_inside;

  static ModuleState& of(engine::ParamGroup& group) { return *static_cast<ModuleState*>(group.face); }

 private:
  std::vector<const torch::nn::Module*> modules_;
  FullyShardOptions options_;
  std::string fqn_;
  std::shared_ptr<ModuleState> leader_;
  engine::ParamGroup group_;
};

/// Whether one call made both groups, for the same modules.
inline bool of_one_call(const engine::ParamGroup& a, const engine::ParamGroup& b) {
  return &a == &b || (a.place.leader && a.place.leader == b.place.leader);
}

std::shared_ptr<ModuleState> make_state(std::vector<std::shared_ptr<torch::nn::Module>> modules,
                                        const FullyShardOptions& options, const Face& face);

/// A 1D mesh over the whole world, on the CPU, made once a world.
DeviceMesh default_mesh();

}  // namespace fsdp::module
