#pragma once
#include <memory>
#include <string>
#include <vector>

#include <fsdp/fully_shard.h>

#include "module/module_state.h"
#include "module/tree.h"

namespace fsdp::module {

/// A parameter that is going to be sharded.
struct NewParam {
  engine::NamedParam named;
  std::shared_ptr<TensorExtension> extension;  // or null
  std::vector<at::Tensor> sends;               // tensors like those that it sends
};

/// Such parameters that lie over the same ranks: a group.
struct NewGroup {
  DeviceMesh mesh;
  std::vector<NewParam> params;
};

/// What fully_shard is about to do, found out before anything is changed.
struct Survey {
  std::vector<Visit> visits;
  std::vector<NewGroup> groups;            // one a mesh, at least one
  std::vector<engine::ParamGroup*> inner;  // from earlier calls
  std::vector<std::string> lines;          // for the comparison across ranks
  std::string problem;                     // "" if it can be done
};

/// Not collective, and changes nothing. `options.mesh` is of one axis (shard) or two (replicate, shard).
Survey survey(const std::vector<std::shared_ptr<torch::nn::Module>>& modules, const FullyShardOptions& options,
              const Face& face);

/// What reshard_after_forward means over `mesh`.
struct Reshard {
  bool set = false;
  bool free = true;  // where it is set
  int64_t over = 0;  // the number of ranks over which parameters are kept; 0: all, and nothing is kept
};
Reshard reshard_of(const FullyShardOptions& options, const DeviceMesh& mesh);

}  // namespace fsdp::module
