#include "module/same_model.h"

#include <sstream>

#include <fsdp/error.h>

#include "mesh/compare_texts.h"
#include "mesh/mesh_state.h"
#include "mesh/world.h"

namespace fsdp::module {
namespace {

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
  const auto texts =
      mesh::compare_texts(*mesh.state()->flat_channel(mesh::Lane::kGather), text, /*objects=*/!problem.empty());
  fail_alone();
  if (texts.empty()) return;
  for (size_t r = 0; r < texts.size(); ++r) {
    if (!texts[r].empty() && texts[r][0] == '!') {
      throw InvalidArgument("libfsdp: rank " + std::to_string(rank) + ": " + subject + " fails on rank " +
                            std::to_string(mesh.ranks()[r]) + ": " + texts[r].substr(1));
    }
  }
  const auto first = split(texts[0]);
  for (size_t r = 1; r < texts.size(); ++r) {
    const auto other = split(texts[r]);
    size_t i = 0;
    while (i < first.size() && i < other.size() && first[i] == other[i]) ++i;
    if (i == first.size() && i == other.size()) continue;
    throw InvalidArgument("libfsdp: rank " + std::to_string(rank) + ": " + subject + " finds different models: rank " +
                          std::to_string(mesh.ranks()[0]) + " has " + or_nothing(first, i) + " where rank " +
                          std::to_string(mesh.ranks()[r]) + " has " + or_nothing(other, i) +
                          ". Build the same model on every rank (names, shapes, dtypes and options)");
  }
}

}  // namespace fsdp::module
