#include "mesh/world.h"

#include <algorithm>
#include <mutex>
#include <numeric>

#include <c10/util/StringUtil.h>
#include <fsdp/error.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

namespace fsdp::mesh {
namespace {

// Never destroyed: a static object that still holds a mesh may outlive any order of destructors.
struct ProcessWorld {
  std::mutex mutex;
  std::shared_ptr<World> world;
  std::shared_ptr<World> alone = std::make_shared<World>("gloo", nullptr, 0, 1, 0, std::chrono::minutes(10));
};

ProcessWorld& process() {
  static auto* instance = new ProcessWorld;
  return *instance;
}

thread_local std::shared_ptr<World> thread_world;

// "0+2*4" is ranks 0, 2, 4, 6: short for the regular groups of a mesh.
std::string members(const std::vector<int>& ranks) {
  const int step = ranks.size() > 1 ? ranks[1] - ranks[0] : 1;
  for (size_t i = 1; i < ranks.size(); ++i) {
    if (ranks[i] - ranks[i - 1] != step) {
      return c10::Join(",", ranks);
    }
  }
  return c10::str(ranks[0], "+", step, "*", ranks.size());
}

}  // namespace

World::World(std::string engine, c10::intrusive_ptr<c10d::Store> store, int rank, int size, int local_rank,
             std::chrono::milliseconds timeout)
    : engine_(std::move(engine)),
      store_(std::move(store)),
      rank_(rank),
      size_(size),
      local_rank_(local_rank),
      timeout_(timeout) {}

std::shared_ptr<World> World::current() {
  if (thread_world) {
    return thread_world;
  }
  std::lock_guard lock(process().mutex);
  return process().world ? process().world : process().alone;
}

void World::set_process_world(std::shared_ptr<World> world) {
  std::lock_guard lock(process().mutex);
  process().world.swap(world);
}

void World::set_thread_world(std::shared_ptr<World> world) { thread_world.swap(world); }

std::shared_ptr<comm::Channel> World::open_channel(const std::vector<int>& ranks, const std::string& label) {
  const auto self = std::find(ranks.begin(), ranks.end(), rank_);
  if (self == ranks.end()) {
    throw InvariantError(c10::str("rank ", rank_, " opens the channel '", label, "' of ranks ", members(ranks),
                                  ", which it is not one of"));
  }
  comm::Rendezvous rendezvous;
  rendezvous.rank = static_cast<int>(self - ranks.begin());
  rendezvous.size = static_cast<int>(ranks.size());
  rendezvous.timeout = timeout_;
  rendezvous.name = label;
  if (store_ && ranks.size() > 1) {
    const auto group = c10::str(label, "/", members(ranks));
    const auto prefix = c10::str("channel/", group, "/", opened_[group]++);
    rendezvous.store = c10::make_intrusive<c10d::PrefixStore>(prefix, store_);
  }
  return comm::open_channel(engine_, rendezvous);
}

comm::Channel& World::channel() {
  if (!channel_) {
    std::vector<int> everybody(size_);
    std::iota(everybody.begin(), everybody.end(), 0);
    channel_ = open_channel(everybody, "world");
  }
  return *channel_;
}

}  // namespace fsdp::mesh
