#pragma once
#include <algorithm>
#include <chrono>
#include <functional>

#include <gtest/gtest.h>

#include "nets.h"
#include "support/ranks.h"

/// What tests of the classic wrapper share.
namespace fsdp::testing {

using torch::nn::Linear;
using Options = FullyShardedDataParallelOptions;

template <class M>
FullyShardedDataParallel<M> wrapped(const M& module, const Options& options = {}) {
  return FullyShardedDataParallel<M>(module, options);
}

/// The wrapper in place of fully_shard: one unit, or one a child.
inline Case classic(Case c, Options options = {}) {
  c.wrap = [options](const NetPtr& net, Grouping grouping) -> Handle {
    auto mine = options;
    const auto children = net->children();
    if (grouping == Grouping::kChildren) {
      mine.auto_wrap_policy = [children](const torch::nn::Module& module, int64_t) {
        return std::any_of(children.begin(), children.end(), [&](const auto& child) { return child.get() == &module; });
      };
    }
    return wrapped(net, mine);
  };
  return c;
}

/// Of which neither widths nor elements are multiples of any number of ranks here.
inline Case uneven(int ranks) { return mlp({7, 17, 5}, 2 * ranks); }

inline Options with(ShardingStrategy strategy) {
  Options options;
  options.sharding_strategy = strategy;
  return options;
}

using Wrapper = FullyShardedDataParallel<NetPtr>;

/// Of Case c's model, with its handle's own type.
inline void run_wrapped(int ranks, const Case& c, const Options& options,
                        const std::function<void(Wrapper& model, Net& plain, const at::Tensor& batch)>& body) {
  run_ranks(
      ranks,
      [&](int) {
        const auto plain = build(c);
        auto model = wrapped(build(c), options);
        body(model, *plain, c.batch.to(c.dtype));
      },
      std::chrono::seconds(15));
}

inline Options by_layer(ShardingStrategy strategy = ShardingStrategy::kFullShard) {
  auto options = with(strategy);
  options.auto_wrap_policy = module_wrap_policy<Linear>();
  return options;
}

inline at::Tensor loss_of(const at::Tensor& out) { return out.pow(2).mean(); }
inline at::Tensor samples_here(const at::Tensor& batch) {
  return batch.chunk(world_size(), 0)[static_cast<size_t>(rank())];
}

inline void expect_equal_gradients(Net& net, Net& plain) {
  for (const auto& item : net.named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    const auto full = dtensor(item.value().grad()).full_tensor();
    EXPECT_LT(difference(full, plain.named_parameters()[item.key()].grad()), 1e-9) << item.key();
  }
}

}  // namespace fsdp::testing
