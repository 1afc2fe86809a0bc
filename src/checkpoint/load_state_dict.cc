#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <fsdp/checkpoint.h>
#include <fsdp/dtensor.h>
#include <fsdp/error.h>

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
  explicit Values(const LoadStateDictOptions& options) : from_rank0_(options.from_rank0) {}

  void add(const std::string& name, const at::Tensor& value, Shape shape) {
    if (from_rank0_ && tensor::is_sharded(value)) {
      throw InvalidArgument("'" + name +
                            "' is sharded, and rank 0 has but a part of it; from_rank0 is for whole values");
    }
    index_.tensors[name] = {to_dtype(value.scalar_type(), name), std::move(shape), {}};
    values_[name] = value;
  }

  /// Runs `fill`, which adds the values, where they count. Collective with from_rank0.
  void fill(const Ranks& ranks, const std::function<void()>& fill) {
    if (!from_rank0_) return ranks.together(fill);
    ranks.together([&] {
      if (ranks.rank() == 0) fill();
    });
    const auto text = ranks.gather(ranks.rank() == 0 ? as_text() : std::string())[0];
    ranks.together([&] { index_ = parse_index(text, "the state dict of rank 0"); });
  }

  Index& index() { return index_; }
  /// Collective with from_rank0: then a new tensor but on rank 0, plain and in host memory.
  at::Tensor of(const HeldTensor& target, const Ranks& ranks) const {
    const auto& name = target.spec.name;
    if (!from_rank0_) return values_.at(name);
    const auto& described = index_.tensors.at(name);
    const auto value = ranks.rank() == 0 ? values_.at(name).cpu().contiguous()
                                         : at::empty(described.shape, at::dtype(to_scalar_type(described.dtype)));
    ranks.broadcast(value);
    return value;
  }

 private:
  std::string as_text() const {
    auto index = index_;
    index.files.emplace_back();
    for (auto& [name, tensor] : index.tensors) {
      if (tensor.rows() > 0) tensor.pieces.push_back({0, 0, tensor.rows(), 0});
    }
    return write_index(index);
  }

  bool from_rank0_;
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
  for (const auto& target : targets) {
    const auto value = values.of(target, ranks);
    if (!tensor::is_sharded(value)) {
      write(target, value);
      continue;
    }
    // Whether it must be gathered is for all ranks to say.
    const auto alike = ranks.gather(lies_alike(target, value) ? "1" : "0");
    if (std::count(alike.begin(), alike.end(), "1") == ranks.size()) {
      target.local.copy_(tensor::local_of(value));
    } else {
      write(target, dtensor(value).full_tensor());
    }
  }
}

}  // namespace

void load_state_dict(const torch::nn::Module& model, const StateDict& state, const LoadStateDictOptions& options) {
  const at::NoGradGuard no_grad;
  const Ranks ranks("load_state_dict");
  const auto tensors = collect_model(model);
  Values values(options);
  values.fill(ranks, [&] {
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
      const bool local = !options.from_rank0 && target != targets.end() && !tensor::is_sharded(item.value()) &&
                         item.value().sizes() == target->second->local.sizes();
      if (local) shape = target->second->spec.shape;
      values.add(name, item.value(), std::move(shape));
    }
  });
  ranks.together([&] { check_match(values.index(), kModelPrefix, specs_of(tensors.held), tensors.aliases, "model"); });
  write_all(tensors.held, values, ranks);
}

void load_optimizer_state_dict(const torch::nn::Module& model, torch::optim::Optimizer& optimizer,
                               const OptimizerStateDict& state, const LoadStateDictOptions& options) {
  const at::NoGradGuard no_grad;
  const Ranks ranks("load_optimizer_state_dict");
  Values values(options);
  values.fill(ranks, [&] {
    auto& index = values.index();
    index.optimizer.emplace();
    index.optimizer->type = state.type;
    index.optimizer->counters = state.counters;
    for (const auto& group : state.groups) index.optimizer->groups.push_back({group.params, group.options});
    for (const auto& item : state.tensors) {
      values.add(kOptimizerPrefix + item.key(), item.value(), item.value().sizes().vec());
    }
  });
  NewStates states;
  std::vector<HeldTensor> targets;
  ranks.together([&] {
    const auto tensors = collect_model(model);
    check_optimizer(optimizer, values.index(), tensors);
    states = prepare_states(optimizer, values.index(), tensors, targets);
  });
  write_all(targets, values, ranks);
  set_optimizer(optimizer, values.index(), std::move(states));
}

}  // namespace fsdp::checkpoint
