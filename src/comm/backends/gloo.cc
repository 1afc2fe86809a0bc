#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/backend_channel.h"
#include "comm/backends/backends.h"

namespace fsdp::comm {

std::shared_ptr<Channel> open_gloo(const Rendezvous& rendezvous) {
  auto options = c10d::ProcessGroupGloo::Options::create(rendezvous.timeout);
  options->devices.push_back(c10d::ProcessGroupGloo::createDefaultDevice());
  return std::make_shared<BackendChannel>("gloo", rendezvous,
                                          c10::make_intrusive<c10d::ProcessGroupGloo>(
                                              rendezvous.store, rendezvous.rank, rendezvous.size, std::move(options)));
}

}  // namespace fsdp::comm
