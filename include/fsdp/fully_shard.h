#pragma once
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <fsdp/custom_comm.h>
#include <fsdp/device_mesh.h>
#include <fsdp/dtensor.h>
#include <fsdp/export.h>
#include <fsdp/tensor_extension.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

namespace fsdp {

/// Which dtypes a group computes and communicates in. Unset fields keep the parameter's own dtype.
struct MixedPrecisionPolicy {
  /// Parameters are gathered and used in this dtype; shards and optimizer state keep their own.
  std::optional<at::ScalarType> param_dtype{};
  /// Gradients are accumulated and reduced in this dtype; unset: param_dtype, else the parameter's own. The gradient
  /// that the optimizer sees always has the parameter's own dtype.
  std::optional<at::ScalarType> reduce_dtype{};
  /// Floating-point outputs of a call through the handle are cast to this dtype.
  std::optional<at::ScalarType> output_dtype{};
  /// Cast floating-point inputs of a call through the handle to param_dtype.
  bool cast_forward_inputs = true;
};

/// Sharded parameters, their gradients and optimizer states are in host memory: gathers copy from there to the mesh's
/// device, reductions end with a copy back, and the optimizer steps on the host. A parameter's device() is the CPU, in
/// forward too, where operators compute on the mesh's device all the same. They always are in host memory where the
/// mesh's device is the CPU, and nothing changes there.
struct CPUOffloadPolicy {
  /// The host memory is page-locked, so that copies run beside the host's work and the device's.
  bool pin_memory = true;
};

/// Which axes of a mesh of any number of axes are the data-parallel ones, by name; see FullyShardOptions::dp_mesh_dims.
struct DataParallelMeshDims {
  std::vector<std::string> shard{};      ///< parameters are sharded over these, as over one axis
  std::vector<std::string> replicate{};  ///< and replicated over these, as over one axis
};

/// How one parameter lies: along which dim it is cut, and over which ranks.
struct ShardPlacementResult {
  // NOLINTNEXTLINE(google-explicit-constructor): a Placement alone means the mesh of the others
  ShardPlacementResult(Placement p, DeviceMesh m = {}) : placement(p), mesh(std::move(m)) {}
  Placement placement;
  /// A mesh of the parameter's own, 1D or {replicate, shard}, whose ranks are some of those that the others lie over.
  /// Each rank's copy of it is cut over this mesh alone, so ranks outside of it may have other values (experts of their
  /// own). Its gradient is the mean over this mesh. Undefined: the mesh of the others.
  DeviceMesh mesh;
};

struct FullyShardOptions {
  /// 1D: parameters are sharded over it. 2D {replicate, shard}: sharded over the second axis, replicated over the
  /// first. With dp_mesh_dims of any number of axes. Undefined: a 1D mesh over the whole world, on the CPU.
  DeviceMesh mesh{};
  /// Free the unsharded parameters after forward and gather them again in backward. Unset: true, but false for the
  /// root (its parameters are needed at once when backward begins). A number n, a factor of the size of the shard axis:
  /// each rank keeps 1/n of the parameters between forward and backward, in the gathered dtype, and backward gathers
  /// over n consecutive ranks (those of one host, say) alone. 1 means false, the size of the axis true.
  std::optional<std::variant<bool, int64_t>> reshard_after_forward{};
  /// Along which dim a parameter is cut: Shard(n) for n >= 0 (the size of dim n must be a multiple of the shard axis if
  /// n > 0), or nothing for Shard(0); and over a mesh of its own, if a ShardPlacementResult has one: the parameters of
  /// each mesh are gathered and reduced by themselves. Called once for each parameter; must give the same on every
  /// rank.
  std::function<std::optional<ShardPlacementResult>(const at::Tensor&)> shard_placement_fn{};
  MixedPrecisionPolicy mp_policy{};
  std::optional<CPUOffloadPolicy> offload_policy{};
  /// Parameters that stay ordinary tensors: not sharded, their gradients not reduced.
  std::vector<at::Tensor> ignored_params{};
  /// `mesh` has other axes too (tensor parallelism's, say), and these are the data-parallel ones. Along the others each
  /// rank's parameters are its own: they may differ in value and size, libfsdp communicates over none of them, and
  /// sharded tensors show the data-parallel axes alone. Without a shard axis nothing is sharded or gathered: parameters
  /// stay whole on every rank, and gradients are averaged over the replicas.
  std::optional<DataParallelMeshDims> dp_mesh_dims{};
  /// What gathers of a parameter move in the place of its rows (a quantized form), or null for the rows themselves.
  /// Called once for each parameter; must give the same kind on every rank. Not beside a number for
  /// reshard_after_forward, set_symm_mem_for_comm or parameters cut as one line of elements.
  std::function<std::shared_ptr<TensorExtension>(const at::Tensor&)> tensor_extension_fn{};
};

namespace module {
class ModuleState;
}

/// A gather under way, from FSDPModuleBase::unshard(true).
class FSDP_API UnshardHandle {
 public:
  UnshardHandle() = default;
  explicit UnshardHandle(std::shared_ptr<module::ModuleState> state) : state_(std::move(state)) {}
  /// Blocks until the parameters are whole. Without it, the module's first use waits.
  void wait();

