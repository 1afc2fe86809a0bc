#pragma once
#include <cstdint>

#include <torch/torch.h>

#include "data.h"
#include "options.h"
#include "sharding.h"

namespace gpt {

struct StepResult {
  double loss = 0;       ///< mean over the global batch, before the update
  double grad_norm = 0;  ///< before clipping
  double lr = 0;
  bool stop = false;  ///< some rank was asked to stop
};

/// AdamW over a model and a corpus. Every method is collective; results are equal on every rank.
class Trainer {
 public:
  Trainer(const Options& options, Model& model, const Corpus& corpus);

  /// One optimizer step, the `step`-th (from 1). std::runtime_error if the loss is not finite.
  StepResult step(int64_t step, bool stop_requested);
  /// Mean loss over the validation set.
  double evaluate();

  /// Writes the model, the optimizer and `step` to OUT/checkpoint.
  void save(int64_t step);
  /// The step that the checkpoint was saved after.
  int64_t load(const std::filesystem::path& checkpoint);

 private:
  /// This rank's share of the summed loss over `rows`: the mean over ranks is the sum over all of them.
  at::Tensor loss_of(const Batch& rows) const;
  double learning_rate(int64_t step) const;

  const Options& options_;
  Model& model_;
  const Corpus& corpus_;
  torch::optim::AdamW optimizer_;
};

}  // namespace gpt
