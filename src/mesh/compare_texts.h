#pragma once
#include <string>
#include <vector>

#include "comm/channel.h"

namespace fsdp::mesh {

/// Compares a text over all ranks of `channel`; collective. Empty if all brought the same and none `objects`, else
/// every rank's text. Costs one small all-reduce where all agree.
std::vector<std::string> compare_texts(comm::Channel& channel, const std::string& mine, bool objects);

}  // namespace fsdp::mesh
