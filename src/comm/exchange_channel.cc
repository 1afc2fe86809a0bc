#include "comm/exchange_channel.h"

#include "comm/copy.h"
#include "comm/solo_channel.h"
#include "comm/sum.h"

namespace fsdp::comm {
namespace {

// A collective of more bytes than this goes peer by peer, straight from and to where it belongs; a smaller one is one
// exchange of copies, which takes one trip instead of one a peer.
constexpr int64_t kMuch = 1 << 20;

std::vector<int64_t> bytes_of_each(const shard::Segments& segments, int64_t width) {
  std::vector<int64_t> bytes;
  for (int64_t rank = 0; rank < segments.world(); ++rank) bytes.push_back(segments.length(rank) * width);
  return bytes;
}

}  // namespace

c10::intrusive_ptr<c10d::Work> ExchangeChannel::exchange(at::Tensor out, Lengths out_lengths, at::Tensor in,
                                                         Lengths in_lengths) {
  return backend().alltoall_base(out, in, out_lengths, in_lengths);
}

template <class Out, class In>
BackendChannel::Works ExchangeChannel::exchange_by_peer(Out&& out, In&& in) {
  Works works;
  for (int step = 1; step < size(); ++step) {
    const int next = (rank() + step) % size(), last = (rank() + size() - step) % size();
    const at::Tensor to = out(last), from = in(next);
    Lengths arriving(size(), 0), leaving(size(), 0);
    arriving[last] = to.numel();
    leaving[next] = from.numel();
    works.push_back(exchange(to, std::move(arriving), from, std::move(leaving)));
  }
  return works;
}

std::unique_ptr<Pending> ExchangeChannel::all_gather(const at::Tensor& out, const at::Tensor& mine,
                                                     const shard::Segments& segments) {
  if (segments.total() == 0) {
    return std::make_unique<DonePending>();
  }
  return start("all_gather", {out, mine}, [&]() -> Works {
    // As bytes, so that any dtype travels.
    const auto to = out.view(at::kByte), from = mine.view(at::kByte);
    const auto width = static_cast<int64_t>(out.element_size()), own = from.numel();
    if (size() == 2 || to.numel() > kMuch) {
      copy_elements(out, segments.begin(rank()), mine, 0, mine.numel());
      const auto place = [&](int peer) {
        return to.narrow(0, segments.begin(peer) * width, segments.length(peer) * width);
      };
      return exchange_by_peer(place, [&](int) { return from; });
    }
    const auto copies = staging().take(own * size(), from.options());
    for (int peer = 0; peer < size(); ++peer) copy_elements(copies, peer * own, from, 0, own);
    return {exchange(to, bytes_of_each(segments, width), copies, Lengths(size(), own))};
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
  const auto width = static_cast<int64_t>(in.element_size()), own = segments.length(rank()) * width;
  const auto kept = in.narrow(0, segments.begin(rank()), segments.length(rank()));
  // A part of each rank; this rank's own is not read there.
  const auto arrived = size() == 2 ? out : staging().take(size() * out.numel(), out.options());
  auto issue = [&]() -> Works {
    const auto from = in.view(at::kByte);
    const auto sent = [&](int peer) {
      return from.narrow(0, segments.begin(peer) * width, segments.length(peer) * width);
    };
    const auto to = arrived.view(at::kByte);
    if (size() == 2 || from.numel() > kMuch) {
      return exchange_by_peer([&](int peer) { return size() == 2 ? to : to.narrow(0, peer * own, own); }, sent);
    }
    return {exchange(to, Lengths(size(), own), from, bytes_of_each(segments, width))};
  };
  // In rank order, so that the sum does not depend on which part came first.
  auto add = [out, kept, arrived, own, ranks = size(), here = rank()] {
    if (own == 0) return;
    std::vector<const void*> parts;
    for (int peer = 0; peer < ranks; ++peer) {
      const auto* others = static_cast<const char*>(arrived.const_data_ptr());
      parts.push_back(peer == here ? kept.const_data_ptr() : ranks == 2 ? others : others + peer * own);
    }
    reduce_parts(out.mutable_data_ptr(), parts, out.numel(), out.scalar_type(), ReduceOp::kSum);
  };
  return start("reduce_scatter", {in}, issue, std::move(add));
}

}  // namespace fsdp::comm
