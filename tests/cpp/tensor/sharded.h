#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <fsdp/fsdp.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

namespace fsdp::testing {

/// Parameters and the plain values that they were made of.
struct Sharded {
  std::shared_ptr<torch::nn::Module> module;
  std::vector<at::Tensor> plain, sharded;

  /// Collective, inside run_ranks: parameters "p0", "p1", ... with these sizes, in one group.
  explicit Sharded(const std::vector<std::vector<int64_t>>& sizes, at::ScalarType dtype = at::kDouble);
};

/// The whole of a sharded tensor, or an ordinary one as it is. Collective.
at::Tensor whole(const at::Tensor& tensor);

/// Runs `body` on 1, 2, 3 and 5 ranks.
void on_ranks(const std::function<void(int ranks)>& body);

/// Expects fsdp::NotSupported whose message has all of `words`.
void expect_refused(const std::function<void()>& body, const std::vector<std::string>& words);

}  // namespace fsdp::testing
