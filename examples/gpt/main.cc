/// Trains a GPT on text. Start it alone for a plain model on one process, or by a launcher (launch.py, torchrun,
/// mpirun, srun) for one that is sharded over the ranks. See docs/train.md.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <optional>
#include <string>

#include <fsdp/fsdp.h>
#include <CLI/Error.hpp>

#include "data.h"
#include "metrics.h"
#include "options.h"
#include "sample.h"
#include "sharding.h"
#include "trainer.h"

namespace gpt {
namespace {

volatile std::sig_atomic_t stop_signal = 0;

void handle_signals() {
  struct sigaction action {};
  action.sa_handler = [](int signal) { stop_signal = signal; };
  sigaction(SIGINT, &action, nullptr);
  sigaction(SIGTERM, &action, nullptr);
}

/// Ranks that read different text would train on batches that do not belong together.
void compare_between_ranks(const Corpus& corpus) {
  const double mine = corpus.fingerprint();
  const double mean = fsdp::all_reduce_mean(torch::tensor({mine}, torch::kDouble)).item<double>();
  if (mean != mine) {
    throw fsdp::InvalidArgument("rank " + std::to_string(fsdp::rank()) +
                                " read other text than its peers: --data must be the same on every host");
  }
}

void print_setup(const Options& options, const Model& model, const Corpus& corpus) {
  int64_t count = 0;
  for (const auto& parameter : model.parameters()) count += parameter.numel();
  std::printf("data: %lld files, %.1f MB to train on, %.1f MB to validate on (%s)\n",
              static_cast<long long>(corpus.files()), static_cast<double>(corpus.train_bytes()) / 1e6,
              static_cast<double>(corpus.validation_bytes()) / 1e6, options.data.c_str());
  std::printf("model: %.2f M parameters, %s on %d rank%s; %lld tokens a step\n", static_cast<double>(count) / 1e6,
              model.sharded() ? "sharded" : "plain", fsdp::world_size(), fsdp::world_size() == 1 ? "" : "s",
              static_cast<long long>(options.batch * options.model.context));
  std::fflush(stdout);
}

void train(const Options& options) {
  const bool first_rank = fsdp::rank() == 0;
  check_options(options, fsdp::world_size());
  torch::set_num_threads(options.threads);
  const Corpus corpus(options.data, options.model.context, options.max_data_mb * 1'000'000);
  compare_between_ranks(corpus);

  torch::manual_seed(options.seed);  // every rank begins with the same values
  const bool sharded = options.shard || options.bf16 || fsdp::world_size() > 1;
  Model model(GPT(options.model), {.enabled = sharded, .reshard_after_forward = options.reshard, .bf16 = options.bf16});
  Trainer trainer(options, model, corpus);
  if (first_rank) print_setup(options, model, corpus);

  std::optional<MetricsFile> metrics;
  int64_t step = options.resume ? trainer.load(*options.resume) : 0;
  if (step >= options.steps) {
    throw CLI::ValidationError("--resume: the checkpoint is at step " + std::to_string(step) + " of --steps " +
                               std::to_string(options.steps) + ": nothing is left to do; give more --steps");
  }
  if (first_rank) {
    std::filesystem::create_directories(options.out);
    metrics.emplace(options.metrics(), step);
    if (options.resume) std::printf("resumed after step %lld\n", static_cast<long long>(step));
  }

  handle_signals();
  Progress progress(options.steps, options.batch * options.model.context, options.log_seconds);
  Metrics row{.step = step};
  const auto due = [&](int64_t every) { return step == options.steps || (every > 0 && step % every == 0); };
  for (bool stop = false; step < options.steps && !stop;) {
    const auto result = trainer.step(++step, stop_signal != 0);
    stop = result.stop;
    row = {.step = step, .loss = result.loss, .lr = result.lr, .grad_norm = result.grad_norm};
    if (due(options.eval_every)) row.val_loss = trainer.evaluate();
    if (due(options.save_every) || stop) trainer.save(step);
    progress.tick(row);
    if (first_rank) {
      metrics->write(row);
      progress.print(row);
    }
    if (stop && first_rank) {
      std::printf("stopped after step %lld; continue with --resume\n", static_cast<long long>(step));
    }
  }

  const bool finished = step == options.steps;
  const auto text = finished && options.sample_bytes > 0 ? sample(model, options) : std::string();
  if (!first_rank) return;
  if (!text.empty()) std::printf("\n--- sample ---\n%s\n--------------\n", printable(text).c_str());
  std::printf("\n%lld steps in %.0f s; checkpoint in %s, metrics in %s\n",
              static_cast<long long>(progress.steps_done()), progress.seconds(), options.checkpoint().c_str(),
              options.metrics().c_str());
  if (row.val_loss) std::printf("validation loss %.3f\n", *row.val_loss);
  std::printf("final loss %.3f (first loss %.3f, %lld steps, %d ranks)\n", row.loss, metrics->first_loss(),
              static_cast<long long>(step), fsdp::world_size());
}

/// Mistakes in the command line are the same on every rank, so one of them reports. Before the ranks know each other,
/// that is the one that the launcher calls 0.
bool reports_usage() {
  if (fsdp::is_initialized()) return fsdp::rank() == 0;
  const char* rank = std::getenv("RANK");
  return rank == nullptr || std::string(rank) == "0";
}

int run(int argc, char** argv) {
  try {
    const auto options = parse_options(argc, argv);
    fsdp::init_process_group({.engine = options.engine, .timeout = std::chrono::seconds(options.timeout_s)});
    train(options);
    fsdp::destroy_process_group();
    return 0;
  } catch (const CLI::CallForHelp& help) {
    if (reports_usage()) std::cout << help.what();
    return 0;
  } catch (const CLI::ParseError& error) {
    if (reports_usage()) std::cerr << "gpt: " << error.what() << "\nRun with --help to see all arguments.\n";
    return 2;
  } catch (const std::exception& error) {
    std::cerr << "gpt: rank " + std::to_string(fsdp::rank()) + ": " + error.what() + "\n";
    return 1;
  }
}

}  // namespace
}  // namespace gpt

int main(int argc, char** argv) { return gpt::run(argc, argv); }
