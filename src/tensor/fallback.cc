// Every operator that gets a sharded tensor, an unsharded leaf, or an alias of a leaf comes through here.
//
// Notes that this file keeps (docs/design/sharded-tensor.md): which of the two (whole or shard); aliases are tagged;
// below the key for this operator only.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>
#include <fsdp/error.h>
#include <torch/library.h>

#include "engine/context.h"
#include "engine/param_group.h"
#include "tensor/facade.h"
#include "tensor/outside.h"
#include "tensor/stack.h"

namespace fsdp::tensor {
namespace {

using engine::ShardedParam;
using engine::Tag;

const c10::DispatchKeySet kBelow(c10::DispatchKeySet::FULL_AFTER, engine::kKey);

struct Substituted {
  ShardedParam* param;
  at::Tensor facade;  // undefined where the argument was a leaf or an alias
  bool written;
};

bool writes(const c10::FunctionSchema& schema, size_t argument) {
  const auto* alias = schema.arguments()[argument].alias_info();
  return alias && alias->isWrite();
}

[[noreturn]] void refuse_alias(const c10::OperatorHandle& op, const ShardedParam* param) {
  throw NotSupported(
      "libfsdp: " + op.schema().name() + " reads a view of " +
      (param ? "parameter '" + param->name() + "' after its group was resharded or its shard was written"
             : std::string("a parameter whose sharded model is gone")) +
      "; outside forward and backward its bytes are not here. Read it inside the forward, or call unshard() first");
}

// Outside forward and backward nothing gathers: leaves are read as they are, if nobody wrote their shards since.
bool readable_outside(const engine::ParamGroup& group) {
  return group.state() == engine::GatherState::kUnsharded && !group.stale();
}

// What the arguments are, found before any of them is replaced.
struct Seen {
  bool state = false;  // a gradient or an optimizer's state
  bool parameter = false;
  bool leaf = false;
  bool whole = true;   // every parameter stands for the whole here
  bool pinned = true;  // every parameter was unsharded by hand
};

Seen look(const torch::jit::Stack& stack, size_t count) {
  Seen seen;
  visit_tensors(stack, count, [&](const at::Tensor& tensor, size_t) {
    const auto* tag = tag_of(tensor.unsafeGetTensorImpl());
    if (!tag) return;
    if (tag->kind == Tag::Kind::kLeaf) {
      seen.leaf = true;
      return;
    }
    const auto& facade = static_cast<const FacadeTag&>(*tag);
    if (!facade.param) {
      seen.state = true;
      return;
    }
    seen.parameter = true;
    auto& group = facade.param->group();
    seen.whole = seen.whole && group.context().whole_here();
    seen.pinned = seen.pinned && group.place.pinned && readable_outside(group);
  });
  return seen;
}

void run_whole(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  c10::SmallVector<Substituted, 4> substituted;
  const bool mutates = schema.is_mutable();
  map_tensors(stack, count, [&](at::Tensor& tensor, int argument, int) {
    auto* impl = tensor.unsafeGetTensorImpl();
    if (!impl->key_set().has(engine::kKey)) return false;
    auto* tag = tag_of(impl);
    const bool written = mutates && writes(schema, static_cast<size_t>(argument));
    if (!tag) {
      if (impl->numel() > 0 && impl->has_storage() && impl->unsafe_storage().nbytes() == 0) refuse_alias(op, nullptr);
      return false;
    }
    if (tag->kind == Tag::Kind::kLeaf) {
      auto* param = static_cast<engine::LeafTag*>(tag)->param;
      if (!param) {
        if (impl->numel() > 0 && impl->unsafe_storage().nbytes() == 0) refuse_alias(op, nullptr);
        return false;
      }
      auto& group = param->group();
      if (group.context().whole_here()) {
        group.context().touch(*param);
      } else if (!readable_outside(group)) {
        refuse_alias(op, param);
      }
      substituted.push_back({param, {}, written});
      return false;
    }
    auto& facade = static_cast<FacadeTag&>(*tag);
    auto& param = *facade.param;
    auto& context = param.group().context();
    if (context.whole_here()) context.touch(param);
    const at::Tensor& leaf = param.leaf();
    if (leaf.requires_grad() != tensor.requires_grad()) leaf.set_requires_grad(tensor.requires_grad());
    substituted.push_back({&param, tensor, written});
    if (leaf.device().type() != tensor.device().type()) {  // offloaded: the operator runs where the leaf is
      keys = keys.remove_backend(tensor.key_set().highestBackendKey()) |
             c10::DispatchKeySet(leaf.key_set().highestBackendKey());
    }
    tensor = leaf;
    return true;
  });

  // Below the key for this operator alone: views that a composite operator makes inside pass through here and are
  // tagged, so that whatever autograd keeps of them finds its bytes in backward.
  op.redispatchBoxed(keys & kBelow, stack);

  map_tensors(stack, schema.returns().size(), [&](at::Tensor& result, int, int) {
    auto* impl = result.unsafeGetTensorImpl();
    if (!impl->has_storage()) return false;
    const auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
    for (auto& from : substituted) {
      const auto& leaf = from.param->leaf();
      if (impl == leaf.unsafeGetTensorImpl()) {
        if (!from.facade.defined()) return false;
        result = from.facade;
        return true;
      }
      if (storage == leaf.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()) {
        if (impl->get_backend_meta() != from.param->tag().get()) engine::tag_tensor(result, from.param->tag());
        return false;
      }
    }
    return false;
  });
  if (mutates) {
    for (auto& from : substituted) {
      if (from.written && from.param->group().state() == engine::GatherState::kUnsharded) from.param->write_back();
    }
  }
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const Seen seen = look(*stack, count);
  if (seen.parameter && seen.whole) {
    if (seen.state) {
      throw NotSupported("libfsdp: " + op.schema().name() +
                         " inside a forward or backward mixes a parameter with a gradient or an optimizer's state of a "
                         "sharded model: the one is whole there, the other a shard. Take full_tensor() of the latter "
                         "before the forward");
    }
    run_whole(op, keys, stack);
  } else if (seen.parameter && seen.pinned && !seen.state && !op.schema().is_mutable()) {
    run_whole(op, keys, stack);
  } else if (seen.parameter || seen.state) {
    if (seen.leaf) {
      throw NotSupported("libfsdp: " + op.schema().name() +
                         " mixes a sharded tensor with a view of an unsharded parameter; use one of the two");
    }
    run_outside(op, stack);
  } else {
    run_whole(op, keys, stack);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, DeferredInit, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

}  // namespace fsdp::tensor
