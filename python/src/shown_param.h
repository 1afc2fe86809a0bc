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

/// A parameter as Python sees it: what modules, optimizers and users hold, and the whole tensor that stands in its
/// places while its group is unsharded. All members need the GIL, but for the reading of `user` in slots.
struct ShownParam {
  enum class Kind {
    kDTensor,
    kSlice,   // `user` is an ordinary parameter over the shard
    kHidden,  // `user` is one parameter for the whole group, over all its shards; the places show the leaf at all times
  };
  Kind kind = Kind::kDTensor;
  engine::ShardedParam* engine = nullptr;
  py::object user;     // nn.Parameter
  py::object spec;     // kDTensor: its DTensorSpec; gradients lie alike
  py::object local;    // the Python object of engine->shard(): what user._local_tensor is
  py::object whole;    // the Python object of engine->leaf()
  Place holder;        // kHidden: where `user` is registered, and
  int64_t offset = 0;  // where this parameter's elements begin in it
  /// kHidden, of all that are part of `user`: its gradient is new since its post-accumulate hooks ran.
  std::shared_ptr<bool> reduced;
  /// Where the parameter is a DTensor of another parallelism too, or has an extension: makes what is shown of the leaf
  /// (_whole_dtensor.py, _extension.py). Else None.
  py::object wrapper = py::none();
  std::vector<Place> places;

  /// Runs the tensor hooks of `user`, one after the other.
  at::Tensor run_hooks(at::Tensor gradient) const;
  /// 'its name' of group 'its group', for messages.
  std::string title() const;
  /// Takes `engine`'s tensors: fills local and whole, and gives the engine its slot.
  void attach(engine::ShardedParam& param);
  /// From now on `parameter` is what users hold: over the engine's shard, in all places.
  void set_user(py::object parameter);
  /// Shows what users hold.
  void show_sharded() const;
  /// Shows the whole, whether its bytes are there or not.
  void show_whole() const;
  /// True if the modules and what users hold are as this group left them.
  bool unchanged() const;
  /// What the modules show in the place of `user` now. InvalidArgument if it is gone, or cannot stand for it.
  py::object replacement() const;
  /// This rank's elements of `parameter`, which lies as `user` does.
  at::Tensor held_of(const py::object& parameter) const;

 private:
  void show(const py::object& value) const;
  std::unique_ptr<engine::Slot> make_slot() const;
  bool lies_like_user(const py::object& parameter) const;
};

bool is_dtensor(const py::handle& object);

}  // namespace fsdp::python
