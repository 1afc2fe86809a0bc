#pragma once
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/autograd/function.h>

#include "engine/extension.h"
#include "engine/slot.h"
#include "shard/layout.h"

namespace fsdp::engine {

class ParamGroup;
class ShardedParam;

/// What a tensor with kKey carries, as its c10::BackendMeta.
struct Tag : c10::BackendMeta {
  enum class Kind { kLeaf, kSharded };
  explicit Tag(Kind k) : kind(k) {}
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>& self) const override {
    return self;  // shared by everything that was copied or viewed from the tensor
  }
  const Kind kind;
};

/// Of a leaf, and of every tensor that aliases its storage: which parameter's bytes it reads. Outlives the parameter
/// where an autograd graph does; `param` is then null.
struct LeafTag : Tag {
  explicit LeafTag(ShardedParam* p) : Tag(Kind::kLeaf), param(p) {}
  ShardedParam* param;
  std::string replaced;  // its name, where another group has the parameter by now
};

/// A view of `rows` of `whole` along `dim`; a 0-dim tensor is one row.
inline at::Tensor narrow_rows(const at::Tensor& whole, int64_t dim, shard::RowRange rows) {
  return (whole.dim() == 0 ? whole.reshape({1}) : whole).narrow(dim, rows.begin, rows.size());
}

/// How a parameter is cut: along `dim`, by its own rows, or (`line` not 0) as a stretch of a line of so many elements,
/// `lead` from its begin; see shard::FlatLayout::Array.
struct Cut {
  int64_t dim = 0;
  int64_t line = 0;
  int64_t lead = 0;
};

/// One parameter of a group: the rows of one dim that this rank owns (or its elements of a line), and the unsharded
/// leaf that forward and backward read.
///
/// The leaf is one tensor for life. Its StorageImpl is emptied and refilled (note: storage stays, bytes go), so that
/// views which autograd saved become valid again when the group is gathered again.
/// Shard and leaf share one version counter: a write to the shard makes a graph that was built on the old values
/// fail as it does in plain torch.
class ShardedParam {
 public:
  /// `original` is the whole parameter; its rows of this rank are copied into `shard` later by the group. `leaf`: dtype
  /// and device of the leaf.
  ShardedParam(ParamGroup* group, std::string name, const at::Tensor& original, Cut cut, const at::TensorOptions& leaf);
  ~ShardedParam();
  ShardedParam(const ShardedParam&) = delete;
  ShardedParam& operator=(const ShardedParam&) = delete;

  const std::string& name() const { return name_; }
  void set_name(std::string name) { name_ = std::move(name); }
  ParamGroup& group() const { return *group_; }
  size_t index() const { return index_; }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  at::ScalarType dtype() const { return dtype_; }
  /// The dim that is cut: 0 where the parameter has no dims, or is cut as a part of a line.
  int64_t dim() const { return cut_.dim; }
  int64_t numel() const { return slabs_ * rows_ * row_numel_; }
  /// The whole with `unit` units an element, as a layout sees it.
  shard::FlatLayout::Array array(int64_t unit) const {
    return {rows_, row_numel_ * unit, slabs_, cut_.line, cut_.lead};
  }
  shard::RowRange rows_of(int64_t world, int64_t rank) const { return array(1).rows_of(world, rank); }
  /// Sizes of a part of so many rows.
  std::vector<int64_t> part_sizes(int64_t rows) const;
  /// The part of a whole tensor of these sizes that has `rows`; a view of it if it is contiguous.
  at::Tensor part_of(const at::Tensor& whole, shard::RowRange rows) const;

  /// Global sizes, gather dtype; tagged. Has bytes only while the group is unsharded, and never with an extension.
  const at::Tensor& leaf() const { return leaf_; }
  /// This rank's rows, in the parameter's own dtype; a view into the group's flat shard, or a tensor of a class that
  /// runs operators itself. 1-D if cut as a part of a line.
  const at::Tensor& shard() const { return shard_; }
  /// What gathers fill: the leaf, or what the extension receives.
  const std::vector<at::Tensor>& gathered() const { return gathered_; }
  Extension* extension() const { return extension_.get(); }
  const c10::intrusive_ptr<LeafTag>& tag() const { return tag_; }
  /// The leaf's AccumulateGrad node; null where the dtype has no gradient.
  const c10::intrusive_ptr<torch::autograd::Node>& accumulator() const { return accumulator_; }

  Slot& slot() const { return *slot_; }
  void set_slot(std::unique_ptr<Slot> slot) { slot_ = std::move(slot); }

  /// Makes the leaf require gradients exactly if the user's parameter does.
  void sync_requires_grad();
  bool wants_gradient() const;

  /// A whole-tensor write to the leaf's rows of this rank, back into the shard (an in-place op in forward).
  void write_back();

 private:
  friend class ParamGroup;
  friend class Context;
  void attach_shard(at::Tensor shard);
  /// The shard lies in `place` from now on, of its sizes, with its values; it stays the same tensor.
  void move_shard(const at::Tensor& place);
  void set_extension(std::shared_ptr<Extension> extension, std::vector<at::Tensor> receives);
  void allocate_gathered();
  void release_gathered();
  uint32_t version() const { return shard_.unsafeGetTensorImpl()->version_counter().current_version(); }

  ParamGroup* group_;
  size_t index_ = 0;  // in its group
  std::string name_;
  std::vector<int64_t> sizes_;
  at::ScalarType dtype_;
  Cut cut_;
  int64_t rows_ = 1, row_numel_ = 1, slabs_ = 1;
  at::Tensor leaf_, shard_;
  std::vector<at::Tensor> gathered_;
  std::shared_ptr<Extension> extension_;
  uint32_t filled_version_ = 0;  // of the shard, when the leaf was last filled from it
  c10::intrusive_ptr<LeafTag> tag_;
  c10::intrusive_ptr<torch::autograd::Node> accumulator_;
  std::unique_ptr<Slot> slot_;

  // Gradient bookkeeping of one backward, owned by the group.
  int arrivals_ = 0;           // deliveries so far
  int expected_arrivals_ = 1;  // as in the last backward that brought any
  bool touched_ = false;       // used by a forward that recorded gradients: only then is one expected
  bool held_ = false;          // the group's reduce input has a gradient for it
  size_t bucket_ = 0, bucket_index_ = 0;
  bool in_bucket_ = false;
};

/// The dispatch key of sharded tensors, leaves and aliases: an out-of-core key above autograd.
constexpr c10::DispatchKey kKey = c10::DispatchKey::DeferredInit;

/// Adds kKey and `meta` to an existing tensor.
void tag_tensor(const at::Tensor& tensor, c10::intrusive_ptr<c10::BackendMeta> meta);

}  // namespace fsdp::engine
