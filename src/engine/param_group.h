#pragma once
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <fsdp/custom_comm.h>
#include <fsdp/device_mesh.h>

#include "base/memory.h"
#include "comm/channel.h"
#include "comm/common_memory.h"
#include "engine/sharded_param.h"
#include "engine/stats.h"
#include "engine/streams.h"
#include "shard/layout.h"

namespace fsdp::engine {

class Context;

/// Where a group's parameters are.
enum class GatherState {
  kSharded,    // only the shards have bytes
  kGathering,  // an all-gather is under way
  kUnsharded,  // the leaves are whole
};

struct DtypePolicy {
  std::optional<at::ScalarType> param_dtype;
  std::optional<at::ScalarType> reduce_dtype;
  bool keep_reduced = false;  // parameters get gradients in the dtype that they were reduced in, not in their own
  bool operator==(const DtypePolicy&) const = default;
};

/// What a user switches on a group; equal on all ranks.
struct GroupFlags {
  bool reshard_after_forward = true;
  bool reshard_after_backward = true;
  bool sync_gradients = true;
  bool all_reduce_gradients = true;
  double divide_factor = 0;    // 0: the number of ranks that contribute
  int64_t max_reductions = 1;  // in flight when this group's is issued, itself not counted; each rank's own business
};

struct NamedParam {
  std::string name;
  at::Tensor tensor;
  int64_t dim = 0;  // to be cut along, unless the group's layout is flat
  /// This rank's rows as a tensor of a class that runs operators itself, to be kept as it is. Where it is not given and
  /// `tensor` is one, its rows are cut by its own operators. Such a parameter needs an extension before it is gathered.
  at::Tensor shard{};
};

/// How a group's parameters are cut over the shard axis.
enum class Layout {
  kRows,  // each by the rows of a dim of its own
  kFlat,  // all, flattened, one after another, and that by its elements; one dtype
};

/// The shards of a group are in host memory, and leaves and collectives on `device`: gathers copy the shards there, and
/// reductions copy what they hand out to the host.
struct Offload {
  c10::Device device;
  bool pin_memory = false;  // what the host's copies go from and to is page-locked
};

/// Parameters that are gathered by one all-gather and whose gradients are reduced together, whichever face or layout
/// made it. Knows how, not when: the order of collectives is the Context's.
///
/// Bytes: one flat buffer of this rank's rows, alive as long as the group (the shards are views of it); the leaves,
/// whole, between finish_gather() and reshard(); one flat gather buffer while gathering; this rank's rows over some
/// ranks between forward and backward where keep_over() asks for it; one flat buffer of unsharded gradients from the
/// first arrival until its reduction is done. In place (see open()): one copy of the whole for all ranks of a host, of
/// which the shards are slices, and no leaves.
class ParamGroup {
 public:
  /// InvalidArgument: a flat layout of several dtypes.
  ParamGroup(std::string name, const std::vector<NamedParam>& params, const DeviceMesh& mesh, const DtypePolicy& policy,
             Layout layout = Layout::kRows, std::optional<Offload> offload = {});
  ~ParamGroup();
  ParamGroup(const ParamGroup&) = delete;
  ParamGroup& operator=(const ParamGroup&) = delete;

  const std::string& name() const { return name_; }
  void set_name(std::string name);
  const DeviceMesh& mesh() const { return mesh_; }
  const DtypePolicy& policy() const { return policy_; }
  const std::vector<std::unique_ptr<ShardedParam>>& params() const { return params_; }
  GroupFlags& flags() { return flags_; }
  int64_t unsharded_bytes() const { return axis_.layout->segments().total(); }
  /// The rows of `param` that this rank owns.
  shard::RowRange rows_here(const ShardedParam& param) const { return param.rows_of(world_, rank_); }
  /// Bytes of this rank's shards.
  int64_t sharded_bytes() const { return sharded_bytes_; }

  Context& context() const { return *context_; }
  const std::shared_ptr<Context>& shared_context() const { return context_; }

