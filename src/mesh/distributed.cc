#include <fsdp/distributed.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include <ATen/Functions.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <fsdp/error.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/sigpipe.h"
#include "comm/channel.h"
#include "comm/origin.h"
#include "mesh/launch.h"
#include "mesh/world.h"

namespace fsdp {
namespace {

// How often this process joined a group: each time gets its own corner of a store that outlives the group.
std::atomic<int> joined{0};
std::atomic<bool> initialized{false};

mesh::Launch resolve(const InitOptions& options, const std::string& engine) {
  if ((options.rank < 0) != (options.world_size < 0)) {
    throw InvalidArgument(c10::str("init_process_group: InitOptions::rank is ", options.rank, " and world_size is ",
                                   options.world_size, "; give both or neither"));
  }
  const bool given = options.rank >= 0;
  if (given && options.rank >= options.world_size) {
    throw InvalidArgument(c10::str("init_process_group: InitOptions::rank is ", options.rank,
                                   ", which is not below world_size, ", options.world_size));
  }
  mesh::Launch launch;
  const bool needs_store = engine != "fake" && options.world_size != 1;
  if (!given || needs_store) {
    auto environment = mesh::current_environment();
    if (given) {
      environment["RANK"] = std::to_string(options.rank);
      environment["WORLD_SIZE"] = std::to_string(options.world_size);
    }
    launch = mesh::read_launch(environment).value_or(launch);
  } else {
    launch.rank = options.rank;
    launch.world_size = options.world_size;
  }
  return launch;
}

/// A rank that left may join the next group, through the same server, before rank 0 has left this one: the server
/// outlives the group, until this process serves another or ends. A server of the same port is the same server.
void keep_serving(c10::intrusive_ptr<c10d::Store> store) {
  static std::mutex mutex;
  static c10::intrusive_ptr<c10d::Store> served;
  const std::lock_guard lock(mutex);
  served.swap(store);
}

c10::intrusive_ptr<c10d::Store> connect(const mesh::Launch& launch, std::chrono::milliseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(launch.port);
  options.isServer = launch.rank == 0 && !launch.store_is_hosted;
  options.timeout = timeout;
  options.waitWorkers = false;  // the first channel waits for its members
  options.multiTenant = true;
  const comm::Origin origin{"start-up", c10::str(launch.address, ":", launch.port), launch.rank, launch.world_size,
                            timeout};
  const base::BlockedSigpipe blocked;  // in the store's threads for good
  auto store = comm::translating_errors(origin, "joining the store",
                                        [&] { return c10::make_intrusive<c10d::TCPStore>(launch.address, options); });
  if (options.isServer) keep_serving(store);
  return c10::make_intrusive<c10d::PrefixStore>(c10::str("libfsdp/", joined++), std::move(store));
}

/// Rank 0 serves the store, and others may still be opening a channel: it stays until all have left, or for a while.
void leave(const mesh::World& world) {
  const auto& store = world.store();
  if (!store) {
    return;
  }
  try {
    if (store->add("left", 1) == world.size()) {
      store->set("all_left", "1");
    }
    if (world.rank() == 0) {
      store->wait({"all_left"}, std::min<std::chrono::milliseconds>(world.timeout(), std::chrono::seconds(10)));
    }
  } catch (const c10::Error&) {  // a peer that ended without leaving, or took the store with it
  }
}

}  // namespace

void init_process_group(const InitOptions& options) {
  if (initialized.exchange(true)) {
    throw InvalidArgument(
        "init_process_group: this process has joined a group already; call destroy_process_group first");
  }
  try {
    const auto engine = options.engine.empty() ? std::string("auto") : options.engine;
    const auto known = comm::engines();
    if (std::find(known.begin(), known.end(), engine) == known.end()) {
      throw NotSupported(
          c10::str("init_process_group: there is no engine '", engine, "'; this build has: ", c10::Join(", ", known)));
    }
    const auto launch = resolve(options, engine);
    const bool needs_store = engine != "fake" && launch.world_size > 1;
    auto store = needs_store ? connect(launch, options.timeout) : nullptr;
    mesh::World::set_process_world(std::make_shared<mesh::World>(
        engine, std::move(store), launch.rank, launch.world_size, launch.local_rank, options.timeout));
  } catch (...) {
    initialized = false;
    throw;
  }
}

void destroy_process_group() {
  if (!initialized) {
    return;
  }
  const auto world = mesh::World::current();
  mesh::World::set_process_world(nullptr);
  initialized = false;
  leave(*world);
}

bool is_initialized() { return initialized; }
int rank() { return mesh::World::current()->rank(); }
int world_size() { return mesh::World::current()->size(); }
int local_rank() { return mesh::World::current()->local_rank(); }

void barrier() { mesh::World::current()->channel().all_reduce(at::zeros({1}), comm::ReduceOp::kSum)->wait(); }

at::Tensor all_reduce_mean(const at::Tensor& values) {
  if (!values.is_floating_point()) {
    throw InvalidArgument(c10::str("all_reduce_mean on rank ", rank(), ": the mean of ", values.scalar_type(),
                                   " values is not one; convert them to a floating-point dtype"));
  }
  at::NoGradGuard no_grad;
  auto mean = values.detach().clone(at::MemoryFormat::Contiguous);
  mesh::World::current()->channel().all_reduce(mean, comm::ReduceOp::kSum)->wait();
  return mean.div_(world_size());
}

}  // namespace fsdp
