#pragma once
#include <memory>
#include <string>

#include "comm/channel.h"

/// The engines that this build has, one a file. Each opens a channel among two or more ranks.
namespace fsdp::comm {

/// TCP between processes, on one or more hosts; CPU tensors.
std::shared_ptr<Channel> open_gloo(const Rendezvous& rendezvous);

/// MPI, on one or more hosts, in a job that mpirun started; CPU tensors. Only in builds that found MPI.
std::shared_ptr<Channel> open_mpi(const Rendezvous& rendezvous);

/// Shared memory between processes of one host; CPU tensors. NotSupported where the ranks do not share one.
std::shared_ptr<Channel> open_shm(const Rendezvous& rendezvous);

/// NCCL for tensors of a GPU, one GPU a rank (the current device when the channel is opened); open_nearest() for those
/// of the host. Only in builds with FSDP_NCCL.
std::shared_ptr<Channel> open_nccl(const Rendezvous& rendezvous);

/// The engine of choice, channel by channel: shm where all members share a host, shm inside the hosts and gloo between
/// them where some do (HostsChannel), else gloo.
std::shared_ptr<Channel> open_nearest(const Rendezvous& rendezvous);

#ifdef FSDP_WITH_MPI
/// The same with mpi in gloo's place.
std::shared_ptr<Channel> open_nearest_mpi(const Rendezvous& rendezvous);
/// Starts MPI in this process, which every process of a job must do.
void start_mpi();
#endif

/// open_nearest() with another engine for what leaves a host, and on a host of another name: ranks of one name share
/// it. For the two above, and for tests.
std::shared_ptr<Channel> open_over_hosts(const Rendezvous& rendezvous, const std::string& host,
                                         const std::string& across);

/// Ranks that are threads of this process; CPU tensors. The store tells the members of one channel apart from those
/// of another. Collectives are checked: ranks that call different ones all get CommError with both sides.
std::shared_ptr<Channel> open_inproc(const Rendezvous& rendezvous);

/// No communication at all; needs no store.
std::shared_ptr<Channel> open_fake(const Rendezvous& rendezvous);

}  // namespace fsdp::comm