  // --- parameters -------------------------------------------------------------------------------------------------
  GatherState state() const { return state_; }
  /// to kGathering. Issues the all-gather.
  void begin_gather();
  /// kGathering to kUnsharded. Waits, and fills the leaves.
  void finish_gather();
  /// to kSharded. Frees the leaves; a gather under way is left to end unseen (see drop_discarded).
  void reshard();

  /// Between forward and backward, keep this rank's rows over `ranks` consecutive ranks of the shard axis (a factor of
  /// its size), so that backward gathers over those alone. 0: do not. Collective among the shard axis.
  void keep_over(int64_t ranks);
  int64_t kept_over() const { return part_ ? part_->channel->size() : 0; }
  /// kUnsharded: keeps the rows that keep_over() says; does nothing without it.
  void keep_part();
  void drop_part() { use_part(false), part_bytes_.reset(); }
  bool holds_part() const { return part_bytes_.defined(); }
  /// Gathers from now on are over the kept rows, or over the shards. Equal on all ranks, as holds_part() then is.
  void use_part(bool use) { from_part_ = use; }
  /// The kept rows of `param`, in the gathered dtype. Valid until drop_part().
  at::Tensor part_of(const ShardedParam& param) const;
  /// Takes part in an all-gather whose result this rank does not need.
  void join_gather();
  /// Waits for gathers that nobody wanted.
  void drop_discarded();
  /// True if a shard was written since the leaves were filled.
  bool stale() const;

  // --- in place: the whole in memory that the ranks of the shard axis have in common --------------------------------
  /// Moves the shards there. Collective among the shard axis, between steps. NotSupported where they cannot have it, in
  /// a flat layout, and beside keep_over(), extensions, custom collectives and offload.
  void share_memory();
  bool in_place() const { return common_ != nullptr; }
  /// kSharded to kUnsharded, without a collective: the leaves show the whole, to read. Only where no rank writes its
  /// shards: between the begin and the end of a forward or backward, at which all ranks meet.
  void open();
  /// Before the meeting at the begin: what the leaves show of this rank and the shards are not themselves, casts of
  /// them for one.
  void publish();
  /// True after open(), until reshard().
  bool opened() const { return opened_; }

  // --- a user's own collectives, the same on all ranks; null: the engine's ------------------------------------------
  void set_custom_gather(std::shared_ptr<CustomAllGather> gather);
  void set_custom_reduce(std::shared_ptr<CustomReduceScatter> reduce);
  /// Gets each averaged reduction's result of this rank, flat, before the parameters do; may write to it. On a device
  /// with streams `stream` is the current one then, or that of reductions where none is given.
  void set_all_reduce_hook(std::function<void(const at::Tensor&)> hook, std::optional<c10::Stream> stream = {});
  /// `reduce` averages this rank's gradients, flat, over the replicas, in place (on one rank too): the engine neither
  /// sums nor divides. InvariantError where the parameters are cut over several ranks.
  void set_custom_all_reduce(std::function<void(const at::Tensor&)> reduce);
  /// Which of the four there are.
  int customs() const {
    return static_cast<bool>(custom_gather_) + 2 * custom_reduce_ + 4 * static_cast<bool>(all_reduce_hook_) +
           8 * static_cast<bool>(custom_all_reduce_);
  }
  /// In a flat layout: gets the gradients that a reduction is about to sum and this rank has, in the order of the line,
  /// before they are summed; what it returns, of the same sizes, is.
  void set_gradient_hook(std::function<at::Tensor(const at::Tensor&)> hook) { gradient_hook_ = std::move(hook); }
  /// From now on gathers of `param` move what `extension` sends: tensors of the sizes and dtypes of `like`, equal on
  /// all ranks. NotSupported beside keep_over().
  void set_extension(ShardedParam& param, std::shared_ptr<Extension> extension, const std::vector<at::Tensor>& like);
  /// True if one of its parameters has one.
  bool extended() const { return extended_; }

