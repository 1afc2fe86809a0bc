#include "checkpoint/ranks.h"

#include <algorithm>
#include <cstring>
#include <map>

#include <ATen/Functions.h>
#include <c10/util/StringUtil.h>
#include <fsdp/error.h>

#include "mesh/world.h"
#include "shard/segments.h"

namespace fsdp::checkpoint {
namespace {

// An error on the wire is one letter for its type and the message; "" is none.
constexpr char kInvalid = 'I', kUnsupported = 'N', kOther = 'C';
constexpr size_t kMessagesShown = 3;

std::string error_of(const std::function<void()>& work) {
  try {
    work();
    return "";
  } catch (const InvalidArgument& error) {
    return kInvalid + std::string(error.what());
  } catch (const NotSupported& error) {
    return kUnsupported + std::string(error.what());
  } catch (const c10::Error& error) {
    return kOther + std::string(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return kOther + std::string(error.what());
  }
}

[[noreturn]] void throw_error(char type, const std::string& message) {
  switch (type) {
    case kInvalid:
      throw InvalidArgument(message);
    case kUnsupported:
      throw NotSupported(message);
    default:
      throw CheckpointError(message);
  }
}

}  // namespace

Ranks::Ranks(std::string what) : what_(std::move(what)), world_(mesh::World::current()) {
  if (world_->size() > 1 && world_->engine() == "fake") {
    throw NotSupported(what_ + ": the fake engine moves no bytes, so its ranks cannot agree on a checkpoint");
  }
}

int Ranks::rank() const { return world_->rank(); }
int Ranks::size() const { return world_->size(); }

std::vector<std::string> Ranks::gather(const std::string& mine) const {
  if (size() == 1) {
    return {mine};
  }
  auto& channel = world_->channel();
  const auto my_length = at::full({1}, static_cast<int64_t>(mine.size()), at::kLong);
  const auto lengths = at::empty({size()}, at::kLong);
  channel.all_gather_even(lengths, my_length)->wait();

  const auto* length = lengths.const_data_ptr<int64_t>();
  const shard::Segments segments(size(), std::vector<int64_t>(length, length + size()));
  std::vector<std::string> texts(size());
  if (segments.total() == 0) {
    return texts;
  }
  const auto in = at::empty({static_cast<int64_t>(mine.size())}, at::kByte);
  if (!mine.empty()) {
    std::memcpy(in.mutable_data_ptr(), mine.data(), mine.size());
  }
  const auto out = at::empty({segments.total()}, at::kByte);
  channel.all_gather(out, in, segments)->wait();
  const auto* bytes = static_cast<const char*>(out.const_data_ptr());
  for (int r = 0; r < size(); ++r) {
    texts[r].assign(bytes + segments.begin(r), segments.length(r));
  }
  return texts;
}

void Ranks::broadcast(const at::Tensor& tensor) const {
  if (size() == 1 || tensor.numel() == 0) {
    return;
  }
  world_->channel().broadcast(tensor.view({-1}).view(at::kByte), 0)->wait();
}

void Ranks::together(const std::function<void()>& work) const {
  const auto errors = gather(error_of(work));
  // Ranks with the same message share a line: the first ones to fail come first.
  std::vector<std::string> messages;
  std::map<std::string, std::vector<int>> ranks;
  for (int r = 0; r < size(); ++r) {
    if (errors[r].empty()) {
      continue;
    }
    auto& with_this = ranks[errors[r]];
    if (with_this.empty()) {
      messages.push_back(errors[r]);
    }
    with_this.push_back(r);
  }
  if (messages.empty()) {
    return;
  }
  std::string text = what_ + " failed";
  for (size_t i = 0; i < std::min(messages.size(), kMessagesShown); ++i) {
    const auto& on = ranks[messages[i]];
    text += (i ? "; " : " on ") + std::string(on.size() > 1 ? "ranks " : "rank ") + c10::Join(", ", on) + ": " +
            messages[i].substr(1);
  }
  if (messages.size() > kMessagesShown) {
    text += "; and " + std::to_string(messages.size() - kMessagesShown) + " more";
  }
  throw_error(messages[0][0], text);
}

}  // namespace fsdp::checkpoint
