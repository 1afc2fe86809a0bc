#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/backends/backends.h"
#include "comm/pairwise_channel.h"

namespace fsdp::comm {

std::shared_ptr<Channel> open_gloo(const Rendezvous& rendezvous) {
  auto options = c10d::ProcessGroupGloo::Options::create(rendezvous.timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
  auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(rendezvous.store, rendezvous.rank, rendezvous.size,
                                                             std::move(options));
  return std::make_shared<PairwiseChannel>("gloo", rendezvous, std::move(backend));
}

}  // namespace fsdp::comm