 private:
  std::shared_ptr<module::ModuleState> state_;
};

/// What fully_shard gives back, whatever the module's type: the controls of the group that it made.
/// A cheap value; copies refer to the same group. Every method must be called by all ranks alike.
class FSDP_API FSDPModuleBase {
 public:
  explicit FSDPModuleBase(std::shared_ptr<module::ModuleState> state) : state_(std::move(state)) {}

  /// Gathers this module's own group (not those of its submodules) and keeps it whole until reshard(), or until the
  /// next forward or backward frees it. With async_op the gather runs on while the caller goes on.
  UnshardHandle unshard(bool async_op = false);
  /// Frees this group's unsharded parameters. Not recursive.
  void reshard();

  /// False: backward accumulates unsharded gradients and does not communicate (gradient accumulation).
  void set_requires_gradient_sync(bool requires_sync, bool recurse = true);
  /// Whether the replicas' all-reduce of a 2D mesh runs in backward; false defers it to the next backward that has it.
  void set_requires_all_reduce(bool requires_all_reduce, bool recurse = true);
  /// False: the next backward is not the last of its step; reductions may stay in flight when it returns.
  void set_is_last_backward(bool is_last_backward);
  /// True: over the whole shard axis, also where fully_shard was given a number.
  void set_reshard_after_forward(bool reshard, bool recurse = true);
  /// False: parameters stay whole after backward (for example between the micro-batches of one step).
  void set_reshard_after_backward(bool reshard, bool recurse = true);
  /// The groups whose gathers are issued when this group's forward begins, in this order. Replaces the default
  /// (the next group of the recorded order).
  void set_modules_to_forward_prefetch(const std::vector<FSDPModuleBase>& modules);
  /// The same for backward.
  void set_modules_to_backward_prefetch(const std::vector<FSDPModuleBase>& modules);
  /// Gradients are divided by this instead of by the number of ranks.
  void set_gradient_divide_factor(double factor);
  [[deprecated("call set_gradient_divide_factor")]] void set_reduce_scatter_divide_factor(double factor) {
    set_gradient_divide_factor(factor);
  }
  /// This module's own group gathers with, or reduces with, a user's collective; null: libfsdp's again. Between steps.
  /// NotSupported beside reshard_after_forward as a number, whose gathers are over other ranks.
  void set_custom_all_gather(std::shared_ptr<CustomAllGather> gather);
  void set_custom_reduce_scatter(std::shared_ptr<CustomReduceScatter> reduce);
  /// One host, one copy: the parameters of this module's own group lie whole in memory that all ranks of the shard axis
  /// map, and each rank's shard is its slice of it. Nothing is gathered any more: forward and backward read in place,
  /// and the ranks together hold the parameters once, plus once more in param_dtype where that differs (cast once a
  /// host; so are parameters that are cut along another dim than the first). A rank may write its shards between steps
  /// only, as optimizers and checkpoints do; every forward ends with a meeting of the ranks. An in-place write to a
  /// whole parameter inside forward is refused. unshard() between steps makes a copy. Gradients are reduced as before.
  /// Between steps, on every rank; for good. NotSupported on every rank if the ranks do not share a host (engine gloo
  /// or mpi), and beside custom collectives and a number for reshard_after_forward.
  void set_symm_mem_for_comm();
  /// `hook` gets the averaged gradients of this module's own group that this rank holds, one flat tensor a dtype, when
  /// a reduction (on a 2D mesh: the replicas' too) is done and before parameters get them; it may write to it, or
  /// reduce it further over ranks that libfsdp does not know of. Runs once for each reduction, in the same order on all
  /// ranks.
  /// On a device with streams the hook runs with `stream` as the current one, ordered after the reduction and before
  /// the parameters get it, or with the stream of reductions where none is given.
  void set_all_reduce_hook(std::function<void(const at::Tensor&)> hook, std::optional<c10::Stream> stream = {});
  /// The parameters were last written before this event, which is on the device of the parameters: the gathers of the
  /// next forward wait for it, and not for all that the current stream has by then (which is the default, and right
  /// wherever the optimizer runs on it). For one forward; a write after the event needs another one. Null: the default.
  /// Accepted and without meaning where there are no streams (CPU).
  void set_post_optim_event(std::shared_ptr<const c10::Event> event);
  /// How many reductions may be in flight, each of which holds a group's unsharded gradients until it is done, when
  /// the next one is issued. 1 unless set; more let a slow wire lag behind at the cost of that memory. InvalidArgument
  /// below 1.
  void set_reduce_scatter_max_input_buffers(int64_t max_input_buffers, bool recurse = true);

