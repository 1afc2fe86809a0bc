#include "comm/common_memory.h"

#include <algorithm>
#include <exception>
#include <string>

#include <unistd.h>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/util/StringUtil.h>
#include <fsdp/error.h>

namespace fsdp::comm {

std::shared_ptr<CommonMemory> CommonMemory::make(Channel& channel, int64_t nbytes) {
  auto memory = std::make_shared<CommonMemory>();
  const auto bytes = static_cast<uint64_t>(std::max<int64_t>(nbytes, 1));
  std::string problem;
  // Whatever goes wrong here is for the others to know too: the last collective says whether it did.
  const auto attempt = [&](auto&& act) {
    if (!problem.empty()) return;
    try {
      act();
    } catch (const std::exception& error) {
      problem = error.what();
    }
  };
  auto owner = at::zeros({2}, at::TensorOptions().dtype(at::kLong));  // process and descriptor
  auto* words = owner.data_ptr<int64_t>();
  if (!channel.one_host()) {
    problem = "its ranks are not known to share one host's memory";
  } else if (channel.rank() == 0) {
    attempt([&] {
      memory->shared_ = Segment::create(bytes);
      words[0] = ::getpid();
      words[1] = memory->shared_.fd();
    });
  }
  channel.broadcast(owner, 0)->wait();
  attempt([&] {
    if (words[0] == 0) return;  // rank 0 says why
    const auto pid = static_cast<int>(words[0]), fd = static_cast<int>(words[1]);
    if (channel.rank() != 0) memory->shared_ = Segment::open(pid, fd, bytes, bytes);
    memory->own_ = Segment::look_at(pid, fd, bytes);
  });
  auto failed = at::zeros({1}, at::TensorOptions().dtype(at::kLong));
  failed.data_ptr<int64_t>()[0] = problem.empty() ? 0 : channel.rank() + 1;
  channel.all_reduce(failed, ReduceOp::kMax)->wait();
  if (const auto rank = failed.data_ptr<int64_t>()[0]; rank > 0) {
    throw NotSupported(c10::str("libfsdp: the ranks of channel '", channel.name(), "' cannot have memory in common: ",
                                problem.empty() ? c10::str("rank ", rank - 1, " of it failed") : problem));
  }
  memory->shared_.seal();
  return memory;
}

}  // namespace fsdp::comm
