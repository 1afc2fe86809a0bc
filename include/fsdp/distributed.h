#pragma once
#include <chrono>
#include <string>

#include <ATen/core/Tensor.h>
#include <fsdp/export.h>

namespace fsdp {

struct InitOptions {
  /// Which engine carries the collectives: "shm" (shared memory, ranks of one host), "gloo" (TCP, one or more hosts),
  /// "mpi" (in a job that mpirun started; only in builds that found MPI, and with MPI_THREAD_MULTIPLE), "auto" (each
  /// group of ranks takes shm if all of it is on one host; where some ranks share one, they meet in shared memory and
  /// one of them speaks with the other hosts over gloo; else gloo), "shm+mpi" (the same over mpi), "fake" (no-op
  /// collectives of any world size, for measuring host cost). Empty: "auto". Unknown: NotSupported with the list of
  /// engines; shm for ranks that share no host: NotSupported with the reason, on every rank, when the first group is
  /// opened. gloo listens on the interfaces that GLOO_SOCKET_IFNAME lists, else on the one that leads to MASTER_ADDR.
  std::string engine{};
  /// How long a rank waits for its peers, in start-up and in every collective, before it throws TimeoutError.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// Rank and world size; -1 takes them from the launcher's environment (see init_process_group).
  int rank = -1;
  int world_size = -1;
};

/// Joins this process to the group of ranks that was launched together. Collective.
///
/// Reads, in this order, torchrun's environment (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT), Open MPI's
/// (OMPI_COMM_WORLD_RANK, ...), MPICH's and PMI's (PMI_RANK, ...), and Slurm's (SLURM_PROCID, SLURM_NTASKS, ...).
/// Without any of them the world is one rank and nothing is opened. Where the launcher gives no address, MASTER_ADDR
/// and MASTER_PORT are required for more than one host and default to the loopback and a port derived from the job
/// on one host.
///
/// Throws InvalidArgument if it is called twice, or if the environment is incomplete (it names the variable).
FSDP_API void init_process_group(const InitOptions& options = {});

/// Leaves the group. Meshes and models made on it must be gone or unused. No-op without a group.
FSDP_API void destroy_process_group();

FSDP_API bool is_initialized();

/// This process's index in the world, and the world's size; 0 and 1 before init_process_group.
FSDP_API int rank();
FSDP_API int world_size();
/// Index among the ranks of this host, as the launcher says; 0 if it does not.
FSDP_API int local_rank();

/// Returns when every rank has called it. Collective.
FSDP_API void barrier();

/// The mean of `values` over the world's ranks, element by element: a new tensor, equal on every rank. For small
/// things, such as a loss to print. `values`: floating point, of the same size on every rank. Collective; one
/// all-reduce, which the caller waits for. Without a group it is a copy.
FSDP_API at::Tensor all_reduce_mean(const at::Tensor& values);

}  // namespace fsdp
