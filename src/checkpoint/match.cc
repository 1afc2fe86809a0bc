#include "checkpoint/match.h"

#include <algorithm>
#include <iterator>
#include <set>

#include <fsdp/error.h>

#include "checkpoint/safetensors.h"

namespace fsdp::checkpoint {
namespace {

constexpr size_t kShown = 5;

std::string first_few(const std::vector<std::string>& items) {
  std::string text;
  for (size_t i = 0; i < std::min(items.size(), kShown); ++i) {
    text += (i ? ", " : "") + items[i];
  }
  return items.size() > kShown ? text + " and " + std::to_string(items.size() - kShown) + " more" : text;
}

std::string quoted(const std::string& name, const std::string& prefix) {
  return "'" + printable(name.substr(prefix.size())) + "'";
}

std::vector<std::string> only_in(const std::set<std::string>& a, const std::set<std::string>& b,
                                 const std::string& prefix) {
  std::vector<std::string> names;
  for (const auto& name : a) {
    if (!b.count(name)) {
      names.push_back(quoted(name, prefix));
    }
  }
  return names;
}

std::set<std::string> names_in(const Index& index, const std::string& prefix) {
  std::set<std::string> names;
  for (const auto& [name, tensor] : index.tensors) {
    if (name.starts_with(prefix)) {
      names.insert(name);
    }
  }
  for (const auto& [alias, name] : index.aliases) {
    if (alias.starts_with(prefix)) {
      names.insert(alias);
    }
  }
  return names;
}

}  // namespace

const std::string& stored_name(const Index& index, const std::string& name) {
  const auto alias = index.aliases.find(name);
  return alias == index.aliases.end() ? name : alias->second;
}

const IndexTensor* find_tensor(const Index& index, const std::string& name) {
  const auto it = index.tensors.find(stored_name(index, name));
  return it == index.tensors.end() ? nullptr : &it->second;
}

void check_match(const Index& index, const std::string& prefix, const std::vector<LocalTensor>& wanted,
                 const std::map<std::string, std::string>& aliases, const std::string& whose) {
  std::set<std::string> here;
  std::vector<std::string> different;
  for (const auto& tensor : wanted) {
    here.insert(tensor.name);
    const IndexTensor* saved = find_tensor(index, tensor.name);
    if (saved && (saved->dtype != tensor.dtype || saved->shape != tensor.shape)) {
      different.push_back(quoted(tensor.name, prefix) + " is " + describe(tensor.dtype, tensor.shape) + " here, " +
                          describe(saved->dtype, saved->shape) + " in it");
    }
  }
  const std::set<std::string> there = names_in(index, prefix);
  for (const auto& [alias, name] : aliases) {
    here.insert(alias);
    if (there.count(alias) && there.count(name) && stored_name(index, alias) != stored_name(index, name)) {
      different.push_back(quoted(alias, prefix) + " and " + quoted(name, prefix) + " are one tensor here, two in it");
    }
  }
  const auto missing = only_in(here, there, prefix);
  const auto extra = only_in(there, here, prefix);
  std::string text;
  const auto add = [&](const std::string& what, const std::vector<std::string>& items) {
    if (!items.empty()) {
      text += (text.empty() ? "" : "; ") + what + first_few(items);
    }
  };
  add("missing from it: ", missing);
  add("only in it: ", extra);
  add("", different);
  if (!text.empty()) {
    throw CheckpointError("the checkpoint is of another " + whose + ": " + text);
  }
}

void check_groups(const OptimizerIndex& saved, const OptimizerIndex& here) {
  if (saved.type != here.type) {
    throw CheckpointError("the checkpoint has the state of " + printable(saved.type) + ", the optimizer is " +
                          here.type);
  }
  if (saved.groups.size() != here.groups.size()) {
    throw CheckpointError("the checkpoint has " + std::to_string(saved.groups.size()) +
                          " parameter groups, the optimizer has " + std::to_string(here.groups.size()));
  }
  for (size_t i = 0; i < saved.groups.size(); ++i) {
    const std::set<std::string> a(saved.groups[i].params.begin(), saved.groups[i].params.end());
    const std::set<std::string> b(here.groups[i].params.begin(), here.groups[i].params.end());
    if (a != b) {
      throw CheckpointError("parameter group " + std::to_string(i) + " differs: only in the checkpoint: " +
                            first_few(only_in(a, b, "")) + "; only in the optimizer: " + first_few(only_in(b, a, "")));
    }
  }
}

}  // namespace fsdp::checkpoint
