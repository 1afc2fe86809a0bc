#include "metrics.h"

#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include <unistd.h>

namespace gpt {
namespace fs = std::filesystem;
namespace {

constexpr const char* kHeader = "step,loss,val_loss,lr,grad_norm,tokens_per_s,rss_mb";

/// Complete rows of the file, without its header, up to step `last`.
std::vector<std::string> read_rows(const fs::path& path, int64_t last) {
  std::vector<std::string> rows;
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  if (line != kHeader) return rows;
  // A kill may have cut the last line: a row counts only with its end of line.
  while (std::getline(in, line) && !in.eof() && std::atoll(line.c_str()) <= last) rows.push_back(line);
  return rows;
}

std::string duration(double seconds) {
  const auto s = static_cast<int64_t>(seconds + 0.5);
  char text[32];
  if (s >= 3600) {
    std::snprintf(text, sizeof(text), "%lldh %02lldm", static_cast<long long>(s / 3600),
                  static_cast<long long>(s / 60 % 60));
  } else {
    std::snprintf(text, sizeof(text), "%lldm %02llds", static_cast<long long>(s / 60), static_cast<long long>(s % 60));
  }
  return text;
}

}  // namespace

MetricsFile::MetricsFile(const fs::path& path, int64_t resumed_after) {
  const auto kept = resumed_after > 0 ? read_rows(path, resumed_after) : std::vector<std::string>{};
  out_.open(path, std::ios::trunc);
  if (!out_) throw std::runtime_error("cannot write " + path.string());
  out_ << kHeader << '\n';
  for (const auto& row : kept) out_ << row << '\n';
  out_.flush();
  if (!kept.empty()) first_loss_ = std::atof(kept.front().c_str() + kept.front().find(',') + 1);
}

void MetricsFile::write(const Metrics& row) {
  char text[256], val_loss[32] = "";
  if (row.val_loss) std::snprintf(val_loss, sizeof(val_loss), "%.6f", *row.val_loss);
  std::snprintf(text, sizeof(text), "%lld,%.6f,%s,%.6g,%.5g,%.0f,%.0f\n", static_cast<long long>(row.step), row.loss,
                val_loss, row.lr, row.grad_norm, row.tokens_per_s, row.rss_mb);
  out_ << text << std::flush;
  if (!first_loss_) first_loss_ = row.loss;
}

Progress::Progress(int64_t steps, int64_t tokens_per_step, double seconds_between_lines)
    : steps_(steps), tokens_per_step_(tokens_per_step), seconds_between_lines_(seconds_between_lines) {}

void Progress::tick(Metrics& row) {
  const auto now = Clock::now();
  const double seconds = std::chrono::duration<double>(now - last_step_).count();
  constexpr double kNew = 0.1;
  step_seconds_ = done_ == 0 ? seconds : (1 - kNew) * step_seconds_ + kNew * seconds;
  last_step_ = now;
  ++done_;
  row.tokens_per_s = static_cast<double>(tokens_per_step_) / step_seconds_;
  row.rss_mb = rss_mb();
}

void Progress::print(const Metrics& row) {
  const auto now = Clock::now();
  const double waited = std::chrono::duration<double>(now - last_line_).count();
  if (waited < seconds_between_lines_ && done_ > 1 && row.step < steps_ && !row.val_loss) return;
  last_line_ = now;
  const double left = seconds() / static_cast<double>(done_) * static_cast<double>(steps_ - row.step);
  char validation[32] = "";
  if (row.val_loss) std::snprintf(validation, sizeof(validation), "  validation %.3f", *row.val_loss);
  std::printf("step %5lld/%lld  loss %.3f  %6.0f tokens/s  %.0f MB  %s left%s\n", static_cast<long long>(row.step),
              static_cast<long long>(steps_), row.loss, row.tokens_per_s, row.rss_mb, duration(left).c_str(),
              validation);
  std::fflush(stdout);
}

double rss_mb() {
  long pages = 0;
  if (std::FILE* file = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(file, "%*s %ld", &pages) != 1) pages = 0;
    std::fclose(file);
  }
  return static_cast<double>(pages) * static_cast<double>(sysconf(_SC_PAGESIZE)) / 1e6;
}

}  // namespace gpt