  // --- gradients --------------------------------------------------------------------------------------------------
  /// From autograd, on the thread of the backward: an unsharded gradient for `param`.
  void capture(ShardedParam& param, const at::Tensor& gradient);
  /// Writes a gradient into its place in the reduction's input, or adds it to what is there.
  void store_gradient(ShardedParam& param, at::Tensor gradient);
  /// Fits the reduction to the parameters that want gradients now.
  void update_membership();
  /// True if any parameter takes part in reductions.
  bool has_members() const { return !buckets_.empty(); }
  bool holds_gradients() const;
  bool holds_gradient(const ShardedParam& param) const { return param.held_; }
  /// True if every gradient that the last backward brought has arrived.
  bool complete() const;
  /// Issues the reduce-scatter of what is held; absent gradients count as zero.
  void begin_reduce();
  /// See set_gradient_hook().
  void run_gradient_hook();
  /// All reductions: waits, averages, and hands gradients to the parameters for which used[i] is set; with offload only
  /// begins to copy them to the host.
  void finish_reduce(const uint8_t* used);
  /// With offload: waits for these copies and hands them to the parameters. Then no gather reads the shards either.
  void finish_offload();
  /// With offload: blocks until no gather reads the shards any more, which are the host's to write then.
  void wait_for_reads() const;
  /// Blocks until the inputs of all reductions are freed, for `limit` at most; false: some are still being read.
  bool wait_inputs(std::chrono::milliseconds limit);
  /// The next forward that records gradients starts anew.
  void forget_touches();
  /// A backward ended: what arrived is what the next one expects.
  void remember_arrivals();
  void drop_gradients();

  // --- the Context's bookkeeping ----------------------------------------------------------------------------------
  struct Place {
    int id = -1;
    int first_param = 0;  // index of params()[0] among all of the context's
    ParamGroup* parent = nullptr;
    ParamGroup* leader = nullptr;  // of several groups of the same modules, over different ranks: the first of them
    bool touched = false;          // used by a forward that recorded gradients
    bool opened = false;           // used since the last backward began or ended
    bool issued = false;           // reduced in this backward
    bool late = false;             // a gradient came after that
    bool slow = false;     // the last backward ended with gradients of it missing on some rank; equal on all ranks
    bool pinned = false;   // unshard() was called
    bool ordered = false;  // among those that were gathered before
    std::vector<ParamGroup*> forward_prefetch, backward_prefetch;
    bool explicit_forward_prefetch = false, explicit_backward_prefetch = false;
  };
  Place place;
  void* face = nullptr;  // the face's own record of this group
  /// `other` is this group, one of its parents, or one of the same modules as these.
  bool is_inside(const ParamGroup& other) const;

 private:
  friend class Context;
  struct Bucket {  // parameters that are reduced in one dtype
    at::ScalarType dtype;
    std::vector<ShardedParam*> params;
    std::unique_ptr<shard::FlatLayout> layout;
    at::Tensor input;    // rank-major; undefined until something arrives
    at::Tensor partial;  // reduced over the shard axis, not yet over the replicas
  };
  struct Reduction {
    std::shared_ptr<Bucket> bucket;
    at::Tensor input, output;
    std::unique_ptr<comm::Pending> pending;
  };
  void allocate_input(Bucket& bucket);
  void free_input(Reduction& reduction);
  void note_param_bytes(int64_t n);
  void note_gradient_bytes(int64_t n);
  void plan_gathers();
  bool one_form() const;
  at::Tensor gather_input() const;
  void assemble(const at::Tensor& source) const;
  void run_hook(const at::Tensor& output) const;
  void zero_absent(Bucket& bucket);
  void average(Bucket& bucket, at::Tensor& output);
  at::Tensor on_host(const at::Tensor& rows) const;
  at::TensorOptions shard_options() const;
  at::Tensor rows_of(const Bucket& bucket, size_t i, const at::Tensor& output) const;
  at::ScalarType reduce_dtype(const ShardedParam& param) const;

