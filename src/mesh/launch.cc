#include "mesh/launch.h"

#include <charconv>
#include <cstdint>
#include <vector>

#include <unistd.h>

#include <c10/util/StringUtil.h>
#include <fsdp/error.h>

namespace fsdp::mesh {
namespace {

/// The names under which one launcher says the same things.
struct Dialect {
  const char* launcher;
  std::vector<const char*> rank, size, local_rank;
  std::vector<const char*> local_size;  // ranks on this host
  std::vector<const char*> job;         // values that tell two jobs on one host apart
};

// In the order in which they are asked: torchrun may run under any of the others.
const std::vector<Dialect>& dialects() {
  static const auto* all = new std::vector<Dialect>{
      {"torchrun", {"RANK"}, {"WORLD_SIZE"}, {"LOCAL_RANK"}, {"LOCAL_WORLD_SIZE"}, {}},
      {"Open MPI",
       {"OMPI_COMM_WORLD_RANK"},
       {"OMPI_COMM_WORLD_SIZE"},
       {"OMPI_COMM_WORLD_LOCAL_RANK"},
       {"OMPI_COMM_WORLD_LOCAL_SIZE"},
       {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
      {"PMI", {"PMI_RANK"}, {"PMI_SIZE"}, {"MPI_LOCALRANKID"}, {"MPI_LOCALNRANKS"}, {"PMI_JOBID", "PMI_PORT"}},
      {"Slurm",
       {"SLURM_PROCID"},
       {"SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"},
       {"SLURM_LOCALID"},
       {},
       {"SLURM_JOB_ID", "SLURM_STEP_ID"}},
  };
  return *all;
}

class Reader {
 public:
  Reader(const Environment& environment, const char* launcher) : environment_(environment), launcher_(launcher) {}

  const std::string* find(const std::vector<const char*>& names) const {
    for (const auto* name : names) {
      const auto found = environment_.find(name);
      if (found != environment_.end() && !found->second.empty()) {
        return &found->second;
      }
    }
    return nullptr;
  }

  std::optional<int> number(const std::vector<const char*>& names) const {
    for (const auto* name : names) {
      if (const auto* text = find({name})) {
        int value = 0;
        const auto end = text->data() + text->size();
        const auto [stop, error] = std::from_chars(text->data(), end, value);
        if (error != std::errc() || stop != end || value < 0) {
          throw InvalidArgument(c10::str(name, "='", *text, "' in ", launcher_,
                                         "'s environment is not a number; expected a whole number from 0"));
        }
        return value;
      }
    }
    return std::nullopt;
  }

  int required(const std::vector<const char*>& names) const {
    if (const auto value = number(names)) {
      return *value;
    }
    throw missing(names.back(), "");
  }

  InvalidArgument missing(const char* name, const char* why) const {
    return InvalidArgument(c10::str(name, " is not set, but the rest of ", launcher_, "'s environment is", why,
                                    "; start the program with the launcher, or set ", name));
  }

 private:
  const Environment& environment_;
  const char* launcher_;
};

/// A port below the ephemeral range that the ranks of one job agree on.
int derived_port(const Reader& reader, const Dialect& dialect) {
  uint32_t hash = 2166136261u;  // FNV-1a: equal in every process, which std::hash does not promise
  for (const auto* name : dialect.job) {
    if (const auto* text = reader.find({name})) {
      for (const unsigned char c : *text) {
        hash = (hash ^ c) * 16777619u;
      }
    }
  }
  return 20000 + static_cast<int>(hash % 10000);
}

bool on_one_host(const Reader& reader, const Dialect& dialect, int world_size) {
  if (const auto nodes = reader.number({"SLURM_STEP_NUM_NODES", "SLURM_NNODES"}); nodes && dialect.local_size.empty()) {
    return *nodes == 1;
  }
  return reader.number(dialect.local_size) == world_size;
}

void find_store(const Reader& reader, const Dialect& dialect, Launch& launch) {
  const auto* address = reader.find({"MASTER_ADDR"});
  const auto port = reader.number({"MASTER_PORT"});
  const bool may_derive = !dialect.job.empty() && on_one_host(reader, dialect, launch.world_size);
  if (!may_derive && (!address || !port)) {
    throw reader.missing(address ? "MASTER_PORT" : "MASTER_ADDR",
                         dialect.job.empty() ? "" : ", and the ranks are not known to share one host");
  }
  launch.address = address ? *address : "127.0.0.1";
  launch.port = port ? *port : derived_port(reader, dialect);
  if (launch.port < 1 || launch.port > 65535) {
    throw InvalidArgument(c10::str("MASTER_PORT=", launch.port, " is not a port; expected 1 to 65535"));
  }
  const auto* agent = reader.find({"TORCHELASTIC_USE_AGENT_STORE"});
  launch.store_is_hosted = agent && *agent == "True";
}

}  // namespace

Environment current_environment() {
  Environment environment;
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string text(*entry);
    const auto equals = text.find('=');
    if (equals != std::string::npos) {
      environment.emplace(text.substr(0, equals), text.substr(equals + 1));
    }
  }
  return environment;
}

std::optional<Launch> read_launch(const Environment& environment) {
  for (const auto& dialect : dialects()) {
    const Reader reader(environment, dialect.launcher);
    // A Slurm allocation sets the number of tasks for programs that it did not launch; only the rank tells.
    const bool torchrun = dialect.job.empty();
    if (!reader.find(dialect.rank) && !(torchrun && reader.find(dialect.size))) {
      continue;
    }
    Launch launch;
    launch.launcher = dialect.launcher;
    launch.rank = reader.required(dialect.rank);
    launch.world_size = reader.required(dialect.size);
    launch.local_rank = reader.number(dialect.local_rank).value_or(0);
    if (launch.rank >= launch.world_size) {
      throw InvalidArgument(c10::str(dialect.rank[0], "=", launch.rank, " is not below ", dialect.size.back(), "=",
                                     launch.world_size, " in ", dialect.launcher, "'s environment"));
    }
    if (launch.world_size > 1) {
      find_store(reader, dialect, launch);
    }
    return launch;
  }
  return std::nullopt;
}

}  // namespace fsdp::mesh
