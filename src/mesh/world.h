#pragma once
#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/channel.h"

namespace fsdp::mesh {

class MeshState;

/// The ranks that were launched together, and the store where they meet. One a process; ranks that are threads (in
/// tests) each bind their own to their thread, and `current()` finds that first. A world belongs to one thread at a
/// time.
class World {
 public:
  World(std::string engine, c10::intrusive_ptr<c10d::Store> store, int rank, int size, int local_rank,
        std::chrono::milliseconds timeout);

  /// The thread's world, else the process's, else a world of one rank.
  static std::shared_ptr<World> current();
  static void set_process_world(std::shared_ptr<World> world);
  static void set_thread_world(std::shared_ptr<World> world);

  int rank() const { return rank_; }
  int size() const { return size_; }
  int local_rank() const { return local_rank_; }
  const std::string& engine() const { return engine_; }
  std::chrono::milliseconds timeout() const { return timeout_; }

  /// Opens a channel among `ranks` (world ranks, this one included; their order is the channel's). Collective among
  /// them. Every call gets a fresh place in the store: `ranks` and `label` must be the same on all members, and the
  /// n-th call with them matches the n-th call of the others.
  std::shared_ptr<comm::Channel> open_channel(const std::vector<int>& ranks, const std::string& label);

  /// The channel among all ranks, for small things outside any mesh (barriers, means to print). Opened by the first
  /// call: collective.
  comm::Channel& channel();

  /// The 1D mesh over the whole world that models get which are given none; empty while no model uses it.
  std::weak_ptr<MeshState>& default_mesh() { return default_mesh_; }

  /// Null for a world of one rank and for the fake engine.
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }

 private:
  std::string engine_;
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_, size_, local_rank_;
  std::chrono::milliseconds timeout_;
  std::map<std::string, int> opened_;  // channels opened so far per label and members
  std::shared_ptr<comm::Channel> channel_;
  std::weak_ptr<MeshState> default_mesh_;
};

}  // namespace fsdp::mesh
