#pragma once
#include <map>
#include <string>
#include <vector>

#include "checkpoint/index.h"
#include "checkpoint/plan.h"

namespace fsdp::checkpoint {

/// The tensor of this name, through an alias if it is one; nullptr if there is none.
const IndexTensor* find_tensor(const Index& index, const std::string& name);
/// The name under which a file has the tensor.
const std::string& stored_name(const Index& index, const std::string& name);

/// CheckpointError that lists the differences, both ways, between the tensors of `index` whose names begin with
/// `prefix` and those that are wanted (names, shapes, dtypes), if there are any. `aliases` are further names that are
/// wanted of the same tensors.
void check_match(const Index& index, const std::string& prefix, const std::vector<LocalTensor>& wanted,
                 const std::map<std::string, std::string>& aliases, const std::string& whose);

/// CheckpointError if type or groups of parameters differ.
void check_groups(const OptimizerIndex& saved, const OptimizerIndex& here);

}  // namespace fsdp::checkpoint
