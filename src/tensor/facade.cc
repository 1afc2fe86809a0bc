#include "tensor/facade.h"

#include <ATen/core/grad_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <fsdp/error.h>
#include <torch/csrc/autograd/variable.h>

#include "engine/param_group.h"
#include "tensor/sharded_tensor.h"

namespace fsdp::tensor {
namespace {

// Global sizes and no storage.
struct FacadeImpl : c10::TensorImpl {
  FacadeImpl(const at::Tensor& local, c10::IntArrayRef sizes)
      : c10::TensorImpl(local.key_set().add(engine::kKey), local.dtype(), local.device()) {
    set_sizes_contiguous(sizes);
  }
};

/// What code gets that asks for the bytes themselves (printing, serialisation, a data pointer).
void explain_missing_bytes(c10::TensorImpl& impl, const std::string& name) {
  impl.release_storage_and_set_meta_custom_data_ptr_error_msg_(
      "libfsdp: the bytes of sharded '" + name +
      "' (a parameter, its gradient or an optimizer's state) were asked for, and no rank has them all. Call "
      "fsdp::dtensor(tensor).to_local() for this rank's values (its operator<< prints them), full_tensor() for the "
      "whole on every rank, fsdp::save() to save a model");
}

c10::intrusive_ptr<FacadeImpl> make_impl(c10::intrusive_ptr<FacadeTag> tag) {
  auto impl = c10::make_intrusive<FacadeImpl>(tag->local, tag->spec->sizes);
  explain_missing_bytes(*impl, tag->spec->name);
  impl->set_backend_meta(std::move(tag));
  return impl;
}

/// Keeps a model's group alive as long as one of its parameters. The autograd metadata goes with the last reference to
/// the tensor; the TensorImpl itself, and its tag, stay while the slot's weak reference does.
struct OwningMeta : torch::autograd::AutogradMeta {
  OwningMeta(torch::autograd::AutogradMeta& old, std::shared_ptr<engine::ShardedParam> p) : param(std::move(p)) {
    name_ = std::move(old.name_);
    grad_ = std::move(old.grad_);
    hooks_ = std::move(old.hooks_);
    cpp_hooks_list_ = std::move(old.cpp_hooks_list_);
    post_acc_grad_hooks_ = std::move(old.post_acc_grad_hooks_);
    requires_grad_ = old.requires_grad_;
    output_nr_ = old.output_nr_;
    grad_dtype_ = old.grad_dtype_;
    allow_grad_dtype_mismatch_ = old.allow_grad_dtype_mismatch_;
  }
  std::shared_ptr<engine::ShardedParam> param;
};

/// The parameter that a C++ module, its optimizer and its user hold.
class FacadeSlot : public engine::Slot {
 public:
  explicit FacadeSlot(const at::Tensor& parameter)
      : impl_(parameter.getIntrusivePtr()), tag_(c10::intrusive_ptr<FacadeTag>::reclaim_copy(facade_of(parameter))) {}
  ~FacadeSlot() override { tag_->param = nullptr; }

  bool requires_grad() const override {
    const auto parameter = lock();
    return parameter.defined() && parameter.requires_grad();
  }

  at::Tensor run_gradient_hooks(at::Tensor gradient) override {
    const auto parameter = lock();
    if (!parameter.defined()) return gradient;
    for (const auto& hook : torch::autograd::impl::hooks(parameter)) gradient = (*hook)({gradient})[0];
    return gradient;
  }

  void accumulate_gradient(const at::Tensor& local) override {
    const auto parameter = lock();
    if (!parameter.defined()) return;
    auto& gradient = parameter.mutable_grad();
    const auto& spec = tag_->spec;  // the parameter may show the whole now
    if (!gradient.defined()) {
      gradient = make_facade(spec, local);
    } else if (auto* held = facade_of(gradient)) {
      held->local.add_(local);
    } else {
      // The user put a plain, whole gradient there: from now on it lies as the parameter does.
      if (gradient.sizes() != c10::IntArrayRef(spec->sizes)) {
        throw InvalidArgument("libfsdp: parameter '" + spec->name + "' has a .grad of other sizes than its own; " +
                              "set it to an undefined tensor before backward");
      }
      gradient = make_facade(spec, spec->part_of(gradient).add(local));
    }
  }

  void run_post_accumulate_hooks() override {
    const auto parameter = lock();
    if (!parameter.defined()) return;
    if (auto& hook = torch::autograd::impl::post_acc_grad_hooks(parameter)) (*hook)(parameter);
  }

 private:
  at::Tensor lock() const {
    auto strong = impl_.lock();
    return strong ? at::Tensor(std::move(strong)) : at::Tensor();
  }
  mutable c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> impl_;
  c10::intrusive_ptr<FacadeTag> tag_;
};

}  // namespace

at::Tensor make_facade(SpecPtr spec, at::Tensor local) {
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim(
      make_impl(c10::make_intrusive<FacadeTag>(std::move(spec), std::move(local))).release()));
}

void become_facade(const at::Tensor& tensor, SpecPtr spec, at::Tensor local, engine::ShardedParam* param) {
  const auto counter = local.unsafeGetTensorImpl()->version_counter();
  tensor.unsafeGetTensorImpl()->shallow_copy_from(
      make_impl(c10::make_intrusive<FacadeTag>(std::move(spec), std::move(local), param)));
  tensor.unsafeGetTensorImpl()->set_version_counter(counter);
}

