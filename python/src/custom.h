#pragma once
#include <functional>
#include <memory>
#include <string>

#include <fsdp/custom_comm.h>
#include <torch/csrc/utils/pybind.h>

/// Collectives and hooks that users write in Python, as the engine calls them: on whichever thread, with or without the
/// GIL. What they keep alive is let go of with it held.
namespace fsdp::python {

/// What a note on a user's exception says of where it was raised.
using Where = std::function<std::string()>;

/// `comm` has torch's interface AllGather or ReduceScatter; `group` is the process group that it is called with. None:
/// null.
std::shared_ptr<CustomAllGather> custom_all_gather(py::object comm, py::object group, Where where);
std::shared_ptr<CustomReduceScatter> custom_reduce_scatter(py::object comm, py::object group, Where where);

/// Calls `hook` with a tensor. None: empty.
std::function<void(const at::Tensor&)> tensor_hook(py::object hook, Where where);

}  // namespace fsdp::python