  std::string name_, gather_label_, reduce_label_;
  DeviceMesh mesh_;
  DtypePolicy policy_;
  GroupFlags flags_;
  std::shared_ptr<Context> context_;
  std::shared_ptr<Streams> streams_;  // of the context, on device_
  std::shared_ptr<comm::Channel> reduce_channel_, replica_channel_;
  std::shared_ptr<CustomAllGather> custom_gather_;
  bool custom_reduce_ = false;
  std::function<void(const at::Tensor&)> all_reduce_hook_, custom_all_reduce_;
  std::function<at::Tensor(const at::Tensor&)> gradient_hook_;
  base::Stream hook_stream_;
  int64_t world_ = 1, rank_ = 0, replicas_ = 1;
  std::optional<Offload> offload_;
  c10::Device device_;  // of leaves and collectives

  std::vector<std::unique_ptr<ShardedParam>> params_;  // wider dtypes first, so that no view is misaligned
  at::Tensor flat_shard_;                              // bytes; not in place
  int64_t sharded_bytes_ = 0;
  bool assembled_ = false;  // shards are not gathered as they are: they are cast, or have extensions
  bool extended_ = false;

  /// Consecutive ranks over which leaves are cut and gathered.
  struct Span {
    std::shared_ptr<comm::Channel> channel;
    std::shared_ptr<const shard::FlatLayout> layout;  // in bytes of the gathered dtypes
    int64_t rank = 0;
    int64_t length() const { return layout->segments().length(rank); }
  };
  Span span_over(std::shared_ptr<comm::Channel> channel, int64_t rank) const;
  /// What gathers fill, in the order of a span's layout: the k-th of param's gathered().
  struct Target {
    ShardedParam* param;
    size_t k;
    const at::Tensor& tensor() const { return param->gathered()[k]; }
    char* bytes() const { return base::storage_bytes(tensor()); }
    int64_t nbytes() const { return tensor().numel() * static_cast<int64_t>(tensor().element_size()); }
    at::ScalarType dtype() const { return tensor().scalar_type(); }
    shard::FlatLayout::Array array(int64_t world) const;
  };
  std::vector<Target> targets_;
  /// Where each target begins, in bytes, if they all lie in one buffer; at last how long that is.
  std::vector<int64_t> side_by_side() const;
  Span axis_;                 // the whole shard axis
  std::optional<Span> part_;  // of which some are kept between forward and backward
  at::Tensor part_bytes_;
  bool from_part_ = false;

  std::shared_ptr<comm::CommonMemory> common_;                      // the targets one after another, whole
  std::vector<int64_t> common_at_;                                  // where, in bytes
  std::vector<std::pair<at::Tensor, ShardedParam*>> copied_there_;  // parts that are not the shards themselves
  bool opened_ = false;

  GatherState state_ = GatherState::kSharded;
  bool leaves_allocated_ = false;
  /// An all-gather under way, into the leaves or into nothing.
  class Destination;
  struct Gather {
    std::shared_ptr<Destination> destination;
    at::Tensor source;
    std::unique_ptr<comm::Pending> pending;
    int64_t held_bytes = 0;
    std::optional<c10::Event> issued{};  // on the gather stream, where there is one
  };
  Gather start_gather(ParamGroup* into);
  void end_gather(Gather& gather);
  void allocate_leaves();
  void free_leaves();
  void refuse_in_place(const char* what) const;
  void place_segment(const shard::FlatLayout& layout, int64_t rank, const char* bytes);
  void place_whole(const shard::FlatLayout& layout, const char* bytes);
  bool list_pieces(const shard::FlatLayout& layout, int64_t rank, std::vector<comm::Piece>& into);
  std::optional<Gather> gathering_;
  std::vector<Gather> discarded_;

  std::vector<std::shared_ptr<Bucket>> buckets_;
  std::deque<Reduction> reductions_;
  std::vector<std::pair<ShardedParam*, at::Tensor>> offloaded_;  // gradients that are on their way to the host
};

}  // namespace fsdp::engine