  // What PyTorch lets its users choose and libfsdp always does. Accepted, and without effect:
  /// gradients of parameters that some ranks leave unused are right,
  void set_reduce_scatter_unused_params(bool enabled, bool recurse = true);
  /// gradients are summed on the wire and divided afterwards,
  void set_force_sum_reduction_for_comms(bool enable);
  /// backward gathers a group where an operator reads one of its parameters, and not otherwise,
  void set_unshard_in_backward(bool unshard_in_backward);
  /// reductions have channels of their own,
  void set_separate_reduce_scatter_group(bool enable = true, bool recurse = true);
  /// buffers of collectives come from the engine wherever it has memory of its own. InvalidArgument beside a custom
  /// collective.
  void set_allocate_memory_from_process_group_for_comm(bool enable);

  /// After an exception in forward or backward: ends what is in flight, drops the failed iteration's gradients and
  /// frees what it gathered, so that the next step is like any other. Root only; every rank.
  void reset_iter_state();

  /// The last iteration's collectives, one line a group and act, in the order of issue:
  ///   "forward  all-gather      blocks.0   1.2 MB"
  std::string schedule() const;
  /// Dotted name of the module within the root, "" for the root itself.
  const std::string& fqn() const;

  const std::shared_ptr<module::ModuleState>& state() const { return state_; }

 protected:
  std::shared_ptr<module::ModuleState> state_;
};

namespace module {

/// Marks a forward of a sharded module on this thread. Used by FSDPModule and call(); not by users.
class FSDP_API ForwardScope {
 public:
  explicit ForwardScope(const std::shared_ptr<ModuleState>& state);
  ~ForwardScope();
  ForwardScope(const ForwardScope&) = delete;
  ForwardScope& operator=(const ForwardScope&) = delete;
  /// The forward returned: closes its groups.
  void complete();
  /// The forward threw `what`: tells the other ranks.
  void fail(const char* what) noexcept;