void become_parameter(const at::Tensor& parameter, SpecPtr spec, std::shared_ptr<engine::ShardedParam> param) {
  parameter.unsafeGetTensorImpl()->set_autograd_meta(
      std::make_unique<OwningMeta>(*torch::autograd::impl::materialize_autograd_meta(parameter), param));
  // gradient_edge(parameter) is the leaf's accumulator: autograd::grad with respect to the parameter finds it.
  if (param->accumulator() && parameter.requires_grad()) {
    torch::autograd::impl::set_grad_accumulator(parameter,
                                                c10::weak_intrusive_ptr<torch::autograd::Node>(param->accumulator()));
  } else if (param->accumulator()) {
    parameter.set_requires_grad(true);
    torch::autograd::impl::set_grad_accumulator(parameter,
                                                c10::weak_intrusive_ptr<torch::autograd::Node>(param->accumulator()));
    parameter.set_requires_grad(false);
  }
  if (parameter.grad().defined() && !facade_of(parameter.grad())) {
    // A gradient from before sharding: this rank keeps its rows.
    at::NoGradGuard no_grad;
    parameter.mutable_grad() = make_facade(spec, spec->part_of(parameter.grad()).clone(at::MemoryFormat::Contiguous));
  }
  become_facade(parameter, std::move(spec), param->shard(), param.get());
  param->set_slot(std::make_unique<FacadeSlot>(parameter));
}

ShownWhole::ShownWhole(const at::Tensor& parameter, const at::Tensor& whole, const at::Tensor& gradient)
    : parameter_(parameter), tag_(c10::intrusive_ptr<FacadeTag>::reclaim_copy(facade_of(parameter))) {
  parameter.unsafeGetTensorImpl()->shallow_copy_from(whole.getIntrusivePtr());
  if (gradient.defined()) gradient_ = std::exchange(parameter.mutable_grad(), gradient);
}

ShownWhole::~ShownWhole() {
  if (tag_) show_part();
}

void ShownWhole::end(bool keep) {
  if (!tag_) return;
  const auto spec = tag_->spec;
  const auto shown = parameter_.detach(), gradient = parameter_.grad(), held = gradient_;
  const auto local = tag_->local;
  show_part();
  if (shown.sizes() != c10::IntArrayRef(spec->sizes)) {
    throw InvalidArgument("libfsdp: parameter '" + spec->name + "' has sizes " + c10::str(shown.sizes()) +
                          " at the end of its being whole, expected " + c10::str(c10::IntArrayRef(spec->sizes)) +
                          ", its own; copy values into it and leave its sizes alone. What it had before stays");
  }
  at::NoGradGuard no_grad;
  const auto part = spec->part_of(shown).to(local.scalar_type());
  if (keep && !part.equal(local)) local.copy_(part);  // a write makes what is gathered old
  if (keep && held.defined() && gradient.defined()) local_of(held).copy_(spec->part_of(gradient));
}

void ShownWhole::show_part() {
  parameter_.unsafeGetTensorImpl()->shallow_copy_from(make_impl(tag_));
  if (gradient_.defined()) parameter_.mutable_grad() = std::exchange(gradient_, {});
  tag_.reset();
}

void rename_facade(const at::Tensor& tensor, const std::string& name) {
  auto& tag = *facade_of(tensor);
  auto spec = std::make_shared<Spec>(*tag.spec);
  spec->name = name;
  tag.spec = std::move(spec);
  explain_missing_bytes(*tensor.unsafeGetTensorImpl(), name);
}

// --- sharded_tensor.h -----------------------------------------------------------------------------------------------

bool is_sharded(const at::Tensor& tensor) { return facade_of(tensor) != nullptr; }

static FacadeTag& require_facade(const at::Tensor& tensor) {
  auto* tag = facade_of(tensor);
  if (!tag) throw InvalidArgument("libfsdp: expected a sharded tensor, got an ordinary one");
  return *tag;
}

at::Tensor local_of(const at::Tensor& sharded) { return require_facade(sharded).local; }

int64_t dim_of(const at::Tensor& sharded) {
  const auto& spec = *require_facade(sharded).spec;
  return spec.pieces[0].line > 0 ? kElements : spec.dim;
}

RowRange range_of(const at::Tensor& sharded) {
  const auto& spec = *require_facade(sharded).spec;
  return spec.rows(spec.pieces[0]);
}

RowRange rows_along(const at::Tensor& sharded, int64_t dim) {
  const auto& spec = *require_facade(sharded).spec;
  const int64_t rows = spec.sizes.empty() ? 1 : spec.sizes[static_cast<size_t>(dim)];
  return shard::rows_of_rank(rows, spec.mesh.shape().back(), spec.mesh.coordinate(spec.shard_axis()));
}

at::Tensor sharded_like(const at::Tensor& like, at::Tensor local) {
  const auto& tag = require_facade(like);
  if (local.sizes() != tag.local.sizes()) {
    throw InvalidArgument("libfsdp: sharded_like('" + tag.spec->name + "'): the local part has other sizes");
  }
  return make_facade(tag.spec, std::move(local));
}

}  // namespace fsdp::tensor
