#include <algorithm>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/GradMode.h>
#include <fsdp/checkpoint.h>
#include <fsdp/dtensor.h>

#include "checkpoint/collect.h"
#include "checkpoint/match.h"
#include "checkpoint/new_state.h"
#include "checkpoint/ranks.h"
#include "tensor/sharded_tensor.h"

namespace fsdp::checkpoint {
namespace {

using Shape = std::vector<int64_t>;

/// Values that are in memory already, as what a checkpoint has.
class Values {
 public:
  void add(const std::string& name, const at::Tensor& value, Shape shape) {
    index_.tensors[name] = {to_dtype(value.scalar_type(), name), std::move(shape), {}};
    values_[name] = value;
  }
  Index& index() { return index_; }
  const at::Tensor& of(const HeldTensor& target) const { return values_.at(target.spec.name); }

 private:
  Index index_;
  std::map<std::string, at::Tensor> values_;
};

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.is_same(b) || (!tensor::is_sharded(a) && !tensor::is_sharded(b) && a.sizes() == b.sizes() &&
                          a.scalar_type() == b.scalar_type() && a.equal(b));
}

bool lies_alike(const HeldTensor& target, const at::Tensor& value) {
  return tensor::is_sharded(target.tensor) && tensor::is_sharded(value) && tensor::dim_of(value) == target.dim &&
         tensor::range_of(value).begin == target.cut.begin && tensor::range_of(value).end == target.cut.end;
}

/// `whole`, or this rank's part of it, into the target.
void write(const HeldTensor& target, const at::Tensor& value) {
  auto part = value;
  if (tensor::is_sharded(target.tensor) && value.sizes() == target.tensor.sizes()) {
    const bool flat = target.dim == tensor::kElements;
    part = flat || value.dim() == 0 ? value.reshape({-1}) : value;
    part = part.narrow(flat ? 0 : target.dim, target.cut.begin, target.cut.size());
  }
  target.local.copy_(part.reshape(target.local.sizes()));
}

/// Collective.
void write_all(const std::vector<HeldTensor>& targets, const Values& values, const Ranks& ranks) {
  // Which of them must be gathered is for all ranks to say.
  std::string alike;
  for (const auto& target : targets) alike += lies_alike(target, values.of(target)) ? '1' : '0';
  const auto everywhere = ranks.gather(alike);
  for (size_t i = 0; i < targets.size(); ++i) {
    const auto& value = values.of(targets[i]);
    if (!tensor::is_sharded(value)) {
      write(targets[i], value);
    } else if (std::all_of(everywhere.begin(), everywhere.end(), [&](const auto& said) { return said[i] == '1'; })) {
      targets[i].local.copy_(tensor::local_of(value));
    } else {
      write(targets[i], dtensor(value).full_tensor());
    }
  }
}

}  // namespace

void load_state_dict(const torch::nn::Module& model, const StateDict& state) {
  const at::NoGradGuard no_grad;
  const Ranks ranks("load_state_dict");
  const auto tensors = collect_model(model);
  Values values;
  ranks.together([&] {
    std::map<std::string, const HeldTensor*> targets;
    for (const auto& target : tensors.held) targets[target.spec.name] = &target;
    for (const auto& item : state) {
      const auto name = kModelPrefix + item.key();
      if (const auto alias = tensors.aliases.find(name); alias != tensors.aliases.end()) {
        const auto* first = state.find(alias->second.substr(std::string_view(kModelPrefix).size()));
        if (first && same(*first, item.value())) {
          values.index().aliases.insert(*alias);
          continue;
        }
      }
      auto shape = item.value().sizes().vec();
      const auto target = targets.find(name);
      const bool local = target != targets.end() && !tensor::is_sharded(item.value()) &&
                         item.value().sizes() == target->second->local.sizes();
      if (local) shape = target->second->spec.shape;
      values.add(name, item.value(), std::move(shape));
    }
    check_match(values.index(), kModelPrefix, specs_of(tensors.held), tensors.aliases, "model");
  });
  write_all(tensors.held, values, ranks);
}

void load_optimizer_state_dict(const torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                               const OptimizerStateDict& state) {
  const at::NoGradGuard no_grad;
  const Ranks ranks("load_optimizer_state_dict");
  Values values;
  NewStates states;
  std::vector<HeldTensor> targets;
  ranks.together([&] {
    const auto tensors = collect_model(model);
    auto& index = values.index();
    index.optimizer.emplace();
    index.optimizer->type = state.type;
    index.optimizer->counters = state.counters;
    for (const auto& group : state.groups) index.optimizer->groups.push_back({group.params, group.options});
    for (const auto& item : state.tensors) {
      values.add(kOptimizerPrefix + item.key(), item.value(), item.value().sizes().vec());
    }
    check_optimizer(optimizer, index, tensors);
    states = prepare_states(optimizer, index, tensors, targets);
  });
  write_all(targets, values, ranks);
  set_optimizer(optimizer, values.index(), std::move(states));
}

}  // namespace fsdp::checkpoint
