#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "checkpoint/dtype.h"

/// index.json: what a checkpoint holds, and which file has which rows of it. Nothing here knows torch.
namespace fsdp::checkpoint {

constexpr int64_t kFormatVersion = 1;
constexpr const char* kIndexFile = "index.json";

/// Rows [begin, end) of a tensor's dim 0, in the file of `rank`, under the tensor's own name. A 0-dim tensor is one
/// row. Never empty.
struct Piece {
  int64_t rank = 0;
  int64_t begin = 0;
  int64_t end = 0;
  uint32_t crc32 = 0;  ///< of the piece's bytes
};

struct IndexTensor {
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;  ///< global
  std::vector<Piece> pieces;   ///< ascending; together every row once

  int64_t rows() const { return shape.empty() ? 1 : shape[0]; }
  /// Bytes of one row; 0 if the tensor has no elements.
  uint64_t row_bytes() const;
};

struct IndexFile {
  uint64_t size = 0;
  uint32_t header_crc32 = 0;
};

using OptionValue = std::variant<bool, double, std::pair<double, double>>;

/// What an optimizer has besides tensors.
struct OptimizerIndex {
  struct Group {
    std::vector<std::string> params;  ///< FQNs
    std::map<std::string, OptionValue> options;
  };
  std::string type;  ///< "AdamW"
  std::vector<Group> groups;
  /// FQN -> "step" -> count; a parameter without state is missing.
  std::map<std::string, std::map<std::string, int64_t>> counters;
};

struct Index {
  int64_t step = 0;
  std::map<std::string, std::string> metadata;
  std::vector<IndexFile> files;  ///< one a rank that saved
  std::map<std::string, IndexTensor> tensors;
  std::map<std::string, std::string> aliases;  ///< second names of tied tensors -> the name that has the data
  std::optional<OptimizerIndex> optimizer;

  int64_t world_size() const { return static_cast<int64_t>(files.size()); }
};

/// "rank-00001-of-00004.safetensors"
std::string rank_file(int64_t rank, int64_t world_size);

/// The text of index.json, with its checksum.
std::string write_index(const Index& index);
/// Puts the checksum in front of an index's body (the text behind it).
std::string seal(std::string_view body);

/// Reads and checks index.json: checksum, version, and that each tensor's pieces are its rows. CheckpointError that
/// names `file`.
Index parse_index(std::string_view text, const std::string& file);

}  // namespace fsdp::checkpoint
