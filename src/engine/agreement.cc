#include "engine/agreement.h"

#include <algorithm>
#include <cstring>

#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>

namespace fsdp::engine {
namespace {

// The message: the ticket, the ticket's complement, failed, flags. Under a byte-wise maximum the first two stay each
// other's complement exactly if all ranks sent the same.
constexpr size_t kTicket = sizeof(Ticket);
constexpr size_t kFailedAt = 2 * kTicket;
constexpr size_t kFlagsAt = kFailedAt + 1;
constexpr size_t kMessage = 240;
constexpr size_t kDetails = kTicket + kMessage;
static_assert(sizeof(Ticket) == 16, "no padding may reach the wire");

at::Tensor bytes(size_t n) { return at::zeros({static_cast<int64_t>(n)}, at::TensorOptions().dtype(at::kByte)); }

}  // namespace

Agreement::Agreement(std::shared_ptr<comm::Channel> channel, size_t flags)
    : channel_(std::move(channel)), flags_(flags), buffer_(bytes(kFlagsAt + flags)) {}

std::unique_ptr<comm::Pending> Agreement::begin(const Ticket& ticket, bool failed, const std::vector<uint8_t>& flags,
                                                const at::Tensor& buffer) {
  auto* out = buffer.data_ptr<uint8_t>();
  std::memcpy(out, &ticket, kTicket);
  for (size_t i = 0; i < kTicket; ++i) out[kTicket + i] = static_cast<uint8_t>(~out[i]);
  out[kFailedAt] = failed ? 1 : 0;
  std::copy(flags.begin(), flags.end(), out + kFlagsAt);
  return channel_->all_reduce(buffer, comm::ReduceOp::kMax);
}

std::unique_ptr<comm::Pending> Agreement::begin_details(const Ticket& ticket, const std::string& message,
                                                        at::Tensor& all, at::Tensor& mine) {
  mine = bytes(kDetails);
  all = bytes(kDetails * channel_->size());
  auto* out = mine.data_ptr<uint8_t>();
  std::memcpy(out, &ticket, kTicket);
  std::memcpy(out + kTicket, message.data(), std::min(message.size(), kMessage - 1));
  return channel_->all_gather_even(all, mine);
}

Agreement::Outcome Agreement::exchange(const Ticket& ticket, std::vector<uint8_t>& flags) {
  Outcome outcome;
  if (channel_->size() == 1) return outcome;
  at::NoGradGuard no_grad;
  c10::InferenceMode normal(false);
  begin(ticket, false, flags, buffer_)->wait();
  const auto* in = buffer_.const_data_ptr<uint8_t>();
  for (size_t i = 0; i < kTicket; ++i) outcome.equal &= in[i] == static_cast<uint8_t>(~in[kTicket + i]);
  outcome.failed = in[kFailedAt] != 0;
  if (outcome.equal && !outcome.failed) {
    std::copy(in + kFlagsAt, in + kFlagsAt + flags_, flags.begin());
    return outcome;
  }
  at::Tensor all, mine;
  begin_details(ticket, "", all, mine)->wait();
  for (int rank = 0; rank < channel_->size(); ++rank) {
    const auto* at = all.const_data_ptr<uint8_t>() + rank * kDetails;
    Ticket theirs;
    std::memcpy(&theirs, at, kTicket);
    outcome.tickets.push_back(theirs);
    outcome.messages.emplace_back(reinterpret_cast<const char*>(at + kTicket));
  }
  return outcome;
}

void Agreement::post_failure(const std::string& message) {
  if (channel_->size() == 1) return;
  at::NoGradGuard no_grad;
  c10::InferenceMode normal(false);
  const Ticket ticket{Step::kForward};
  Posted posted;
  posted.a = bytes(kFlagsAt + flags_);
  posted.first = begin(ticket, true, {}, posted.a);
  posted.second = begin_details(ticket, message.empty() ? "no message" : message, posted.b, posted.c);
  posted_.push_back(std::move(posted));
}

void Agreement::settle() {
  for (auto& posted : posted_) {
    posted.first->wait();
    posted.second->wait();
  }
  posted_.clear();
}

}  // namespace fsdp::engine
