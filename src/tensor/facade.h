#pragma once
#include <memory>

#include <ATen/core/Tensor.h>

#include "engine/sharded_param.h"
#include "tensor/spec.h"

namespace fsdp::tensor {

/// What a sharded tensor stands for. Parameters have `param`; gradients and optimizer states do not.
struct FacadeTag : engine::Tag {
  FacadeTag(SpecPtr s, at::Tensor l, engine::ShardedParam* p = nullptr)
      : Tag(Kind::kSharded), spec(std::move(s)), local(std::move(l)), param(p) {}
  SpecPtr spec;
  at::Tensor local;             // a plain tensor
  engine::ShardedParam* param;  // null also once the model is gone: copies made by Tensor::data() share the tag
};

/// The tag of a tensor with kKey; null for ordinary tensors (and for a view that nobody tagged).
inline engine::Tag* tag_of(const c10::TensorImpl* impl) {
  if (!impl->key_set().has(engine::kKey)) return nullptr;
  return static_cast<engine::Tag*>(const_cast<c10::TensorImpl*>(impl)->get_backend_meta());
}
inline FacadeTag* facade_of(const at::Tensor& tensor) {
  if (!tensor.defined()) return nullptr;
  auto* tag = tag_of(tensor.unsafeGetTensorImpl());
  return tag && tag->kind == engine::Tag::Kind::kSharded ? static_cast<FacadeTag*>(tag) : nullptr;
}

/// A new sharded tensor without bytes of its own.
at::Tensor make_facade(SpecPtr spec, at::Tensor local);
/// Turns an existing tensor, in place and keeping its identity and autograd metadata, into one. Its bytes are let go.
void become_facade(const at::Tensor& tensor, SpecPtr spec, at::Tensor local, engine::ShardedParam* param = nullptr);

/// A sharded tensor's name in messages from now on; its alone, not of others with the same spec.
void rename_facade(const at::Tensor& tensor, const std::string& name);

/// Makes `parameter` stand for `param`, which lives at least as long as it: the C++ slot. Gives `param` its slot.
void become_parameter(const at::Tensor& parameter, SpecPtr spec, std::shared_ptr<engine::ShardedParam> param);

/// While it lives, a sharded parameter is a plain tensor over the memory of `whole` (of its sizes). The parameter keeps
/// its identity and, with shard and leaf, its version counter: a group that is gathered is old after a write to it.
/// `gradient`, where it is defined, is its .grad meanwhile.
class ShownWhole {
 public:
  ShownWhole(const at::Tensor& parameter, const at::Tensor& whole, const at::Tensor& gradient = {});
  /// As end(false).
  ~ShownWhole();
  ShownWhole(const ShownWhole&) = delete;
  ShownWhole& operator=(const ShownWhole&) = delete;
  /// The parameter is sharded again; with `keep`, this rank's part of what it showed is its value, and its gradient's.
  /// InvalidArgument if it has other sizes by now; its value is then what it was.
  void end(bool keep);

 private:
  void show_part();
  at::Tensor parameter_;
  c10::intrusive_ptr<FacadeTag> tag_;  // null once it ended
  at::Tensor gradient_;                // the sharded one, where another is shown
};

}  // namespace fsdp::tensor
