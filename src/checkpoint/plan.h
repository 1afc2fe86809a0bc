#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/index.h"

/// Who writes which rows, and where to read them. Pure arithmetic over names, shapes and rows.
namespace fsdp::checkpoint {

/// A tensor as one rank has it: rows [begin, end) of its global dim 0.
struct LocalTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;  ///< global
  int64_t begin = 0;
  int64_t end = 0;
};

/// Names with this prefix exist on one rank alone; all others must be alike on every rank.
constexpr std::string_view kOwnPrefix = "rng.";

/// "F32[4, 2]"
std::string describe(DType dtype, const std::vector<int64_t>& shape);

/// As text, for the wire.
std::string encode(const std::vector<LocalTensor>& tensors);
std::vector<LocalTensor> decode(std::string_view text);

/// The tensors of all ranks with the piece that each rank writes; rows that several ranks have (replicas, plain
/// tensors) are written by the first of them. Checksums are still 0.
/// CheckpointError if ranks have different tensors, or if rows are missing or cut differently.
std::map<std::string, IndexTensor> plan_pieces(const std::vector<std::vector<LocalTensor>>& by_rank);

/// A run of rows to be read from one file.
struct Read {
  Piece piece;        ///< where they are
  int64_t begin = 0;  ///< global rows
  int64_t end = 0;
  uint64_t from = 0;  ///< offset in the piece's bytes
  uint64_t to = 0;    ///< offset in the destination, which begins at the wanted rows' first
  uint64_t bytes = 0;
};

/// What to read for rows [begin, end) of `tensor`.
std::vector<Read> plan_reads(const IndexTensor& tensor, int64_t begin, int64_t end);

}  // namespace fsdp::checkpoint
