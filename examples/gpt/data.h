#pragma once
#include <cstdint>
#include <filesystem>
#include <utility>

#include <torch/torch.h>

namespace gpt {

/// Inputs and the bytes that follow them, both int64 [rows, context].
using Batch = std::pair<at::Tensor, at::Tensor>;

/// Rows [begin, end) of a global batch.
struct Rows {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

/// The part of `rows` that rank `rank` of `ranks` works on: sizes differ by at most one.
Rows slice(Rows rows, int64_t rank, int64_t ranks);

/// Text as bytes, cut into a training and a validation part. Which bytes are in row r of step s is a function of
/// (seed, s, r) alone, so a run is the same on any number of ranks, and the position in the data is just the step.
class Corpus {
 public:
  /// Reads a file, or every text file under a folder in the order of their paths (hidden files, files with a zero
  /// byte, and what package managers and interpreters put there are left out). Stops after `max_bytes`.
  /// std::runtime_error if there is nothing to read or too little for windows of `context` + 1 bytes.
  Corpus(const std::filesystem::path& path, int64_t context, int64_t max_bytes);

  Batch train_rows(uint64_t seed, int64_t step, Rows rows) const;
  /// Rows of the fixed validation set of `count` windows, spread evenly over the validation part.
  Batch validation_rows(int64_t count, Rows rows) const;

  int64_t files() const { return files_; }
  int64_t train_bytes() const { return train_.numel(); }
  int64_t validation_bytes() const { return validation_.numel(); }
  /// A 32-bit hash of all the bytes, to compare between ranks.
  uint32_t fingerprint() const { return fingerprint_; }

 private:
  template <class Offset>
  Batch windows(const at::Tensor& bytes, Rows rows, const Offset& offset) const;

  int64_t context_;
  int64_t files_ = 0;
  uint32_t fingerprint_ = 0;
  at::Tensor train_, validation_;  // uint8, 1-D
};

}  // namespace gpt
