#include "module/module_state.h"

namespace fsdp::module {

ModuleState::ModuleState(std::vector<const torch::nn::Module*> modules, FullyShardOptions options,
                         const std::vector<engine::NamedParam>& params, const Face& face)
    : prefetches_backward(face.prefetches_backward),
      casts_inside(face.casts_inside),
      modules_(std::move(modules)),
      options_(std::move(options)),
      group_("(root)", params, options_.mesh,
             {options_.mp_policy.param_dtype, options_.mp_policy.reduce_dtype, face.keeps_reduced}, face.layout) {
  group_.face = this;
}

void ModuleState::set_fqn(std::string fqn) {
  fqn_ = std::move(fqn);
  group_.set_name(fqn_.empty() ? "(root)" : fqn_);
}

}  // namespace fsdp::module
