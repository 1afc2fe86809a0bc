#include <map>
#include <mutex>

#include <c10/util/StringUtil.h>
#include <fsdp/error.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/sigpipe.h"
#include "comm/backends/backends.h"
#include "comm/channel.h"
#include "comm/origin.h"
#include "comm/solo_channel.h"

namespace fsdp::comm {
namespace {

struct Registry {
  std::mutex mutex;
  std::map<std::string, EngineFactory> factories{{"auto", open_nearest}, {"fake", open_fake},
                                                 {"gloo", open_gloo},    {"inproc", open_inproc},
#ifdef FSDP_WITH_MPI
                                                 {"mpi", open_mpi},      {"shm+mpi", open_nearest_mpi},
#endif
#ifdef FSDP_WITH_NCCL
                                                 {"nccl", open_nccl},
#endif
                                                 {"shm", open_shm}};
};

// Built on first use and never destroyed: safe from any static constructor or destructor.
Registry& registry() {
  static auto* instance = new Registry;
  return *instance;
}

EngineFactory find_engine(const std::string& engine) {
  {
    std::lock_guard lock(registry().mutex);
    const auto found = registry().factories.find(engine);
    if (found != registry().factories.end()) {
      return found->second;
    }
  }
  throw NotSupported(c10::str("there is no engine '", engine, "'; this build has: ", c10::Join(", ", engines())));
}

}  // namespace

void register_engine(const std::string& engine, EngineFactory factory) {
  std::lock_guard lock(registry().mutex);
  if (!registry().factories.emplace(engine, std::move(factory)).second) {
    throw InvalidArgument(c10::str("an engine '", engine, "' is registered already; choose another name"));
  }
}

std::vector<std::string> engines() {
  std::lock_guard lock(registry().mutex);
  std::vector<std::string> names;
  for (const auto& [name, factory] : registry().factories) {
    names.push_back(name);
  }
  return names;
}

std::shared_ptr<Channel> open_channel(const std::string& engine, const Rendezvous& rendezvous) {
  const auto factory = find_engine(engine);
  if (rendezvous.size == 1) {
    return std::make_shared<SoloChannel>(rendezvous.name, 0, 1);
  }
  const Origin origin{engine, rendezvous.name, rendezvous.rank, rendezvous.size, rendezvous.timeout};
  const base::BlockedSigpipe blocked;  // in the engine's threads for good
  return translating_errors(origin, "opening the channel", [&] { return factory(rendezvous); });
}

}  // namespace fsdp::comm
