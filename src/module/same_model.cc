#include "module/same_model.h"

#include <algorithm>
#include <cstring>
#include <sstream>

#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <fsdp/error.h>

#include "mesh/mesh_state.h"
#include "mesh/world.h"

namespace fsdp::module {
namespace {

uint64_t hash_of(const std::string& text) {  // FNV-1a
  uint64_t hash = 1469598103934665603ull;
  for (unsigned char c : text) hash = (hash ^ c) * 1099511628211ull;
  return hash;
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

std::string or_nothing(const std::vector<std::string>& lines, size_t i) {
  return i < lines.size() ? "'" + lines[i] + "'" : "nothing more";
}

}  // namespace

void require_same_on_all_ranks(const DeviceMesh& mesh, const std::string& subject,
                               const std::vector<std::string>& lines, const std::string& problem) {
  const int rank = mesh.state()->world()->rank();
  const auto fail_alone = [&] {
    if (!problem.empty()) throw InvalidArgument("libfsdp: rank " + std::to_string(rank) + ": " + problem);
  };
  if (mesh.size() == 1) return fail_alone();

  std::string text = problem.empty() ? "" : "!" + problem;
  if (problem.empty()) {
    for (const auto& line : lines) text += line + "\n";
  }
  at::NoGradGuard no_grad;
  auto channel = mesh.state()->flat_channel(mesh::Lane::kGather);
  const uint64_t hash = hash_of(text);
  const auto low = static_cast<int64_t>(hash & 0xffffffffu), high = static_cast<int64_t>(hash >> 32);
  const auto size = static_cast<int64_t>(text.size());
  const auto bad = static_cast<int64_t>(!problem.empty());
  // The maximum of a value and of its negative say whether all ranks had the same.
  auto probe = at::tensor({low, -low, high, -high, size, -size, bad}, at::kLong);
  channel->all_reduce(probe, comm::ReduceOp::kMax)->wait();
  const auto* p = probe.const_data_ptr<int64_t>();
  if (p[0] == -p[1] && p[2] == -p[3] && p[4] == -p[5] && p[6] == 0) return;

  const int64_t longest = p[4];
  auto mine = at::zeros({longest + 1}, at::kByte);
  std::memcpy(mine.data_ptr(), text.data(), text.size());
  auto all = at::empty({(longest + 1) * channel->size()}, at::kByte);
  channel->all_gather_even(all, mine)->wait();
  fail_alone();
  const auto of_rank = [&](int r) {
    return std::string(static_cast<const char*>(all.const_data_ptr()) + r * (longest + 1));
  };
  for (int r = 0; r < channel->size(); ++r) {
    const auto theirs = of_rank(r);
    if (!theirs.empty() && theirs[0] == '!') {
      throw InvalidArgument("libfsdp: rank " + std::to_string(rank) + ": " + subject + " fails on rank " +
                            std::to_string(mesh.ranks()[static_cast<size_t>(r)]) + ": " + theirs.substr(1));
    }
  }
  const auto first = split(of_rank(0));
  for (int r = 1; r < channel->size(); ++r) {
    const auto other = split(of_rank(r));
    size_t i = 0;
    while (i < first.size() && i < other.size() && first[i] == other[i]) ++i;
    if (i == first.size() && i == other.size()) continue;
    throw InvalidArgument("libfsdp: rank " + std::to_string(rank) + ": " + subject + " finds different models: rank " +
                          std::to_string(mesh.ranks()[0]) + " has " + or_nothing(first, i) + " where rank " +
                          std::to_string(mesh.ranks()[static_cast<size_t>(r)]) + " has " + or_nothing(other, i) +
                          ". Build the same model on every rank (names, shapes, dtypes and options)");
  }
}

}  // namespace fsdp::module
