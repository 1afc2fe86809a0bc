#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include "comm/backends/backends.h"
#include "comm/exchange_channel.h"

namespace fsdp::comm {
namespace {

using Gloo = c10d::ProcessGroupGloo;

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

/// This host's address on the way to `host`, as a number; "" if it is the loopback or there is none. Sends nothing.
std::string address_towards(const std::string& host) {
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_DGRAM;
  if (host.empty() || ::getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return "";
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owned(found, ::freeaddrinfo);
  const int fd = ::socket(found->ai_family, found->ai_socktype | SOCK_CLOEXEC, 0);
  if (fd < 0) return "";
  sockaddr_storage own{};
  socklen_t length = sizeof(own);
  auto* address = reinterpret_cast<sockaddr*>(&own);
  char text[NI_MAXHOST] = {};
  const bool known = ::connect(fd, found->ai_addr, found->ai_addrlen) == 0 &&
                     ::getsockname(fd, address, &length) == 0 &&
                     ::getnameinfo(address, length, text, sizeof(text), nullptr, 0, NI_NUMERICHOST) == 0;
  ::close(fd);
  const std::string name = known ? text : "";
  return name.rfind("127.", 0) == 0 || name == "::1" ? "" : name;
}

/// Where this rank listens for its peers: the interfaces that GLOO_SOCKET_IFNAME lists, as for PyTorch's Gloo; else the
/// one that leads to MASTER_ADDR, since a host's own name is often bound to its loopback; else Gloo's choice.
void add_devices(Gloo::Options& options) {
  std::istringstream interfaces(variable("GLOO_SOCKET_IFNAME"));
  for (std::string name; std::getline(interfaces, name, ',');) {
    if (!name.empty()) options.devices.push_back(Gloo::createDeviceForInterface(name));
  }
  if (!options.devices.empty()) return;
  const auto address = address_towards(variable("MASTER_ADDR"));
  options.devices.push_back(address.empty() ? Gloo::createDefaultDevice() : Gloo::createDeviceForHostname(address));
}

}  // namespace

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
  auto options = Gloo::Options::create(rendezvous.timeout);
  add_devices(*options);
  auto backend = c10::make_intrusive<Gloo>(rendezvous.store, rendezvous.rank, rendezvous.size, std::move(options));
  return std::make_shared<ExchangeChannel>("gloo", rendezvous, std::move(backend));
}

}  // namespace fsdp::comm
