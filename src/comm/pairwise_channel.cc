#include "comm/pairwise_channel.h"

#include <limits>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include "comm/copy.h"

namespace fsdp::comm {

int PairwiseChannel::next_tag() {
  tag_ = tag_ == std::numeric_limits<int>::max() ? 0 : tag_ + 1;
  return tag_;
}

c10::intrusive_ptr<c10d::Work> PairwiseChannel::send(const at::Tensor& tensor, int64_t begin, int64_t length,
                                                     int64_t peer, int tag) {
  std::vector<at::Tensor> part{tensor.narrow(0, begin, length)};
  return backend().send(part, static_cast<int>(peer), tag);
}

c10::intrusive_ptr<c10d::Work> PairwiseChannel::receive(const at::Tensor& tensor, int64_t begin, int64_t length,
                                                        int64_t peer, int tag) {
  std::vector<at::Tensor> part{tensor.narrow(0, begin, length)};
  return backend().recv(part, static_cast<int>(peer), tag);
}

std::unique_ptr<Pending> PairwiseChannel::all_gather(const at::Tensor& out, const at::Tensor& mine,
                                                     const shard::Segments& segments) {
  return start("all_gather", {out, mine}, [&] {
    const int64_t self = rank();
    const int tag = next_tag();
    Works works;
    for (int64_t peer = 0; peer < segments.active(); ++peer) {
      if (peer != self && segments.length(peer) > 0) {
        works.push_back(receive(out, segments.begin(peer), segments.length(peer), peer, tag));
      }
    }
    if (mine.numel() > 0) {
      // Each rank starts with its neighbour, so that not all of them send to rank 0 first.
      for (int step = 1; step < size(); ++step) {
        works.push_back(send(mine, 0, mine.numel(), (self + step) % size(), tag));
      }
    }
    copy_elements(out, segments.begin(self), mine, 0, mine.numel());
    return works;
  });
}

std::unique_ptr<Pending> PairwiseChannel::all_gather_even(const at::Tensor& out, const at::Tensor& mine) {
  return PairwiseChannel::all_gather(out, mine, shard::Segments(size(), mine.numel()));
}

std::unique_ptr<Pending> PairwiseChannel::reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                                         const shard::Segments& segments) {
  const int64_t self = rank();
  const auto length = segments.length(self);
  const auto own = in.narrow(0, segments.begin(self), length);
  // parts[r] is rank r's addend. The first peer's arrives in the output itself, so that two ranks need no scratch.
  const int64_t first = self == 0 ? 1 : 0;
  std::vector<at::Tensor> parts;
  if (length > 0) {
    at::Tensor scratch = size() > 2 ? at::empty({size() - 2, length}, in.options()) : at::Tensor();
    int64_t row = 0;
    for (int64_t peer = 0; peer < size(); ++peer) {
      parts.push_back(peer == self ? own : peer == first ? out : scratch[row++]);
    }
  }
  auto issue = [&] {
    const int tag = next_tag();
    Works works;
    for (int64_t peer = 0; length > 0 && peer < size(); ++peer) {
      if (peer != self) {
        works.push_back(receive(parts[peer], 0, length, peer, tag));
      }
    }
    for (int step = 1; step < size(); ++step) {
      const auto peer = (self + step) % size();
      if (segments.length(peer) > 0) {
        works.push_back(send(in, segments.begin(peer), segments.length(peer), peer, tag));
      }
    }
    return works;
  };
  // Added in rank order, so that the sum does not depend on which message came first.
  auto add = [out, parts, first] {
    for (size_t peer = 0; peer < parts.size(); ++peer) {
      if (static_cast<int64_t>(peer) != first) {
        out.add_(parts[peer]);
      }
    }
  };
  return start("reduce_scatter", {out, in}, issue, std::move(add));
}

}  // namespace fsdp::comm
