#pragma once
#include <string>
#include <vector>

#include <fsdp/device_mesh.h>

namespace fsdp::module {

/// Compares `lines`, a description of what this rank is about to do, over all ranks of `mesh`. Collective; every rank
/// gets InvalidArgument if any two differ (naming both sides' first differing line) or if any rank brings a non-empty
/// `problem` (quoting it). `subject` begins the message: "fully_shard of module 'blocks.0'".
void require_same_on_all_ranks(const DeviceMesh& mesh, const std::string& subject,
                               const std::vector<std::string>& lines, const std::string& problem);

}  // namespace fsdp::module
