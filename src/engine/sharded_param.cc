#include "engine/sharded_param.h"

#include <ATen/ops/empty.h>
#include <fsdp/error.h>
#include <torch/csrc/autograd/variable.h>

#include "base/memory.h"
#include "engine/param_group.h"

namespace fsdp::engine {
namespace {

// TensorImpl has no public way to add a key to an existing impl; a derived class may name the protected member.
struct KeyAccess : c10::TensorImpl {
  static c10::DispatchKeySet c10::TensorImpl::*member() { return &KeyAccess::key_set_; }
};

// Takes a gradient out of AccumulateGrad's hands as it arrives. A node pre-hook and not a tensor hook: a user's
// register_hook on the parameter would replace those.
struct CaptureHook : torch::autograd::FunctionPreHook {
  explicit CaptureHook(c10::intrusive_ptr<LeafTag> t) : tag(std::move(t)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    if (!tag->replaced.empty()) {
      throw InvalidArgument("libfsdp: a gradient of parameter '" + tag->replaced +
                            "' arrives from a forward before its group was given another dtype or device; run backward "
                            "before that, or forward again");
    }
    if (tag->param && gradients[0].defined()) tag->param->group().capture(*tag->param, gradients[0]);
    return {at::Tensor()};
  }
  c10::intrusive_ptr<LeafTag> tag;
};

}  // namespace

void tag_tensor(const at::Tensor& tensor, c10::intrusive_ptr<c10::BackendMeta> meta) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->*KeyAccess::member() = impl->key_set().add(kKey);
  impl->set_backend_meta(std::move(meta));
}

ShardedParam::ShardedParam(ParamGroup* group, std::string name, const at::Tensor& original, Cut cut,
                           const at::TensorOptions& leaf)
    : group_(group), name_(std::move(name)), sizes_(original.sizes().vec()), dtype_(original.scalar_type()), cut_(cut) {
  for (int64_t d = 0; d < original.dim(); ++d) {
    (cut.line > 0 || d == cut.dim ? rows_ : d < cut.dim ? slabs_ : row_numel_) *= original.size(d);
  }
  leaf_ = at::empty(sizes_, leaf);
  tag_ = c10::make_intrusive<LeafTag>(this);
  tag_tensor(leaf_, tag_);
  gathered_ = {leaf_};
  release_gathered();
  if (torch::autograd::isDifferentiableType(dtype_)) {
    // The accumulator exists only while the leaf requires gradients; keep it, a frozen parameter may thaw.
    leaf_.set_requires_grad(true);
    accumulator_ = torch::autograd::impl::grad_accumulator(leaf_);
    accumulator_->add_pre_hook(std::make_unique<CaptureHook>(tag_));
    leaf_.set_requires_grad(original.requires_grad());
  }
}

ShardedParam::~ShardedParam() { tag_->param = nullptr; }

std::vector<int64_t> ShardedParam::part_sizes(int64_t rows) const {
  if (cut_.line > 0 || sizes_.empty()) return {rows};
  auto sizes = sizes_;
  sizes[static_cast<size_t>(cut_.dim)] = rows;
  return sizes;
}

at::Tensor ShardedParam::part_of(const at::Tensor& whole, shard::RowRange rows) const {
  return cut_.line > 0 ? whole.reshape({-1}).narrow(0, rows.begin, rows.size()) : narrow_rows(whole, cut_.dim, rows);
}

void ShardedParam::attach_shard(at::Tensor shard) {
  shard_ = std::move(shard);
  shard_.unsafeGetTensorImpl()->set_version_counter(leaf_.unsafeGetTensorImpl()->version_counter());
}

void ShardedParam::move_shard(const at::Tensor& place) {
  place.copy_(shard_);
  auto* impl = shard_.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(place.storage());
  impl->set_storage_offset(place.storage_offset());
}

void ShardedParam::sync_requires_grad() {
  const bool wanted = slot_->requires_grad();
  if (leaf_.requires_grad() != wanted) leaf_.set_requires_grad(wanted);
}

bool ShardedParam::wants_gradient() const { return accumulator_ && (leaf_.requires_grad() || slot_->requires_grad()); }

void ShardedParam::set_extension(std::shared_ptr<Extension> extension, std::vector<at::Tensor> receives) {
  extension_ = std::move(extension);
  gathered_ = std::move(receives);
  release_gathered();
}

void ShardedParam::allocate_gathered() {
  for (const auto& tensor : gathered_) base::set_storage_size(tensor, tensor.numel() * tensor.element_size());
}

void ShardedParam::release_gathered() {
  if (extension_) extension_->release();
  for (const auto& tensor : gathered_) base::set_storage_size(tensor, 0);
}

}  // namespace fsdp::engine
