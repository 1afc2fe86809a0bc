#pragma once
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>

#include "gpt_model.h"

namespace gpt {

/// Everything that a run is told. Defaults are the command line's.
struct Options {
  std::filesystem::path data;
  std::filesystem::path out = "out/gpt";
  int64_t max_data_mb = 256;

  GPTConfig model;

  int64_t steps = 700;
  int64_t batch = 32;      ///< rows of a step, over all ranks and micro-batches
  int64_t accumulate = 1;  ///< micro-batches a step
  double lr = 2e-3;
  double min_lr = 0.1;  ///< of lr, at the last step
  int64_t warmup = 50;
  double weight_decay = 0.1;
  double clip = 1.0;
  uint64_t seed = 1;

  bool shard = false;  ///< on one rank too
  bool reshard = true;
  bool bf16 = false;
  int threads = 1;
  std::string engine = "auto";
  int64_t timeout_s = 600;

  int64_t eval_every = 250;
  int64_t eval_batches = 4;
  int64_t save_every = 500;
  std::optional<std::filesystem::path> resume;
  double log_seconds = 5;

  int64_t sample_bytes = 400;
  std::string prompt = "def ";
  double temperature = 0.8;
  int64_t top_k = 20;

  std::filesystem::path checkpoint() const { return out / "checkpoint"; }
  std::filesystem::path metrics() const { return out / "metrics.csv"; }
};

/// Reads the command line. Throws CLI::ParseError, whose message is for the user; CLI::CallForHelp carries the help.
Options parse_options(int argc, char** argv);

/// What depends on the number of ranks: throws CLI::ValidationError.
void check_options(const Options& options, int64_t ranks);

}  // namespace gpt
