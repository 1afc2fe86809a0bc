#pragma once
#include <memory>
#include <string>
#include <vector>

#include <fsdp/device_mesh.h>
#include <fsdp/dtensor.h>

#include "comm/channel.h"
#include "shard/layout.h"

namespace fsdp::tensor {

/// How a sharded tensor lies: its global sizes, and which part of them each rank holds.
///
/// Usually one piece: rows of dim 0. A flat spec is the one-dimensional concatenation of pieces, each cut by its own
/// rows: what `view(-1)` of a parameter gives, and `cat` of several (LBFGS works on those).
struct Spec {
  struct Piece {
    int64_t rows, row_numel;
    bool operator==(const Piece& o) const { return rows == o.rows && row_numel == o.row_numel; }
  };
  std::string name;
  DeviceMesh mesh;
  std::vector<int64_t> sizes;
  std::vector<Piece> pieces;
  bool flat = false;
  std::vector<Placement> placements;  // one a mesh axis

  static std::shared_ptr<const Spec> of_parameter(std::string name, const DeviceMesh& mesh, std::vector<int64_t> sizes);
  std::shared_ptr<const Spec> with_sizes(std::vector<int64_t> new_sizes, std::vector<Piece> new_pieces,
                                         bool is_flat) const;

  int64_t shard_axis() const { return mesh.ndim() - 1; }
  shard::RowRange rows(const Piece& piece) const;
  /// Elements that this rank holds.
  int64_t local_numel() const;
  /// Sizes of this rank's part; a 0-dim tensor is held as {1} or {0}.
  std::vector<int64_t> local_sizes() const;
  bool lies_like(const Spec& other) const;
  /// Where ranks reduce scalars of this tensor.
  std::shared_ptr<comm::Channel> channel() const;
};

using SpecPtr = std::shared_ptr<const Spec>;

}  // namespace fsdp::tensor
