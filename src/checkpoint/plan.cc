#include "checkpoint/plan.h"

#include <algorithm>

#include <nlohmann/json.hpp>

#include <fsdp/error.h>

#include "checkpoint/safetensors.h"

namespace fsdp::checkpoint {
namespace {

using Json = nlohmann::json;

void add_rows(IndexTensor& tensor, const LocalTensor& local, int64_t rank) {
  if (local.begin == local.end || tensor.row_bytes() == 0) {
    return;
  }
  const bool known = std::any_of(tensor.pieces.begin(), tensor.pieces.end(), [&](const Piece& piece) {
    return piece.begin == local.begin && piece.end == local.end;
  });
  if (!known) {
    tensor.pieces.push_back({rank, local.begin, local.end, 0});
  }
}

// Every row once.
void check_rows(const std::string& name, IndexTensor& tensor) {
  std::sort(tensor.pieces.begin(), tensor.pieces.end(),
            [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  int64_t covered = 0;
  for (const auto& piece : tensor.pieces) {
    if (piece.begin != covered) {
      throw CheckpointError("'" + name + "': rank " + std::to_string(piece.rank) + " has rows from " +
                            std::to_string(piece.begin) + ", expected from " + std::to_string(covered) +
                            "; is the model sharded over a part of the ranks only?");
    }
    covered = piece.end;
  }
  if (tensor.row_bytes() > 0 && covered != tensor.rows()) {
    throw CheckpointError("'" + name + "': the ranks have " + std::to_string(covered) + " of its " +
                          std::to_string(tensor.rows()) + " rows; is the model sharded over more ranks than save it?");
  }
}

}  // namespace

std::string describe(DType dtype, const std::vector<int64_t>& shape) {
  std::string text(dtype_name(dtype));
  text += "[";
  for (size_t i = 0; i < shape.size(); ++i) {
    text += (i ? ", " : "") + std::to_string(shape[i]);
  }
  return text + "]";
}

std::string encode(const std::vector<LocalTensor>& tensors) {
  Json json = Json::array();
  for (const auto& t : tensors) {
    json.push_back({t.name, static_cast<int>(t.dtype), t.shape, t.begin, t.end});
  }
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::vector<LocalTensor> decode(std::string_view text) {
  std::vector<LocalTensor> tensors;
  for (const auto& t : Json::parse(text)) {
    tensors.push_back({t[0], static_cast<DType>(t[1].get<int>()), t[2], t[3], t[4]});
  }
  return tensors;
}

std::map<std::string, IndexTensor> plan_pieces(const std::vector<std::vector<LocalTensor>>& by_rank) {
  std::map<std::string, IndexTensor> plan;
  std::map<std::string, size_t> ranks_with;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    for (const auto& local : by_rank[rank]) {
      auto [it, added] = plan.try_emplace(local.name, IndexTensor{local.dtype, local.shape, {}});
      const IndexTensor& known = it->second;
      if (known.dtype != local.dtype || known.shape != local.shape) {
        throw CheckpointError("'" + local.name + "' is " + describe(known.dtype, known.shape) +
                              " on an earlier rank, " + describe(local.dtype, local.shape) + " on rank " +
                              std::to_string(rank) + "; every rank must save the same model and optimizer");
      }
      ++ranks_with[local.name];
      add_rows(it->second, local, static_cast<int64_t>(rank));
    }
  }
  for (auto& [name, tensor] : plan) {
    if (!name.starts_with(kOwnPrefix) && ranks_with[name] != by_rank.size()) {
      throw CheckpointError("'" + name + "' exists on " + std::to_string(ranks_with[name]) + " of " +
                            std::to_string(by_rank.size()) +
                            " ranks; every rank must save the same model and optimizer");
    }
    check_rows(name, tensor);
  }
  return plan;
}

std::vector<Read> plan_reads(const IndexTensor& tensor, int64_t begin, int64_t end) {
  std::vector<Read> reads;
  const uint64_t row = tensor.row_bytes();
  for (const auto& piece : tensor.pieces) {
    const int64_t from = std::max(begin, piece.begin);
    const int64_t to = std::min(end, piece.end);
    if (from < to) {
      reads.push_back({piece, from, to, static_cast<uint64_t>(from - piece.begin) * row,
                       static_cast<uint64_t>(from - begin) * row, static_cast<uint64_t>(to - from) * row});
    }
  }
  return reads;
}

}  // namespace fsdp::checkpoint