 private:
  std::shared_ptr<ModuleState> state_;
  bool open_ = true;
};

FSDP_API at::Tensor cast_input(const ModuleState& state, const at::Tensor& tensor);
FSDP_API at::Tensor cast_output(const ModuleState& state, const at::Tensor& tensor);
FSDP_API const MixedPrecisionPolicy& policy(const ModuleState& state);
/// The group that fully_shard made for exactly this module; InvalidArgument if there is none.
FSDP_API std::shared_ptr<ModuleState> find_state(const torch::nn::Module& module);
FSDP_API std::shared_ptr<ModuleState> make_state(std::vector<std::shared_ptr<torch::nn::Module>> modules,
                                                 const FullyShardOptions& options);

template <class T, class Cast>
auto map_tensors(T&& value, const Cast& cast) {
  using U = std::decay_t<T>;
  if constexpr (std::is_same_v<U, at::Tensor>) {
    return cast(value);
  } else if constexpr (std::is_same_v<U, std::vector<at::Tensor>>) {
    U out;
    out.reserve(value.size());
    for (const auto& tensor : value) out.push_back(cast(tensor));
    return out;
  } else {
    return U(std::forward<T>(value));
  }
}
template <class... Ts, class Cast>
std::tuple<Ts...> map_tensors(std::tuple<Ts...> value, const Cast& cast) {
  return std::apply([&](auto&&... items) { return std::tuple<Ts...>(map_tensors(std::move(items), cast)...); },
                    std::move(value));
}

template <class M>
struct impl_of {
  using type = typename M::ContainedType;  // a TORCH_MODULE holder
};
template <class T>
struct impl_of<std::shared_ptr<T>> {
  using type = T;
};

template <class M>
std::shared_ptr<typename impl_of<M>::type> pointer(const M& module) {
  if constexpr (std::is_same_v<M, std::shared_ptr<typename impl_of<M>::type>>) {
    return module;
  } else {
    return module.ptr();
  }
}

template <class Impl, class... Args>
auto run_forward(const std::shared_ptr<ModuleState>& state, Impl& impl, Args&&... args) {
  ForwardScope scope(state);
  try {
    const auto in = [&](const at::Tensor& t) { return cast_input(*state, t); };
    const auto out = [&](const at::Tensor& t) { return cast_output(*state, t); };
    if constexpr (std::is_void_v<decltype(impl.forward(std::forward<Args>(args)...))>) {
      impl.forward(map_tensors(std::forward<Args>(args), in)...);
      scope.complete();
    } else {
      auto result = map_tensors(impl.forward(map_tensors(std::forward<Args>(args), in)...), out);
      scope.complete();
      return result;
    }
  } catch (const std::exception& error) {
    scope.fail(error.what());
    throw;
  } catch (...) {
    scope.fail("an exception that is not a std::exception");
    throw;
  }
}

}  // namespace module

/// A sharded module: `model(x)` is the forward, `model->` the module itself.
/// M is a TORCH_MODULE holder (GPT) or a shared_ptr of a module.
template <class M>
class FSDPModule : public FSDPModuleBase {
 public:
  using Impl = typename module::impl_of<M>::type;
  FSDPModule(M m, std::shared_ptr<module::ModuleState> state)
      : FSDPModuleBase(std::move(state)), module_(std::move(m)) {}

  /// Runs the module's forward with its parameters gathered group by group as they are used. A forward that is not
  /// called through a handle is refused, with the name of the parameter that it touched first.
  template <class... Args>
  auto operator()(Args&&... args) const {
    return module::run_forward(state_, *module::pointer(module_), std::forward<Args>(args)...);
  }
  Impl* operator->() const { return module::pointer(module_).get(); }
  Impl& operator*() const { return *module::pointer(module_); }
  const M& module() const { return module_; }

 private:
  M module_;
};

/// Shards `module`'s parameters over the mesh, in place, as one group: they are gathered together and their
/// gradients reduced together. Parameters of submodules that were sharded before keep their own groups, so call it
/// bottom-up: on each block, then on the root. Collective: every rank calls it with an equal model; ranks whose
/// parameters differ in name, shape or dtype get InvalidArgument that names both sides.
///
/// After it, each parameter is a sharded tensor of the same identity and global sizes; names are unchanged, and an
/// optimizer built before or after works. Values are taken from this rank's own module (initialise alike on every
/// rank, or load a checkpoint afterwards).
///
/// InvalidArgument: no parameters; a module given or sharded twice; a parameter that another group owns; a parameter
/// on another device than the mesh's; a placement that does not fit its parameter; a mesh with ranks that the enclosing
/// module's does not have; a number for reshard_after_forward that does not divide the shard axis; dp_mesh_dims that
/// the mesh does not have.
template <class M>
FSDPModule<M> fully_shard(M module, const FullyShardOptions& options = {}) {
  auto state = module::make_state({module::pointer(module)}, options);
  return FSDPModule<M>(std::move(module), std::move(state));
}

/// Several modules as one group; call them through fsdp::call or inside the forward of an enclosing handle.
inline FSDPModuleBase fully_shard(const std::vector<std::shared_ptr<torch::nn::Module>>& modules,
                                  const FullyShardOptions& options = {}) {
  return FSDPModuleBase(module::make_state(modules, options));
}

/// Calls the forward of a sharded submodule with its exact boundaries: input and output casts, and the end of its
/// group's forward where it returns. Inside another forward or on its own.
template <class M, class... Args>
auto call(const M& m, Args&&... args) {
  auto impl = module::pointer(m);
  return module::run_forward(module::find_state(*impl), *impl, std::forward<Args>(args)...);
}

/// Accepted, and without effect: all models on one mesh share its channels.
inline void share_comm_ctx(const std::vector<FSDPModuleBase>&) {}

/// The handle of a module that fully_shard was called on.
template <class M>
FSDPModule<M> fsdp_module(M m) {
  auto state = module::find_state(*module::pointer(m));
  return FSDPModule<M>(std::move(m), std::move(state));
}

}  // namespace fsdp
