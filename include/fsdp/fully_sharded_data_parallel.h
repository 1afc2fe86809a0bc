#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <fsdp/clip_grad.h>
#include <fsdp/device_mesh.h>
#include <fsdp/export.h>
#include <fsdp/fully_shard.h>
#include <torch/nn/module.h>

/// The classic wrapper: whole models at once, with strategies and policies, on the engine of fully_shard.
namespace fsdp {

enum class ShardingStrategy {
  kFullShard,        ///< parameters, gradients and optimizer state are cut over all ranks
  kShardGradOp,      ///< as that, but parameters stay whole from forward to backward
  kNoShard,          ///< nothing is cut: every rank holds all, and a second copy of it while the module runs
  kHybridShard,      ///< kFullShard over the second axis of the mesh, replicated over the first
  kHybridShardZero2  ///< kShardGradOp likewise
};

/// Which modules become units of their own. Asked of each module inside the wrapped one that has parameters which no
/// unit inside it took, children before parents, with the number of elements of those. Must answer alike on every rank.
using AutoWrapPolicy = std::function<bool(const torch::nn::Module& module, int64_t unwrapped_numel)>;

/// Modules of at least so many elements. InvalidArgument below 1.
FSDP_API AutoWrapPolicy size_based_auto_wrap_policy(int64_t min_num_params = 100'000'000);

/// Modules of these types (TORCH_MODULE holders, or the modules themselves): module_wrap_policy<Block, Embedding>().
template <class... Ms>
AutoWrapPolicy module_wrap_policy();

/// When backward gathers the next unit. Both: while the one before is used, in the engine's order.
enum class BackwardPrefetch { kBackwardPre, kBackwardPost };

/// In which dtypes a wrapped module computes and communicates. Unset fields keep each tensor's own dtype.
struct MixedPrecision {
  /// Parameters are gathered and used in this dtype; slices and optimizer state keep their own.
  std::optional<at::ScalarType> param_dtype{};
  /// Gradients are accumulated and reduced in this dtype; unset: param_dtype, else the parameter's own.
  std::optional<at::ScalarType> reduce_dtype{};
  /// Floating-point buffers are cast to this dtype when they are wrapped, and have it in state dicts.
  std::optional<at::ScalarType> buffer_dtype{};
  /// The gradient that the optimizer sees has the dtype that it was reduced in, not its parameter's.
  bool keep_low_precision_grads = false;
  /// Cast floating-point inputs of units inside to param_dtype where fsdp::call calls them.
  bool cast_forward_inputs = false;
  /// The same where the outermost wrapper is called.
  bool cast_root_forward_inputs = true;
};

struct CPUOffload {
  bool offload_params = false;
};

struct FullyShardedDataParallelOptions {
  /// One axis; two, {replicate, shard}, for the hybrid strategies and those alone. Undefined: the whole world on the
  /// CPU, which hybrid strategies take only if it is one rank.
  DeviceMesh mesh{};
  ShardingStrategy sharding_strategy = ShardingStrategy::kFullShard;
  /// Empty: the wrapped module is one unit.
  AutoWrapPolicy auto_wrap_policy{};
  /// Of every unit.
  MixedPrecision mixed_precision{};
  /// On the CPU, state is in host memory anyway: nothing to do. NotSupported on other devices.
  CPUOffload cpu_offload{};
  /// Nothing: backward gathers a unit when it is used, and not ahead of that.
  std::optional<BackwardPrefetch> backward_prefetch = BackwardPrefetch::kBackwardPre;
  /// Modules whose parameters, and those of the modules inside, stay ordinary tensors, whose gradients are not reduced.
  std::vector<std::shared_ptr<torch::nn::Module>> ignored_modules{};
  std::vector<at::Tensor> ignored_params{};
  /// Parameters (not the ignored ones) and buffers start from the values of the mesh's first rank.
  bool sync_module_states = false;

  // What PyTorch lets its users choose and libfsdp always does. Accepted, and without effect:
  /// forward gathers ahead, in the order of the step before,
  bool forward_prefetch = false;
  /// gathers and reductions that would pile up are held back.
  bool limit_all_gathers = true;
};

/// Averages the flat gradients of one unit over the ranks: `output` is to get this rank's part. `gradients` are as long
/// for each rank as for the one that holds most, the rest being padding. With kNoShard, and on one rank, `output` is
/// undefined, and `gradients` are averaged in place. Called by every rank alike, in the order of reductions.
using CommHook = std::function<void(const at::Tensor& gradients, const at::Tensor& output)>;

struct SummonOptions {
  /// False: the wrapper's own unit alone.
  bool recurse = true;
  /// At the end, this rank's part of what each parameter is by then becomes its value.
  bool writeback = true;
  /// On rank 0 of the world alone; the others take part, and their parameters stay sharded.
  bool rank0_only = false;
  /// Gradients are whole, too, and what is written to them stays.
  bool with_grads = false;
};

namespace module {

FSDP_API std::shared_ptr<ModuleState> wrap(const std::shared_ptr<torch::nn::Module>& module,
                                           const FullyShardedDataParallelOptions& options);
/// InvalidArgument, naming `method`, if the group is inside another.
FSDP_API void require_outermost(ModuleState& state, const char* method);
FSDP_API void register_comm_hook(ModuleState& state, const CommHook& hook);
FSDP_API std::vector<FSDPModuleBase> units_in(ModuleState& state);
FSDP_API bool is_outermost(ModuleState& state);

template <class M>
struct wrapped_type : impl_of<M> {};
template <class M>
requires std::is_base_of_v<torch::nn::Module, M>
struct wrapped_type<M> {
  using type = M;
};

}  // namespace module

/// See FullyShardedDataParallel::no_sync.
class FSDP_API NoSync {
 public:
  explicit NoSync(std::shared_ptr<module::ModuleState> state);
  ~NoSync();
  NoSync(const NoSync&) = delete;
  NoSync& operator=(const NoSync&) = delete;

