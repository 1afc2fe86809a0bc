#pragma once
#include <map>
#include <optional>
#include <string>

namespace fsdp::mesh {

/// What a launcher told this process.
struct Launch {
  std::string launcher;  // "torchrun", "Open MPI", "PMI", "Slurm"
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  std::string address;  // where rank 0's store is; empty for one rank
  int port = 0;
  bool store_is_hosted = false;  // torchrun's agent serves the store: every rank is a client
};

using Environment = std::map<std::string, std::string>;

/// The process's environment.
Environment current_environment();

/// Reads a launcher's variables; nothing if no launcher left any. InvalidArgument names the variable that is missing
/// or not a number.
std::optional<Launch> read_launch(const Environment& environment);

}  // namespace fsdp::mesh
