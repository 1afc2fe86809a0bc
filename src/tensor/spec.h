#pragma once
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <fsdp/device_mesh.h>
#include <fsdp/dtensor.h>

#include "comm/channel.h"
#include "shard/layout.h"

namespace fsdp::tensor {

/// How a sharded tensor lies: its global sizes, and which part of them each rank holds.
///
/// Usually one piece: rows of one dim, or a stretch of the elements (a piece of a line: the parameter of a flat group,
/// whose global sizes are its own and of which a rank holds a 1-D part). A flat spec is the one-dimensional
/// concatenation of pieces, each cut by its own rows: what `view(-1)` of a parameter gives, and `cat` of several (LBFGS
/// works on those).
struct Spec {
  using Piece = shard::FlatLayout::Array;
  std::string name;
  DeviceMesh mesh;
  std::vector<int64_t> sizes;
  std::vector<Piece> pieces;
  int64_t dim = 0;  // that is cut; unless by_elements()
  bool flat = false;
  std::vector<Placement> placements;  // one a mesh axis

  static std::shared_ptr<const Spec> of_parameter(std::string name, const DeviceMesh& mesh, std::vector<int64_t> sizes,
                                                  int64_t dim, const Piece& piece);
  /// The one-dimensional concatenation of `pieces`, `size` elements in all.
  std::shared_ptr<const Spec> flattened(std::vector<int64_t> size, std::vector<Piece> pieces) const;
  /// The same piece in another shape, of which `cut` is the dim that is cut.
  std::shared_ptr<const Spec> shaped(std::vector<int64_t> new_sizes, int64_t cut) const;

  /// What a rank holds is 1-D: elements in their order.
  bool by_elements() const { return flat || pieces[0].line > 0; }
  int64_t shard_axis() const { return mesh.ndim() - 1; }
  shard::RowRange rows(const Piece& piece) const;
  /// This rank's part of a whole, ordinary tensor of these sizes. A view where it can be one.
  at::Tensor part_of(const at::Tensor& whole) const;
  /// Elements that this rank holds, of one piece and of all.
  int64_t local_numel(const Piece& piece) const { return piece.slabs * rows(piece).size() * piece.row_units; }
  int64_t local_numel() const;
  /// Sizes of this rank's part; a 0-dim tensor is held as {1} or {0}.
  std::vector<int64_t> local_sizes() const;
  bool lies_like(const Spec& other) const;
  /// Where ranks reduce scalars of this tensor.
  std::shared_ptr<comm::Channel> channel() const;
  /// `tensor` on the device of that channel: parts may be in host memory.
  at::Tensor for_channel(const at::Tensor& tensor) const;

 private:
  void cut_along(int64_t cut);
};

using SpecPtr = std::shared_ptr<const Spec>;

}  // namespace fsdp::tensor
