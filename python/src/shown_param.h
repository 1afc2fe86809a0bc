#pragma once
#include <memory>
#include <vector>

#include <torch/csrc/utils/pybind.h>

#include "engine/sharded_param.h"

namespace fsdp::python {

/// One place where a module registers a parameter.
struct Place {
  py::dict table;  // the module's _parameters
  py::str name;
  /// For a module that follows assignments by its own __setattr__ (an RNN): a weak reference to it. Else None.
  py::object follower;

  PyObject* get() const;  // borrowed; null where the name is gone
  void set(const py::object& value) const;
};

/// A parameter as Python sees it: the DTensor that modules, optimizers and users hold, and the whole tensor that stands
/// in its places while its group is unsharded. All members need the GIL, but for the reading of `user` in slots.
struct ShownParam {
  engine::ShardedParam* engine = nullptr;
  py::object user;   // nn.Parameter, DTensor
  py::object spec;   // its DTensorSpec; gradients lie alike
  py::object local;  // the Python object of engine->shard(): what user._local_tensor is
  py::object whole;  // the Python object of engine->leaf()
  /// Where the parameter is a DTensor of another parallelism too, or has an extension: makes what is shown of the leaf
  /// (_whole_dtensor.py, _extension.py). Else None.
  py::object wrapper = py::none();
  std::vector<Place> places;

  /// Takes `engine`'s tensors: fills local and whole, and gives the engine its slot.
  void attach(engine::ShardedParam& param);
  /// From now on `parameter`, a DTensor, is what users hold: over the engine's shard, in all places.
  void set_user(py::object parameter);
  void show(const py::object& value) const;
  /// Shows the whole, whether its bytes are there or not.
  void show_whole() const;
  /// True if the modules and the DTensor are as this group left them.
  bool unchanged() const;
};

/// `dtensor._local_tensor`; InvalidArgument naming `name` if it is no DTensor.
py::object local_of(const py::handle& dtensor, const std::string& name);
bool is_dtensor(const py::handle& object);

}  // namespace fsdp::python
