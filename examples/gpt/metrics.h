#pragma once
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <optional>

namespace gpt {

/// One row of metrics.csv.
struct Metrics {
  int64_t step = 0;
  double loss = 0;
  std::optional<double> val_loss{};
  double lr = 0;
  double grad_norm = 0;
  double tokens_per_s = 0;  ///< of all ranks
  double rss_mb = 0;        ///< of rank 0
};

/// metrics.csv. A run that resumes after step n keeps the rows up to n and goes on from there.
class MetricsFile {
 public:
  MetricsFile(const std::filesystem::path& path, int64_t resumed_after);

  void write(const Metrics& row);
  /// The loss of the file's first row.
  double first_loss() const { return first_loss_.value_or(0); }

 private:
  std::ofstream out_;
  std::optional<double> first_loss_;
};

/// Measures the speed and prints a line now and then.
class Progress {
 public:
  Progress(int64_t steps, int64_t tokens_per_step, double seconds_between_lines);

  /// Notes the end of a step and fills in the row's speed and memory.
  void tick(Metrics& row);
  /// Prints a line for the first step, the last, those with a validation, and otherwise when it is time for one.
  void print(const Metrics& row);
  /// Since the start of this process's run.
  double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }
  int64_t steps_done() const { return done_; }

 private:
  using Clock = std::chrono::steady_clock;
  int64_t steps_, tokens_per_step_;
  double seconds_between_lines_;
  Clock::time_point start_ = Clock::now(), last_step_ = start_, last_line_ = start_;
  int64_t done_ = 0;
  double step_seconds_ = 0;  // smoothed
};

/// Resident memory of this process.
double rss_mb();

}  // namespace gpt
