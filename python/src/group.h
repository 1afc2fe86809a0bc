#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fsdp/custom_comm.h>
#include <fsdp/device_mesh.h>
#include <torch/csrc/utils/pybind.h>

#include "engine/context.h"
#include "engine/param_group.h"
#include "shown_param.h"

namespace fsdp::python {

/// What one fully_shard call made: the engine's group and the places of its parameters in Python modules.
///
/// All methods are called with the GIL held and let go of it where they may wait for other ranks. Holds no module, so
/// that a dropped model is freed at once.
class Group {
 public:
  /// Copies this rank's rows, along `dims`, of `params`, whole tensors. Opens the mesh's channels: collective.
  Group(std::vector<std::string> names, std::vector<at::Tensor> params, std::vector<int64_t> dims,
        const DeviceMesh& mesh, const engine::DtypePolicy& policy, engine::Layout layout,
        std::optional<engine::Offload> offload);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  engine::ParamGroup& engine() { return *group_; }
  const engine::ParamGroup& engine() const { return *group_; }
  static Group& of(engine::ParamGroup& group) { return *static_cast<Group*>(group.face); }
  size_t size() const { return params_.size(); }
  std::vector<std::string> parameter_names() const;
  /// This rank's rows of the i-th parameter, in the order of the names.
  const at::Tensor& shard(size_t i) const { return params_.at(i)->engine->shard(); }

  /// The i-th parameter is shown as `user`, a parameter that is a DTensor or becomes an ordinary tensor over shard(i),
  /// in `places`; see ShownParam for `wrapper`.
  void place(size_t i, py::object user, std::vector<Place> places, py::object wrapper);
  /// Gathers of the i-th parameter move what `impl` sends, tensors like `like`, and `impl` shows it whole: see
  /// PyExtension. Until rebuild() makes the group anew.
  void extend(size_t i, py::object impl, const std::vector<at::Tensor>& like);
  bool extended(size_t i) const { return params_.at(i)->engine->extension() != nullptr; }
  /// The i-th parameter is not shown but as the whole, in `places`; users hold `flat`, which `holder` shows, and of
  /// which it is the elements from `offset` on.
  void hide(size_t i, py::object flat, int64_t offset, Place holder, std::vector<Place> places);
  /// `several`: stands for several modules, which are called one after the other. Then the end of one of them is not
  /// the end of the group's use.
  void set_shared(bool several) { several_ = several; }
  void set_name(const std::string& name, const std::vector<std::string>& params);
  /// A setting was changed that ranks must have alike. Nothing to do before the group is part of a model.
  void note_config_change();
  /// Between forward and backward, keep the parameters over this many ranks; 0: do not. Collective.
  void keep_over(int64_t ranks);
  /// Collectives of the user's own, alike on all ranks; null: the engine's. NotSupported where they cannot be had.
  void set_custom_gather(std::shared_ptr<CustomAllGather> gather);
  void set_custom_reduce(std::shared_ptr<CustomReduceScatter> reduce);
  /// Gets this rank's averaged gradients, flat, before the parameters do; empty: none.
  void set_all_reduce_hook(std::function<void(const at::Tensor&)> hook, std::optional<c10::Stream> stream);
  /// Averages this rank's gradients, flat and in place. Where parameters are not cut.
  void set_custom_all_reduce(std::function<void(const at::Tensor&)> reduce);
  bool has_custom_collective() const { return custom_gather_ || custom_reduce_; }
  /// The parameters lie in memory that the ranks have in common. Collective.
  void share_memory();

  // --- forward ----------------------------------------------------------------------------------------------------
  /// A forward of one of the group's modules begins: gathers, and shows the parameters whole. May wait for the other
  /// ranks. Nests.
  void enter();
  /// It ended, or threw what is being handled now.
  enum class Left {
    kNested,  // another use of the group goes on
    kEnded,   // it is over; see watch()
    kFailed,  // it threw
  };
  Left leave();

  // --- backward ---------------------------------------------------------------------------------------------------
  /// A backward that comes to one of `outputs` gathers the group, and shows the parameters of the whole model as the
  /// whole until it ends: modules may be called again inside of it (a checkpoint within a module).
  void watch(const std::vector<at::Tensor>& outputs);
  /// Whether it gathers there. If not, the first operator that reads a parameter does; but code that reads bytes
  /// without an operator (a compiled graph, an extension's kernel) finds none.
  void set_gathers_in_backward(bool gathers) { gathers_in_backward_ = gathers; }
  void begin_backward();
  void end_backward();
  /// Reduces the gradients that backwards without synchronisation left on this rank. Collective.
  void reduce_held();

  // --- by hand ----------------------------------------------------------------------------------------------------
  void unshard(bool wait);
  void reshard();
  /// Ends the iteration after an error: collective.
  void reset();
  /// Whether a forward or a backward needs the whole parameters now.
  bool busy() const { return !idle() || in_backward_; }
  /// While set, the modules show something else than the group's parameters, and adopt() looks away.
  bool lent = false;
  /// Makes the modules show what users hold, unless a forward is under way.
  void show_sharded();

  /// Takes over what the user put in the place of parameters or of their local tensors (load with assign, to_empty):
  /// copies the values. False, and nothing is changed, if they have another dtype or device: see rebuild().
  /// InvalidArgument if they cannot stand for the parameters.
  bool adopt();
  /// As adopt(), for any dtype and device: the engine's group is made anew.
  void rebuild();
  /// Other dtypes from now on, between steps: the same. A backward of an earlier forward is refused then.
  void set_policy(const engine::DtypePolicy& policy);

 private:
  std::unique_ptr<engine::ParamGroup> make_engine(std::vector<engine::NamedParam> params, const DeviceMesh& mesh);
  void attach();
  void set_hooks();
  void remake();
  void show_whole();
  void show_in_backward();
  bool idle() const { return uses_ == 0; }
  void adopt_all();

  std::vector<std::string> names_;
  std::vector<int64_t> dims_;
  engine::DtypePolicy policy_;
  engine::Layout layout_;
  std::optional<engine::Offload> offload_;
  // For the engine's group, whenever it is made anew.
  std::shared_ptr<CustomAllGather> custom_gather_;
  std::shared_ptr<CustomReduceScatter> custom_reduce_;
  std::function<void(const at::Tensor&)> all_reduce_hook_, custom_all_reduce_;
  std::optional<c10::Stream> hook_stream_;
  std::shared_ptr<bool> flat_reduced_ = std::make_shared<bool>(false);  // see ShownParam
  bool in_place_ = false;
  std::vector<std::unique_ptr<ShownParam>> params_;  // in the order of names_
  std::unique_ptr<engine::ParamGroup> group_;        // after params_: its slots read them
  bool several_ = false;
  bool whole_ = false;        // the modules show the whole
  int uses_ = 0;              // forwards under way
  bool in_backward_ = false;  // a backward wants that
  bool gathers_in_backward_ = true;
  bool entered_ = false;                                           // the engine knows of them
  std::shared_ptr<Group*> self_ = std::make_shared<Group*>(this);  // for hooks that may outlive the group
  PyObject* handled_ = nullptr;  // what was being handled when the first of them began; only compared
};

/// One model: `groups` in module order, the i-th inside groups[parents[i]] (-1: in none), and of the same modules as
/// groups[leaders[i]] (-1: alone). Collective.
void arrange(const std::vector<Group*>& groups, const std::vector<int>& parents, const std::vector<int>& leaders,
             const DeviceMesh& mesh);

}  // namespace fsdp::python
