#include "trainer.h"

#include <algorithm>
#include <cmath>
#include <iostream>
#include <map>
#include <numbers>
#include <stdexcept>
#include <string>

#include <fsdp/fsdp.h>

namespace gpt {
namespace {

/// Matrices decay; biases and norms do not.
std::vector<torch::optim::OptimizerParamGroup> parameter_groups(const Model& model, const Options& options) {
  std::vector<at::Tensor> matrices, others;
  for (const auto& parameter : model.parameters()) (parameter.dim() >= 2 ? matrices : others).push_back(parameter);
  const auto group = [&](std::vector<at::Tensor> parameters, double decay) {
    auto settings = torch::optim::AdamWOptions(options.lr).betas({0.9, 0.99}).weight_decay(decay);
    return torch::optim::OptimizerParamGroup(std::move(parameters),
                                             std::make_unique<torch::optim::AdamWOptions>(settings));
  };
  return {group(std::move(matrices), options.weight_decay), group(std::move(others), 0)};
}

/// What decides the course of a run besides the model. A resumed run that differs in it takes another course.
std::map<std::string, std::string> run_identity(const Options& options) {
  return {{"seed", std::to_string(options.seed)},
          {"batch", std::to_string(options.batch)},
          {"steps", std::to_string(options.steps)},
          {"lr", std::to_string(options.lr)}};
}

}  // namespace

Trainer::Trainer(const Options& options, Model& model, const Corpus& corpus)
    : options_(options), model_(model), corpus_(corpus), optimizer_(parameter_groups(model, options)) {}

at::Tensor Trainer::loss_of(const Batch& rows) const {
  const auto& [x, y] = rows;
  const auto logits = model_(x);
  const auto sum =
      torch::nn::functional::cross_entropy(logits.flatten(0, 1).to(torch::kFloat), y.flatten(),
                                           torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
  return sum * fsdp::world_size();
}

double Trainer::learning_rate(int64_t step) const {
  if (step < options_.warmup) return options_.lr * static_cast<double>(step) / static_cast<double>(options_.warmup);
  const auto length = std::max<int64_t>(options_.steps - options_.warmup, 1);
  const double done = std::min(static_cast<double>(step - options_.warmup) / static_cast<double>(length), 1.0);
  const double cosine = (1 + std::cos(std::numbers::pi * done)) / 2;
  return options_.lr * (options_.min_lr + (1 - options_.min_lr) * cosine);
}

StepResult Trainer::step(int64_t step, bool stop_requested) {
  StepResult result{.lr = learning_rate(step)};
  for (auto& group : optimizer_.param_groups()) group.options().set_lr(result.lr);

  const double tokens = static_cast<double>(options_.batch * options_.model.context);
  double loss = 0;
  for (int64_t micro = 0; micro < options_.accumulate; ++micro) {
    model_.set_requires_gradient_sync(micro + 1 == options_.accumulate);
    const auto rows = slice(slice({0, options_.batch}, micro, options_.accumulate), fsdp::rank(), fsdp::world_size());
    const auto part = loss_of(corpus_.train_rows(options_.seed, step, rows)) / tokens;
    part.backward();
    loss += part.item<double>();
  }

  // One small all-reduce carries the loss and the wish to stop, so that all ranks stop after the same step.
  const auto means = fsdp::all_reduce_mean(torch::tensor({loss, stop_requested ? 1.0 : 0.0}, torch::kDouble));
  result.loss = means[0].item<double>();
  result.stop = means[1].item<double>() > 0;
  if (!std::isfinite(result.loss)) {
    throw std::runtime_error("the loss is " + std::to_string(result.loss) + " at step " + std::to_string(step) +
                             ": try a smaller --lr (it is " + std::to_string(options_.lr) + ")");
  }

  result.grad_norm = fsdp::clip_grad_norm_(model_.parameters(), options_.clip).item<double>();
  optimizer_.step();
  optimizer_.zero_grad();
  return result;
}

double Trainer::evaluate() {
  torch::NoGradGuard no_grad;
  const int64_t count = options_.eval_batches * options_.batch;
  double sum = 0;
  for (int64_t begin = 0; begin < count; begin += options_.batch) {
    const auto rows = slice({begin, begin + options_.batch}, fsdp::rank(), fsdp::world_size());
    sum += loss_of(corpus_.validation_rows(count, rows)).item<double>();
  }
  const double mean = sum / static_cast<double>(count * options_.model.context);
  return fsdp::all_reduce_mean(torch::tensor({mean}, torch::kDouble)).item<double>();
}

void Trainer::save(int64_t step) {
  fsdp::save(*model_.net(), optimizer_, options_.checkpoint(), {.step = step, .metadata = run_identity(options_)});
}

int64_t Trainer::load(const std::filesystem::path& checkpoint) {
  const auto info = fsdp::load(*model_.net(), optimizer_, checkpoint);
  for (const auto& [name, value] : run_identity(options_)) {
    const auto saved = info.metadata.find(name);
    if (saved != info.metadata.end() && saved->second != value && fsdp::rank() == 0) {
      std::cerr << "gpt: note: the checkpoint's run had --" + name + " " + saved->second + ", this one has " + value +
                       ": it goes on, but does not follow that run\n";
    }
  }
  return info.step;
}

}  // namespace gpt
