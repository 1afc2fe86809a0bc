// What a ParamGroup does whose parameters lie in memory that the ranks have in common (docs/design/in-place.md).
#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <fsdp/error.h>

#include "base/memory.h"
#include "engine/context.h"
#include "engine/param_group.h"
#include "engine/plain_tensors.h"

namespace fsdp::engine {
namespace {

bool has_own_class(const std::unique_ptr<ShardedParam>& param) {
  return param->shard().key_set().has(c10::DispatchKey::Python);
}

}  // namespace

void ParamGroup::share_memory() {
  if (common_ || params_.empty()) return;
  if (context_ && context_->phase() != Phase::kIdle) {
    throw InvalidArgument("libfsdp: group '" + name_ +
                          "' is in the middle of a forward or backward; call set_symm_mem_for_comm between steps");
  }
  const char* other = params_[0]->array(1).line > 0 ? "a flat layout"
                      : part_                       ? "a number for reshard_after_forward"
                      : extended_                   ? "parameters with an extension"
                      : std::any_of(params_.begin(), params_.end(), has_own_class) ? "parameters of a class of its own"
                      : custom_gather_ || custom_reduce_                           ? "a custom collective"
                      : offload_                                                   ? "an offload policy"
                      : !device_.is_cpu()                                          ? "parameters on a device"
                                                                                   : nullptr;
  if (other) {
    throw NotSupported("libfsdp: group '" + name_ + "' has " + other +
                       ", beside which its parameters cannot lie in shared memory (set_symm_mem_for_comm)");
  }
  at::NoGradGuard no_grad;
  c10::InferenceMode normal(false);
  PlainTensors plain;
  reshard();
  drop_discarded();
  auto at = side_by_side();
  common_ = comm::CommonMemory::make(*axis_.channel, at.back());
  common_at_ = std::move(at);
  const auto lent = [memory = common_](void* at, at::IntArrayRef sizes, at::ScalarType dtype) {
    return at::from_blob(
        at, sizes, [memory](void*) {}, at::TensorOptions().dtype(dtype));
  };
  for (size_t i = 0; i < targets_.size(); ++i) {
    const auto& target = targets_[i];
    auto& param = *target.param;
    const auto whole = lent(common_->shared() + common_at_[i], target.tensor().sizes(), target.dtype());
    const auto part = param.part_of(whole, rows_here(param));
    if (param.dtype() == target.dtype() && part.is_contiguous()) {
      param.move_shard(lent(part.data_ptr(), param.shard().sizes(), target.dtype()));
    } else {
      copied_there_.emplace_back(part, &param);
    }
  }
  flat_shard_.reset();
  assembled_ = true;
}

void ParamGroup::refuse_in_place(const char* what) const {
  if (!common_) return;
  throw NotSupported("libfsdp: the parameters of group '" + name_ +
                     "' lie in shared memory (set_symm_mem_for_comm): " + what + " has no place beside that");
}

void ParamGroup::publish() {
  if (copied_there_.empty()) return;  // every group, at the begin of every phase
  at::NoGradGuard no_grad;
  PlainTensors plain;
  for (const auto& [part, param] : copied_there_) part.copy_(param->shard().view(part.sizes()));
}

void ParamGroup::open() {
  TORCH_INTERNAL_ASSERT(state_ == GatherState::kSharded && common_);
  for (size_t i = 0; i < targets_.size(); ++i) {
    base::lend_storage(targets_[i].tensor(), common_->own() + common_at_[i], targets_[i].nbytes());
  }
  for (auto& param : params_) param->filled_version_ = param->version();
  opened_ = true;
  state_ = GatherState::kUnsharded;
}

}  // namespace fsdp::engine
