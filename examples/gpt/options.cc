#include "options.h"

#include <string>

#include <CLI/CLI.hpp>

namespace gpt {

Options parse_options(int argc, char** argv) {
  Options o;
  CLI::App app("Trains a byte-level GPT on text, sharded over the ranks that a launcher started.", "gpt");
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);

  app.add_option("--data", o.data, "File or folder of text")->required();
  app.add_option("--out", o.out, "Folder for metrics.csv and the checkpoint");
  app.add_option("--max-data-mb", o.max_data_mb, "Read at most this much text")->check(CLI::PositiveNumber);

  const std::string model = "Model";
  app.add_option("--layers", o.model.layers, "Transformer blocks")->check(CLI::PositiveNumber)->group(model);
  app.add_option("--heads", o.model.heads, "Attention heads; divides the width")
      ->check(CLI::PositiveNumber)
      ->group(model);
  app.add_option("--width", o.model.width, "Width of the residual stream")->check(CLI::PositiveNumber)->group(model);
  app.add_option("--context", o.model.context, "Bytes that a prediction looks back on")
      ->check(CLI::PositiveNumber)
      ->group(model);
  app.add_flag("--tied,!--untied", o.model.tied, "The head shares the token embedding")->group(model);

  const std::string training = "Training";
  app.add_option("--steps", o.steps, "Optimizer steps of the whole run")->check(CLI::PositiveNumber)->group(training);
  app.add_option("--batch", o.batch, "Rows of a step, over all ranks")->check(CLI::PositiveNumber)->group(training);
  app.add_option("--accumulate", o.accumulate, "Micro-batches that a step is cut into")
      ->check(CLI::PositiveNumber)
      ->group(training);
  app.add_option("--lr", o.lr, "Highest learning rate")->check(CLI::PositiveNumber)->group(training);
  app.add_option("--min-lr", o.min_lr, "Last learning rate, of --lr")->check(CLI::Range(0.0, 1.0))->group(training);
  app.add_option("--warmup", o.warmup, "Steps of linear warm-up")->check(CLI::NonNegativeNumber)->group(training);
  app.add_option("--weight-decay", o.weight_decay, "On matrices only")->check(CLI::NonNegativeNumber)->group(training);
  app.add_option("--clip", o.clip, "Highest norm of the gradients")->check(CLI::PositiveNumber)->group(training);
  app.add_option("--seed", o.seed, "Of the initial values, the batches and the sample")->group(training);

  const std::string ranks = "Ranks";
  app.add_flag("--shard", o.shard, "Shard on one rank too (more ranks always do)")->group(ranks);
  app.add_flag("--reshard,!--no-reshard", o.reshard, "Free a block's parameters after its forward")->group(ranks);
  app.add_flag("--bf16", o.bf16, "Compute in bfloat16, reduce in float32; implies --shard")->group(ranks);
  app.add_option("--threads", o.threads, "Threads of a rank")->check(CLI::Range(1, 1024))->group(ranks);
  app.add_option("--engine", o.engine,
                 "Carries the collectives: auto, shm (one host), gloo, mpi or shm+mpi (under mpirun)")
      ->check(CLI::IsMember({"auto", "shm", "gloo", "mpi", "shm+mpi"}))
      ->group(ranks);
  app.add_option("--timeout", o.timeout_s, "Seconds that a rank waits for its peers")
      ->check(CLI::PositiveNumber)
      ->group(ranks);

  const std::string progress = "Progress";
  app.add_option("--eval-every", o.eval_every, "Steps between validations; 0: at the end")
      ->check(CLI::NonNegativeNumber)
      ->group(progress);
  app.add_option("--eval-batches", o.eval_batches, "Batches of a validation")
      ->check(CLI::PositiveNumber)
      ->group(progress);
  app.add_option("--save-every", o.save_every, "Steps between checkpoints; 0: at the end")
      ->check(CLI::NonNegativeNumber)
      ->group(progress);
  app.add_option("--resume", o.resume, "Continue from OUT/checkpoint, or from this one")
      ->expected(0, 1)
      ->default_str("")
      ->group(progress);
  app.add_option("--log-seconds", o.log_seconds, "Between lines of progress")
      ->check(CLI::NonNegativeNumber)
      ->group(progress);

  const std::string sample = "Sample";
  app.add_option("--sample-bytes", o.sample_bytes, "Length of the text written at the end")
      ->check(CLI::NonNegativeNumber)
      ->group(sample);
  app.add_option("--prompt", o.prompt, "What the text begins with")->group(sample);
  app.add_option("--temperature", o.temperature, "0 takes the likeliest byte")
      ->check(CLI::NonNegativeNumber)
      ->group(sample);
  app.add_option("--top-k", o.top_k, "Draw from so many likeliest bytes; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->group(sample);

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    throw CLI::CallForHelp(app.help(), 0);
  }
  if (o.resume && o.resume->empty()) o.resume = o.checkpoint();
  return o;
}

void check_options(const Options& o, int64_t ranks) {
  const auto fail = [](const std::string& what) { throw CLI::ValidationError(what); };
  const auto say = [](int64_t number) { return std::to_string(number); };
  if (o.model.width % o.model.heads != 0) {
    fail("--width " + say(o.model.width) + " is not a multiple of --heads " + say(o.model.heads));
  }
  if (o.batch < o.accumulate * ranks) {
    fail("--batch " + say(o.batch) + " is too small: " + say(o.accumulate) + " micro-batches on " + say(ranks) +
         " ranks need at least " + say(o.accumulate * ranks) + " rows");
  }
}

}  // namespace gpt
