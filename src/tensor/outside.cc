#include "tensor/outside.h"

#include <string_view>
#include <unordered_map>

#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <fsdp/error.h>

#include "engine/context.h"
#include "engine/param_group.h"
#include "tensor/facade.h"
#include "tensor/reduce.h"
#include "tensor/stack.h"

namespace fsdp::tensor {
namespace {

using c10::OperatorHandle;
using torch::jit::Stack;

/// What an operator over shards means for the whole.
enum class Rule {
  kElementwise,  // element by element: on the shards
  kRandom,       // draws: the whole is drawn on every rank alike, each keeps its rows
  kReduce,       // to a scalar, over all ranks
  kNew,          // asks for options only; the result is an ordinary tensor
  kConvert,      // to(...): elementwise, or the tensor itself
  kShape,        // view, reshape, cat, slice, of whole rows or flattened
  kSetData,      // what Module::to and set_data ask first
  kReplace,      // puts other data or sizes into the tensor: refused
  kRefused,
};

const std::unordered_map<std::string_view, Rule>& by_name() {
  static const std::unordered_map<std::string_view, Rule> rules = {
      {"aten::clone", Rule::kElementwise},
      {"aten::contiguous", Rule::kElementwise},
      {"aten::detach", Rule::kElementwise},
      {"aten::detach_", Rule::kElementwise},
      {"aten::alias", Rule::kElementwise},
      {"aten::copy_", Rule::kElementwise},
      {"aten::zero_", Rule::kElementwise},
      {"aten::fill_", Rule::kElementwise},
      {"aten::requires_grad_", Rule::kElementwise},
      {"aten::positive", Rule::kElementwise},
      {"aten::square_", Rule::kElementwise},
      {"aten::subtract_", Rule::kElementwise},
      {"aten::multiply_", Rule::kElementwise},
      {"aten::divide_", Rule::kElementwise},
      {"aten::new_empty", Rule::kNew},
      {"aten::new_zeros", Rule::kNew},
      {"aten::new_ones", Rule::kNew},
      {"aten::new_full", Rule::kNew},
      {"aten::new_empty_strided", Rule::kNew},
      {"aten::to", Rule::kConvert},
      {"aten::_to_copy", Rule::kConvert},
      {"aten::type_as", Rule::kConvert},
      {"aten::view", Rule::kShape},
      {"aten::reshape", Rule::kShape},
      {"aten::flatten", Rule::kShape},
      {"aten::ravel", Rule::kShape},
      {"aten::view_as", Rule::kShape},
      {"aten::reshape_as", Rule::kShape},
      {"aten::cat", Rule::kShape},
      {"aten::slice", Rule::kShape},
      {"aten::narrow", Rule::kShape},
      {"aten::_has_compatible_shallow_copy_type", Rule::kSetData},
      {"aten::set_data", Rule::kReplace},
      {"aten::set_", Rule::kReplace},
      {"aten::resize_", Rule::kReplace},
      {"aten::resize_as_", Rule::kReplace},
  };
  return rules;
}

bool ends_with(std::string_view name, std::string_view end) {
  return name.size() >= end.size() && name.substr(name.size() - end.size()) == end;
}

/// Tagged so, or the in-place form of an operator that is: those are often left untagged.
bool is_pointwise(const OperatorHandle& op) {
  if (op.hasTag(at::Tag::pointwise)) return true;
  auto name = op.operator_name();
  if (!ends_with(name.name, "_")) return false;
  name.name.pop_back();
  const auto out_of_place = c10::Dispatcher::singleton().findSchema(name);
  return out_of_place && out_of_place->hasTag(at::Tag::pointwise);
}

Rule find_rule(const OperatorHandle& op) {
  const std::string_view name = op.schema().name();
  if (reduces_to_scalar(op)) return Rule::kReduce;
  const auto found = by_name().find(name);
  if (found != by_name().end()) return found->second;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    return ends_with(name, "_") || ends_with(name, "_like") ? Rule::kRandom : Rule::kRefused;
  }
  if (ends_with(name, "_like")) return Rule::kElementwise;
  if (is_pointwise(op)) return Rule::kElementwise;
  if (name.rfind("aten::_foreach_", 0) == 0 || name.rfind("aten::_fused_adam", 0) == 0 ||
      name.rfind("aten::_fused_sgd", 0) == 0 || name.rfind("aten::_fused_adagrad", 0) == 0) {
    return name.find("_foreach_norm") != name.npos || name.find("_foreach_max") != name.npos ? Rule::kRefused
                                                                                             : Rule::kElementwise;
  }
  return Rule::kRefused;
}

Rule rule_of(const OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, Rule> cache;
  const auto* schema = &op.schema();
  const auto found = cache.find(schema);
  if (found != cache.end()) return found->second;
  return cache.emplace(schema, find_rule(op)).first->second;
}

/// The first sharded tensor among the arguments: the one that messages name.
const FacadeTag& first_facade(const Stack& stack, size_t count) {
  const FacadeTag* first = nullptr;
  visit_tensors(stack, count, [&](const at::Tensor& tensor, size_t) {
    if (!first) first = facade_of(tensor);
  });
  return *first;
}

std::string describe(const FacadeTag& tag) {
  std::string who = tag.param ? "parameter" : "a gradient or optimizer state of parameter";
  return who + " '" + tag.spec->name + "' (sizes " + c10::str(c10::IntArrayRef(tag.spec->sizes)) + ")";
}

[[noreturn]] void refuse(const OperatorHandle& op, const FacadeTag& tag, const std::string& why) {
  std::string rank;
  if (tag.param) rank = "rank " + std::to_string(tag.param->group().context().rank()) + ": ";
  throw NotSupported("libfsdp: " + rank + op.schema().name() + " on " + describe(tag) +
                     ", which is sharded here: " + why +
                     ". Call the handle that fully_shard returned (model(x)) for a forward, "
                     "fsdp::dtensor(tensor).full_tensor() for its values (to_local() and operator<< for this rank's), "
                     "copy_() of a whole tensor under no_grad to set them, or unshard() first");
}

/// In grad mode an operator on a parameter that requires grad would record a graph over a shard.
void check_grad_mode(const OperatorHandle& op, const Stack& stack, size_t count, Rule rule) {
  if (!at::GradMode::is_enabled() || rule == Rule::kNew || rule == Rule::kSetData || rule == Rule::kReplace) {
    return;
  }
  const std::string_view name = op.schema().name();
  if (name == "aten::detach" || name == "aten::detach_" || name == "aten::requires_grad_" || ends_with(name, "_like")) {
    return;
  }
  visit_tensors(stack, count, [&](const at::Tensor& tensor, size_t) {
    const auto* tag = facade_of(tensor);
    if (tag && tag->param && tensor.requires_grad()) {
      refuse(op, *tag, "outside its model's forward, and with gradients being recorded, it has no value");
    }
  });
}

/// This rank's part of an ordinary tensor that meets a sharded one: rows where it has the sharded dim, itself where it
/// broadcasts over the rows; of elements, those of its broadcast.
at::Tensor part_of(const OperatorHandle& op, const FacadeTag& tag, const at::Tensor& plain) {
  const auto& spec = *tag.spec;
  const auto dims = static_cast<int64_t>(spec.sizes.size());
  if (plain.dim() > dims) refuse(op, tag, "the other operand has more dims, and would need the whole");
  if (spec.by_elements()) {
    if (plain.numel() == 1) return plain.dim() > 1 ? plain.reshape({1}) : plain;
    if (!at::is_expandable_to(plain.sizes(), spec.sizes)) refuse(op, tag, "the other operand's sizes do not fit");
    return spec.part_of(plain.expand(spec.sizes));
  }
  const int64_t dim = spec.dim - (dims - plain.dim());  // of `plain`, in which operands are aligned at their ends
  if (dim < 0 || plain.dim() == 0) return plain;
  const auto size = spec.sizes[static_cast<size_t>(spec.dim)];
  if (plain.size(dim) == 1 && size != 1) return plain;
  if (plain.size(dim) != size) {
    refuse(op, tag, "the other operand's dim " + std::to_string(dim) + " does not fit");
  }
  return engine::narrow_rows(plain, dim, spec.rows(spec.pieces[0]));
}

/// An ordinary tensor that an operator over shards writes (an optimizer's state or an average made before sharding):
/// from now on it is sharded too, so that nobody reads the rows that are no longer kept here.
void adopt(const OperatorHandle& op, const FacadeTag& tag, const at::Tensor& plain) {
  if (plain.sizes() != c10::IntArrayRef(tag.spec->sizes)) {
    refuse(op, tag, "it would be written into an ordinary tensor of other sizes");
  }
  if (plain.is_view() || plain.storage().use_count() > 1) {
    refuse(op, tag, "it would be written into an ordinary tensor that shares its memory with others; clone that first");
  }
  become_facade(plain, tag.spec, tag.spec->part_of(plain.detach()).clone(at::MemoryFormat::Contiguous));
}

void run_elementwise(const OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  // In lists (_foreach_, _fused_) the k-th elements belong together.
  std::unordered_map<int, const FacadeTag*> lead;
  const auto find_lead = [&](at::Tensor& tensor, int, int k) {
    if (const auto* tag = facade_of(tensor)) {
      auto& at = lead[k];
      if (!at) {
        at = tag;
      } else if (!at->spec->lies_like(*tag->spec)) {
        refuse(op, *tag, "it meets " + describe(*at) + ", which lies differently");
      }
    }
    return false;
  };
  map_tensors(stack, count, find_lead);
  const auto lead_of = [&](int k) -> const FacadeTag* {
    const auto found = lead.find(k);
    if (found != lead.end()) return found->second;
    if (k != -1) return nullptr;
    return lead.size() == 1 ? lead.begin()->second : nullptr;
  };

  // What is written becomes sharded first: an ordinary tensor may be an input of the same operator too.
  map_tensors(stack, count, [&](at::Tensor& tensor, int argument, int k) {
    const auto* alias = schema.arguments()[static_cast<size_t>(argument)].alias_info();
    const auto* with = lead_of(k);
    if (!with || !alias || !alias->isWrite() || facade_of(tensor)) return false;
    if (tensor.dim() > 0 || with->spec->sizes.empty()) adopt(op, *with, tensor);
    return false;
  });

  std::vector<std::pair<const c10::TensorImpl*, at::Tensor>> facades;  // local impl -> what the caller passed
  map_tensors(stack, count, [&](at::Tensor& tensor, int argument, int k) {
    if (!facade_of(tensor)) {
      const auto* with = lead_of(k);
      if (!with || tensor.dim() == 0) {
        if (!with || with->spec->sizes.size() > 0 || tensor.numel() != 1) return false;
      }
      auto part = part_of(op, *with, tensor);
      if (part.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl()) return false;
      tensor = std::move(part);
      return true;
    }
    const auto& local = facade_of(tensor)->local;
    facades.emplace_back(local.unsafeGetTensorImpl(), tensor);
    tensor = local;
    return true;
  });

  // Kernels for lists count no version, by which a group finds out that its leaves are old.
  std::vector<at::Tensor> written;
  if (lead.size() > 1 || (lead.size() == 1 && lead.begin()->first >= 0)) {
    map_tensors(stack, count, [&](at::Tensor& tensor, int argument, int) {
      const auto* alias = schema.arguments()[static_cast<size_t>(argument)].alias_info();
      if (alias && alias->isWrite()) written.push_back(tensor);
      return false;
    });
  }

  op.callBoxed(stack);

  for (const auto& tensor : written) tensor.unsafeGetTensorImpl()->bump_version();
  map_tensors(stack, schema.returns().size(), [&](at::Tensor& result, int, int k) {
    for (const auto& [impl, facade] : facades) {
      if (impl == result.unsafeGetTensorImpl()) {
        result = facade;
        return true;
      }
    }
    const auto* with = lead_of(k);
    if (!with) return false;
    if (result.sizes() != c10::IntArrayRef(with->spec->local_sizes())) {
      refuse(op, *with, "the result does not lie like it");
    }
    result = make_facade(with->spec, std::move(result));
    return true;
  });
}

void run_random(const OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  at::Tensor facade = (*stack)[stack->size() - count].toTensor();
  const auto* tag = facade_of(facade);
  if (!tag) refuse(op, first_facade(*stack, count), "random numbers are drawn for a sharded tensor only");
  const auto spec = tag->spec;
  const bool in_place = op.schema().is_mutable();
  auto whole = at::empty(spec->sizes, tag->local.options());
  (*stack)[stack->size() - count] = whole;
  op.callBoxed(stack);
  whole = stack->back().toTensor();
  const auto part = spec->part_of(whole);
  if (in_place) {
    at::NoGradGuard no_grad;
    tag->local.copy_(part);
    stack->back() = facade;
  } else {
    stack->back() = make_facade(spec, part.clone(at::MemoryFormat::Contiguous));
  }
}

void run_new(const OperatorHandle& op, Stack* stack) {
  map_tensors(stack, op.schema().arguments().size(), [](at::Tensor& tensor, int, int) {
    const auto* tag = facade_of(tensor);
    if (tag) tensor = tag->local;
    return tag != nullptr;
  });
  op.callBoxed(stack);
}

void run_convert(const OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const at::Tensor self = (*stack)[stack->size() - count].toTensor();
  const auto* tag = facade_of(self);
  if (!tag) {  // plain.to(sharded): only its options are asked for
    run_new(op, stack);
    return;
  }
  const auto spec = tag->spec;
  const auto local = tag->local;
  const bool recorded = at::GradMode::is_enabled() && tag->param && self.requires_grad();
  {
    at::NoGradGuard no_grad;
    run_new(op, stack);
  }
  auto result = stack->back().toTensor();
  if (result.unsafeGetTensorImpl() == local.unsafeGetTensorImpl()) {
    stack->back() = self;
    return;
  }
  if (recorded) refuse(op, *tag, "convert the module before fully_shard");
  if (result.device() != local.device())
    refuse(op, *tag, "it lies on the mesh's device; move the module before fully_shard");
  stack->back() = make_facade(spec, std::move(result));
}

void run_shape(const OperatorHandle& op, Stack* stack) {
  const std::string_view name = op.schema().name();
  const size_t count = op.schema().arguments().size();
  const size_t base = stack->size() - count;
  const auto done = [&](at::Tensor result) {
    torch::jit::drop(*stack, count);
    stack->emplace_back(std::move(result));
  };
  if (name == "aten::cat") {
    const auto list = (*stack)[base].toTensorVector();
    std::vector<at::Tensor> locals;
    std::vector<Spec::Piece> pieces;
    const auto& first = first_facade(*stack, count);
    for (const auto& tensor : list) {
      const auto* tag = facade_of(tensor);
      if (!tag || !tag->spec->flat || tag->spec->mesh != first.spec->mesh) {
        refuse(op, first, "only flattened sharded tensors of one mesh can be joined");
      }
      locals.push_back(tag->local);
      pieces.insert(pieces.end(), tag->spec->pieces.begin(), tag->spec->pieces.end());
    }
    int64_t total = 0;
    for (const auto& piece : pieces) total += piece.units();
    return done(make_facade(first.spec->flattened({total}, pieces), at::cat(locals)));
  }

  const at::Tensor self = (*stack)[base].toTensor();
  const auto* tag = facade_of(self);
  if (!tag) refuse(op, first_facade(*stack, count), "an ordinary tensor cannot be shaped like a sharded one");
  const auto& spec = *tag->spec;

  if (name == "aten::slice" || name == "aten::narrow") {
    const auto dim = (*stack)[base + 1].toInt();
    int64_t begin, end, step = 1;
    if (name == "aten::slice") {
      const auto or_else = [&](size_t i, int64_t fallback) {
        return (*stack)[base + i].isNone() ? fallback : (*stack)[base + i].toInt();
      };
      begin = or_else(2, 0), end = std::min(or_else(3, self.size(0)), self.size(0)), step = or_else(4, 1);
    } else {
      begin = (*stack)[base + 2].toInt(), end = begin + (*stack)[base + 3].toInt();
    }
    if (dim == 0 && step == 1 && begin == 0 && end == self.size(0)) return done(self);
    if (!spec.flat || dim != 0 || step != 1) refuse(op, *tag, "a slice of it would need the whole");
    std::vector<Spec::Piece> pieces;
    int64_t at = 0, local_at = 0, local_begin = -1, local_size = 0;
    bool fits = false;
    for (const auto& piece : spec.pieces) {
      if (at == begin) local_begin = local_at;
      const int64_t numel = spec.local_numel(piece);
      if (local_begin >= 0 && at < end) {
        pieces.push_back(piece);
        local_size += numel;
      }
      at += piece.units();
      local_at += numel;
      fits = fits || (local_begin >= 0 && at == end);
    }
    if (!fits) refuse(op, *tag, "a slice of it must cover whole parameters");
    return done(make_facade(spec.flattened({end - begin}, pieces), tag->local.narrow(0, local_begin, local_size)));
  }

  std::vector<int64_t> sizes;
  if (name == "aten::view_as" || name == "aten::reshape_as") {
    sizes = (*stack)[base + 1].toTensor().sizes().vec();
  } else if (name == "aten::flatten" || name == "aten::ravel") {
    if (name == "aten::flatten" && ((*stack)[base + 1].toInt() != 0 || (*stack)[base + 2].toInt() != -1)) {
      refuse(op, *tag, "it can be flattened whole only");
    }
    sizes = {-1};
  } else if ((*stack)[base + 1].isIntList()) {
    sizes = (*stack)[base + 1].toIntVector();
  } else {
    refuse(op, *tag, "a reinterpretation of its dtype would need the whole");
  }
  int64_t known = 1;
  for (auto size : sizes) known *= size == -1 ? 1 : size;
  for (auto& size : sizes) {
    if (size == -1) size = known == 0 ? 0 : self.numel() / known;
  }
  if (spec.pieces.size() != 1) {
    if (sizes == spec.sizes) return done(self);
    refuse(op, *tag, "several parameters joined can only be sliced apart");
  }
  const auto& piece = spec.pieces[0];
  if (sizes.size() == 1) {
    return done(make_facade(spec.flattened(sizes, spec.pieces), tag->local.reshape({-1})));
  }
  if (piece.line > 0) {  // elements keep their order in every shape
    int64_t numel = 1;
    for (auto size : sizes) numel *= size;
    if (numel != self.numel()) refuse(op, *tag, "it has another number of elements");
    return done(make_facade(spec.shaped(sizes, 0), tag->local));
  }
  // The cut dim of the new shape: as many slabs before it as now, as many rows in it.
  int64_t numel = 1, cut = sizes.empty() && piece.rows == 1 ? 0 : -1;
  for (size_t dim = 0; dim < sizes.size(); numel *= sizes[dim++]) {
    if (cut < 0 && numel == piece.slabs && sizes[dim] == piece.rows) cut = static_cast<int64_t>(dim);
  }
  if (cut < 0 || numel != self.numel()) refuse(op, *tag, "only shapes that keep its rows are possible");
  auto shaped = spec.shaped(sizes, cut);
  done(make_facade(shaped, tag->local.reshape(shaped->local_sizes())));
}

[[noreturn]] void refuse_replacement(const OperatorHandle& op, const Stack& stack) {
  refuse(op, first_facade(stack, op.schema().arguments().size()),
         "its data cannot be replaced (set_data, set_, resize_, Module::to, torch::load). Convert or move the module "
         "before fully_shard, copy values in with copy_() under no_grad, or load with fsdp::load");
}

void run_set_data(const OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const at::Tensor self = (*stack)[stack->size() - count].toTensor();
  const at::Tensor from = (*stack)[stack->size() - count + 1].toTensor();
  const auto* mine = facade_of(self);
  const auto* theirs = facade_of(from);
  if (mine && theirs && mine->local.unsafeGetTensorImpl() == theirs->local.unsafeGetTensorImpl()) {
    torch::jit::drop(*stack, count);
    stack->emplace_back(true);
    return;
  }
  refuse_replacement(op, *stack);
}

}  // namespace

void run_outside(const OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  const Rule rule = rule_of(op);
  if (rule != Rule::kConvert) check_grad_mode(op, *stack, count, rule);
  switch (rule) {
    case Rule::kElementwise:
      return run_elementwise(op, stack);
    case Rule::kRandom:
      return run_random(op, stack);
    case Rule::kReduce:
      return run_reduction(op, stack);
    case Rule::kNew:
      return run_new(op, stack);
    case Rule::kConvert:
      return run_convert(op, stack);
    case Rule::kShape:
      return run_shape(op, stack);
    case Rule::kSetData:
      return run_set_data(op, stack);
    case Rule::kReplace:
      refuse_replacement(op, *stack);
    case Rule::kRefused:
      break;
  }
  refuse(op, first_facade(*stack, count), "this operator would see this rank's part only");
}

}  // namespace fsdp::tensor
