#include "comm/exchange_channel.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>

#include "comm/copy.h"
#include "comm/solo_channel.h"

namespace fsdp::comm {
namespace {

std::vector<int64_t> lengths_of(const shard::Segments& segments, int64_t unit) {
  std::vector<int64_t> lengths(segments.world(), 0);
  for (int64_t r = 0; r < segments.active(); ++r) {
    lengths[r] = segments.length(r) * unit;
  }
  return lengths;
}

}  // namespace

BackendChannel::Works ExchangeChannel::exchange(at::Tensor out, Lengths out_lengths, at::Tensor in,
                                                Lengths in_lengths) {
  return {backend().alltoall_base(out, in, out_lengths, in_lengths)};
}

std::unique_ptr<Pending> ExchangeChannel::all_gather(const at::Tensor& out, const at::Tensor& mine,
                                                     const shard::Segments& segments) {
  if (segments.total() == 0) {
    return std::make_unique<DonePending>();
  }
  return start("all_gather", {out, mine}, [&] {
    // As bytes, so that any dtype travels.
    const auto to = out.view(at::kByte), from = mine.view(at::kByte);
    const auto width = out.element_size(), own = from.numel();
    auto arriving = lengths_of(segments, width);
    if (size() == 2) {
      copy_elements(out, segments.begin(rank()), mine, 0, mine.numel());
      const int peer = 1 - rank();
      Lengths leaving(2, 0);
      leaving[peer] = own;
      arriving[rank()] = 0;
      return exchange(to.narrow(0, segments.begin(peer) * width, arriving[peer]), arriving, from, leaving);
    }
    const auto copies = at::empty({own * size()}, from.options());
    for (int64_t r = 0; r < size(); ++r) {
      copy_elements(copies, r * own, from, 0, own);
    }
    return exchange(to, arriving, copies, Lengths(size(), own));
  });
}

std::unique_ptr<Pending> ExchangeChannel::all_gather_even(const at::Tensor& out, const at::Tensor& mine) {
  return ExchangeChannel::all_gather(out, mine, shard::Segments(size(), mine.numel()));
}

std::unique_ptr<Pending> ExchangeChannel::reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                                         const shard::Segments& segments) {
  if (segments.total() == 0) {
    return std::make_unique<DonePending>();
  }
  const auto own = segments.length(rank());
  auto leaving = lengths_of(segments, 1);
  if (size() == 2) {
    const int peer = 1 - rank();
    leaving[rank()] = 0;
    Lengths arriving(2, 0);
    arriving[peer] = own;
    const auto kept = in.narrow(0, segments.begin(rank()), own);
    return start(
        "reduce_scatter", {in},
        [&] { return exchange(out, arriving, in.narrow(0, segments.begin(peer), leaving[peer]), leaving); },
        [out, kept] { out.add_(kept); });
  }
  const auto parts = at::empty({size() * own}, in.options());
  // In rank order, so that the sum does not depend on which part came first.
  auto add = [out, parts, own, ranks = size()] {
    at::Tensor sum = out;
    at::add_out(sum, parts.narrow(0, 0, own), parts.narrow(0, own, own));
    for (int64_t r = 2; r < ranks; ++r) {
      out.add_(parts.narrow(0, r * own, own));
    }
  };
  return start(
      "reduce_scatter", {in}, [&] { return exchange(parts, Lengths(size(), own), in, leaving); }, std::move(add));
}

}  // namespace fsdp::comm
