#include <algorithm>
#include <utility>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "comm/backends/backends.h"
#include "comm/backends/shm/peers.h"
#include "comm/backends/shm/shm_channel.h"
#include "comm/hosts_channel.h"
#include "comm/solo_channel.h"

namespace fsdp::comm {
namespace {

/// A part of `whole`'s ranks, or others that stand for them, with a store of their own.
Rendezvous part_of(const Rendezvous& whole, const std::string& prefix, int rank, int size, const std::string& which) {
  auto part = whole;
  part.store = c10::make_intrusive<c10d::PrefixStore>(prefix, whole.store);
  part.rank = rank;
  part.size = size;
  part.name = whole.name + which;
  return part;
}

/// Null, on every rank, where those of some host cannot share memory after all.
std::shared_ptr<Channel> open_hosts(const Rendezvous& rendezvous, const Hosts& hosts, const std::string& across) {
  const int first = hosts.first[hosts.mine], ranks = hosts.ranks(hosts.mine);
  std::shared_ptr<Channel> within;
  if (ranks == 1) {
    within = std::make_shared<SoloChannel>(rendezvous.name, 0, 1);
  } else {
    const auto here = part_of(rendezvous, c10::str("on/", hosts.mine), rendezvous.rank - first, ranks,
                              c10::str(", ranks ", first, " to ", first + ranks - 1, " on one host"));
    std::string reason;
    if (auto peers = shm::Peers::meet(here, reason))
      within = std::make_shared<shm::ShmChannel>(here, std::move(*peers));
  }
  const auto met = shm::exchange_words(rendezvous, "met", within ? "yes" : "no");
  if (std::count(met.begin(), met.end(), "no") > 0) return nullptr;
  std::shared_ptr<Channel> between;
  if (rendezvous.rank == first) {
    between = open_channel(across, part_of(rendezvous, "between", hosts.mine, hosts.count(), " between hosts"));
  }
  return std::make_shared<HostsChannel>("shm+" + across, rendezvous, hosts, std::move(within), std::move(between));
}

}  // namespace

std::shared_ptr<Channel> open_over_hosts(const Rendezvous& rendezvous, const std::string& host,
                                         const std::string& across) {
  const auto hosts = Hosts::of_words(shm::exchange_words(rendezvous, "host", host), rendezvous.rank);
  std::shared_ptr<Channel> channel;
  if (hosts.count() == 1) {
    std::string reason;
    if (auto peers = shm::Peers::meet(rendezvous, reason)) {
      channel = std::make_shared<shm::ShmChannel>(rendezvous, std::move(*peers));
    }
  } else if (hosts.count() > 1 && hosts.count() < rendezvous.size) {
    channel = open_hosts(rendezvous, hosts, across);
  }
  return channel ? channel : open_channel(across, rendezvous);
}

std::shared_ptr<Channel> open_nearest(const Rendezvous& rendezvous) {
  return open_over_hosts(rendezvous, shm::this_host(), "gloo");
}

#ifdef FSDP_WITH_MPI
std::shared_ptr<Channel> open_nearest_mpi(const Rendezvous& rendezvous) {
  start_mpi();
  return open_over_hosts(rendezvous, shm::this_host(), "mpi");
}
#endif

}  // namespace fsdp::comm
