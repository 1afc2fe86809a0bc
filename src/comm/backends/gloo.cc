#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/backends/backends.h"
#include "comm/exchange_channel.h"

namespace fsdp::comm {

// Why all-to-all. Medians in ms, 2 ranks, one kernel thread a rank, on 2 busy cores (torch 2.13); "own" are Gloo's
// _allgather_base and _reduce_scatter_base as c10d runs them, "messages" one send and one receive a pair of ranks:
//                            own         messages    exchange
//   all-gather      1 MB      1.7 - 3.3   3.8 - 4.3   1.4 - 1.6
//   reduce-scatter  4 KB      0.2 - 0.9   2.1 - 3.9   0.1 - 0.9
//   reduce-scatter  1 MB      3.7 - 5.4   1.8 - 3.5   1.5 - 1.9
// Messages also kept the issuing thread busy for 0.9 - 1.6 ms at 1 MB, writing to the sockets itself; an exchange is
// issued in 0.2 ms and runs on Gloo's threads.
std::shared_ptr<Channel> open_gloo(const Rendezvous& rendezvous) {
  auto options = c10d::ProcessGroupGloo::Options::create(rendezvous.timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
  auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(rendezvous.store, rendezvous.rank, rendezvous.size,
                                                             std::move(options));
  return std::make_shared<ExchangeChannel>("gloo", rendezvous, std::move(backend));
}

}  // namespace fsdp::comm