 private:
  struct Before;
  std::vector<Before> before_;
};

/// See FullyShardedDataParallel::summon_full_params.
class FSDP_API SummonedParams {
 public:
  SummonedParams(std::shared_ptr<module::ModuleState> state, const std::vector<at::Tensor>& parameters,
                 const SummonOptions& options);
  /// As close(), but warns where that throws.
  ~SummonedParams();
  SummonedParams(const SummonedParams&) = delete;
  SummonedParams& operator=(const SummonedParams&) = delete;
  /// Ends it. InvalidArgument if a parameter has other sizes than at first; all are sharded again, and that one has the
  /// value that it had before.
  void close();

 private:
  struct Shown;
  std::unique_ptr<Shown> shown_;
};

/// A wrapped module: `model(x)` is the forward, `model->` the module itself. Unlike torch's, it does not stand in the
/// module's place: names, children and state dicts are the module's own, and units inside are called as before.
/// M is a TORCH_MODULE holder (GPT) or a shared_ptr of a module. A cheap value; copies refer to the same units.
///
/// What a rank holds of a unit is an equal stretch of its parameters, flattened and one after another (torch's
/// use_orig_params=true). So parameters keep their identity, names and global sizes, and fsdp::dtensor(p).to_local() is
/// this rank's slice, 1-D and maybe empty; fully_shard cuts each by its rows instead. An optimizer of element-wise
/// steps works on parameters(), built before or after. fsdp::save, load, state_dict and full_state_dict take the
/// wrapper, and checkpoints are those of fully_shard.
///
/// The methods of FSDPModule are there too. All are called by every rank alike.
template <class M>
class FullyShardedDataParallel : public FSDPModule<M> {
 public:
  /// Collective: every rank calls it with an equal model, and gets InvalidArgument that names both sides if parameters
  /// or options differ. Modules inside that were wrapped before keep their units.
  ///
  /// InvalidArgument: no parameters; parameters of one unit that differ in dtype; a parameter that two units share; a
  /// parameter on another device than the mesh's; a mesh that does not fit the strategy, or is another one than that
  /// of a unit inside.
  explicit FullyShardedDataParallel(M module, const FullyShardedDataParallelOptions& options = {})
      : FSDPModule<M>(module, module::wrap(module::pointer(module), options)) {}

  /// Runs the module's forward with its parameters gathered unit by unit as they are used.
  template <class... Args>
  auto forward(Args&&... args) const {
    return (*this)(std::forward<Args>(args)...);
  }

  /// Of the module; for an optimizer.
  std::vector<at::Tensor> parameters() const { return (*this)->parameters(); }

  /// While what it returns lives, backward accumulates whole gradients on this rank and does not communicate; the first
  /// backward after it reduces them all: `{ auto local = model.no_sync(); loss.backward(); }`. Costs the memory of the
  /// whole gradients. InvalidArgument on a unit inside another.
  [[nodiscard]] NoSync no_sync() const {
    module::require_outermost(*this->state_, "no_sync");
    return NoSync(this->state_);
  }

  /// fsdp::clip_grad_norm_ of parameters(): the gradients' joint norm before, equal on all ranks. InvalidArgument on a
  /// unit inside another.
  at::Tensor clip_grad_norm_(double max_norm, double norm_type = 2.0) const {
    module::require_outermost(*this->state_, "clip_grad_norm_");
    return fsdp::clip_grad_norm_(parameters(), max_norm, norm_type);
  }

  /// Gradients of all units are reduced by `hook` from now on; for good. InvalidArgument on a unit inside another, with
  /// a hybrid strategy, or where there is a hook already.
  void register_comm_hook(const CommHook& hook) const { module::register_comm_hook(*this->state_, hook); }

  /// Calls `fn` with the module and all modules inside, while parameters are whole; this rank's part of what they are
  /// then stays. Costs a summon_full_params().
  void apply(const std::function<void(torch::nn::Module&)>& fn) const {
    auto whole = summon_full_params();
    (*this)->apply(fn);
    whole.close();
  }

  /// The units at and below this one, this one first.
  std::vector<FSDPModuleBase> fsdp_modules() const { return module::units_in(*this->state_); }
  /// Whether no other wrapper, and no module of fully_shard, is around this one.
  bool check_is_root() const { return module::is_outermost(*this->state_); }

  /// While what it returns lives, parameters are plain tensors, whole and in their own dtype, to read and to write. A
  /// forward is possible under no_grad; optimizers' state stays sharded, and gradients do without `with_grads`. Costs
  /// one all-gather a parameter (and gradient) and the memory of them all; the end communicates nothing.
  /// InvalidArgument inside a forward or backward, or another such scope. NotSupported: `rank0_only` with `writeback`
  /// or `with_grads`.
  [[nodiscard]] SummonedParams summon_full_params(const SummonOptions& options = {}) const {
    return SummonedParams(this->state_, parameters(), options);
  }
};

template <class... Ms>
AutoWrapPolicy module_wrap_policy() {
  return [](const torch::nn::Module& module, int64_t) {
    return (... || (dynamic_cast<const typename module::wrapped_type<Ms>::type*>(&module) != nullptr));
  };
}

}  // namespace fsdp
