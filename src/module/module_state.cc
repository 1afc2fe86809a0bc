#include "module/module_state.h"

#include <c10/util/StringUtil.h>

namespace fsdp::module {

ModuleState::ModuleState(std::vector<const torch::nn::Module*> modules, FullyShardOptions options,
                         const DeviceMesh& mesh, const std::vector<engine::NamedParam>& params, const Face& face,
                         std::shared_ptr<ModuleState> leader, std::optional<engine::Offload> offload)
    : prefetches_backward(face.prefetches_backward),
      casts_inside(face.casts_inside),
      modules_(std::move(modules)),
      options_(std::move(options)),
      leader_(std::move(leader)),
      group_("(root)", params, mesh,
             {options_.mp_policy.param_dtype, options_.mp_policy.reduce_dtype, face.keeps_reduced}, face.layout,
             offload) {
  group_.face = this;
}

void ModuleState::set_fqn(std::string fqn) {
  fqn_ = std::move(fqn);
  auto name = fqn_.empty() ? "(root)" : fqn_;
  if (leader_) name += " over {" + c10::Join(", ", group_.mesh().names()) + "}";
  group_.set_name(std::move(name));
}

}  // namespace fsdp::module
