#pragma once
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include <c10/util/intrusive_ptr.h>

#include "comm/channel.h"

namespace c10d {
class Store;
}

namespace fsdp::mesh {

/// The ranks that were launched together, and the store where they meet. One a process; ranks that are threads (in
/// tests) each bind their own to their thread, and `current()` finds that first.
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

  /// Opens a channel among `ranks` (world ranks, ascending, this one included). Collective among them. Every call
  /// gets a fresh place in the store: `label` must be the same on all members, and the n-th call with one label
  /// matches the n-th call of the others.
  std::shared_ptr<comm::Channel> open_channel(const std::vector<int>& ranks, const std::string& label);

 private:
  std::string engine_;
  c10::intrusive_ptr<c10d::Store> store_;
  int rank_, size_, local_rank_;
  std::chrono::milliseconds timeout_;
  struct Counters;
  std::shared_ptr<Counters> counters_;  // calls per label
};

}  // namespace fsdp::mesh
