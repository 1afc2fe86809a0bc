#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/backends/backends.h"
#include "comm/exchange_channel.h"

namespace fsdp::comm {

// Why all-to-all. Medians in ms of 2 ranks on 2 cores that were busy with other work besides (torch 2.13). "own":
// _allgather_base and _reduce_scatter_base as c10d runs them on Gloo; "messages": a send and a receive a pair of ranks.
//                               own           messages      exchange
//   all-gather      4 KB a rank   0.28 - 0.39   3.6 - 3.8     0.22 - 0.30
//   all-gather      256 KB        0.80 - 1.09   -             0.44 - 0.55
//   all-gather      64 MB         391           300           174
//   reduce-scatter  4 KB          0.16 - 2.1    1.8 - 3.9     0.09 - 0.9
//   reduce-scatter  1 MB          3.7 - 5.4     1.8 - 4.0     1.5 - 1.9
//   reduce-scatter  64 MB         467           220           124
// Messages also kept the issuing thread busy, writing to the sockets itself, for half of that time at 64 MB; an
// exchange runs on Gloo's threads.
std::shared_ptr<Channel> open_gloo(const Rendezvous& rendezvous) {
  auto options = c10d::ProcessGroupGloo::Options::create(rendezvous.timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
  auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(rendezvous.store, rendezvous.rank, rendezvous.size,
                                                             std::move(options));
  return std::make_shared<ExchangeChannel>("gloo", rendezvous, std::move(backend));
}

}  // namespace fsdp::comm
