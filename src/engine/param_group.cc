#include "engine/param_group.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <fsdp/error.h>

#include "base/memory.h"
#include "comm/custom_channel.h"
#include "engine/context.h"
#include "engine/naming_group.h"
#include "engine/plain_tensors.h"
#include "engine/run_views.h"
#include "mesh/mesh_state.h"

namespace fsdp::engine {
namespace {

int64_t width(at::ScalarType type) { return static_cast<int64_t>(c10::elementSize(type)); }

// A tensor of a Python class with operators of its own.
bool runs_operators(const at::Tensor& tensor) { return tensor.key_set().has(c10::DispatchKey::Python); }

// What the extension of `param` sends, as it was announced.
std::vector<at::Tensor> sent_by(const ShardedParam& param, int64_t world) {
  auto sent = param.extension()->send();
  const auto& expected = param.gathered();
  bool alike = sent.size() == expected.size();
  for (size_t k = 0; alike && k < sent.size(); ++k) {
    alike = sent[k].numel() * world == expected[k].numel() && sent[k].scalar_type() == expected[k].scalar_type();
  }
  if (!alike) {
    throw InvalidArgument(
        "libfsdp: the extension of parameter '" + param.name() +
        "' sends tensors of other sizes or dtypes than at first, or another number of them; they must "
        "stay the same");
  }
  return sent;
}

int64_t length_of_line(const std::vector<NamedParam>& params) {
  int64_t length = 0;
  for (const auto& param : params) {
    length += param.tensor.numel();
    if (param.tensor.scalar_type() == params[0].tensor.scalar_type()) continue;
    throw InvalidArgument(std::string("libfsdp: parameters of one flat group must have one dtype: '") + params[0].name +
                          "' is " + c10::toString(params[0].tensor.scalar_type()) + ", '" + param.name + "' is " +
                          c10::toString(param.tensor.scalar_type()) + "; wrap them apart, or cast one");
  }
  return length;
}

}  // namespace

ParamGroup::ParamGroup(std::string name, const std::vector<NamedParam>& params, const DeviceMesh& mesh,
                       const DtypePolicy& policy, Layout layout, std::optional<Offload> offload)
    : mesh_(mesh),
      policy_(policy),
      offload_(offload),
      device_(offload          ? offload->device
              : params.empty() ? c10::Device(mesh.device_type())
                               : params[0].tensor.device()) {
  at::NoGradGuard no_grad;
  c10::InferenceMode normal(false);
  set_name(std::move(name));
  const int64_t axis = mesh.ndim() - 1;  // the shard axis; a first axis replicates
  auto& state = *mesh.state();
  reduce_channel_ = state.axis_channel(axis, mesh::Lane::kReduce);
  world_ = mesh.shape()[axis];
  rank_ = mesh.coordinate(axis);
  if (axis > 0) {
    replica_channel_ = state.axis_channel(0, mesh::Lane::kReduce);
    replicas_ = mesh.shape()[0];
  }

  std::vector<const NamedParam*> sorted;
  for (const auto& param : params) sorted.push_back(&param);
  std::stable_sort(sorted.begin(), sorted.end(), [](const NamedParam* a, const NamedParam* b) {
    return width(a->tensor.scalar_type()) > width(b->tensor.scalar_type());
  });

  int64_t line = 0, lead = 0;
  if (layout == Layout::kFlat) line = length_of_line(params);
  std::vector<shard::FlatLayout::Array> stored;
  const auto leaf_options = at::TensorOptions().device(device_);
  for (const auto* param : sorted) {
    const auto& tensor = param->tensor;
    const bool casts = policy.param_dtype && tensor.is_floating_point() && *policy.param_dtype != tensor.scalar_type();
    const auto dtype = casts ? *policy.param_dtype : tensor.scalar_type();
    const bool own = param->shard.defined() || runs_operators(tensor);
    assembled_ = assembled_ || casts || own;
    const auto cut = layout == Layout::kFlat ? Cut{0, line, lead} : Cut{param->dim};
    params_.push_back(std::make_unique<ShardedParam>(this, param->name, tensor, cut, leaf_options.dtype(dtype)));
    auto& p = *params_.back();
    lead += p.numel();
    p.index_ = params_.size() - 1;
    stored.push_back(own ? shard::FlatLayout::Array{0, 1} : p.array(width(tensor.scalar_type())));
  }
  const shard::FlatLayout store(stored, world_);
  plan_gathers();

  PlainTensors plain;
  sharded_bytes_ = store.segments().length(rank_);
  flat_shard_ = base::empty({store.segments().length(rank_)}, shard_options().dtype(at::kByte));
  for (size_t i = 0; i < params_.size(); ++i) {
    auto& param = *params_[i];
    if (sorted[i]->shard.defined()) {
      param.attach_shard(sorted[i]->shard);
      continue;
    }
    const auto part = param.part_of(sorted[i]->tensor, rows_here(param));
    if (runs_operators(part)) {
      param.attach_shard(part.clone(at::MemoryFormat::Contiguous).to(shard_options().device()));
      continue;
    }
    auto view = flat_shard_.narrow(0, store.local_offset(i, rank_), store.local_length(i, rank_));
    auto local = view.view(param.dtype()).view(part.sizes());
    local.copy_(part);
    // Its own storage handle with a fresh impl: the version counter is then the leaf's alone.
    param.attach_shard(local.alias());
  }
}

at::TensorOptions ParamGroup::shard_options() const {
  if (!offload_) return at::TensorOptions().device(device_);
  return at::TensorOptions().device(at::kCPU).pinned_memory(offload_->pin_memory);
}

ParamGroup::Span ParamGroup::span_over(std::shared_ptr<comm::Channel> channel, int64_t rank) const {
  std::vector<shard::FlatLayout::Array> gathered;
  for (const auto& target : targets_) gathered.push_back(target.array(channel->size()));
  auto layout = std::make_shared<shard::FlatLayout>(std::move(gathered), channel->size());
  return {std::move(channel), std::move(layout), rank};
}

shard::FlatLayout::Array ParamGroup::Target::array(int64_t world) const {
  if (!param->extension()) return param->array(width(dtype()));
  return {world, tensor().numel() / world * width(dtype())};
}

bool ParamGroup::one_form() const {
  return std::all_of(targets_.begin(), targets_.end(),
                     [&](const Target& target) { return target.dtype() == targets_[0].dtype(); });
}

void ParamGroup::plan_gathers() {
  targets_.clear();
  for (const auto& param : params_) {
    for (size_t k = 0; k < param->gathered().size(); ++k) targets_.push_back({param.get(), k});
  }
  // As in the store: so that no view of the assembled bytes is misaligned.
  std::stable_sort(targets_.begin(), targets_.end(),
                   [](const Target& a, const Target& b) { return width(a.dtype()) > width(b.dtype()); });
  auto channel = mesh_.state()->axis_channel(mesh_.ndim() - 1, mesh::Lane::kGather);
  if (custom_gather_) {
    const auto dtype = one_form() && !targets_.empty() ? targets_[0].dtype() : at::kByte;
    channel = std::make_shared<comm::CustomChannel>(std::move(channel), custom_gather_, nullptr, dtype);
  }
  axis_ = span_over(std::move(channel), rank_);
}

void ParamGroup::set_name(std::string name) {
  name_ = std::move(name);
  gather_label_ = "libfsdp::all_gather " + name_;
  reduce_label_ = "libfsdp::reduce_scatter " + name_;
}

void ParamGroup::note_param_bytes(int64_t n) {
  if (context_) context_->stats().unsharded_params.add(n);
}

void ParamGroup::note_gradient_bytes(int64_t n) {
  if (context_) context_->stats().unsharded_gradients.add(n);
}

bool ParamGroup::is_inside(const ParamGroup& other) const {
  const auto* leader = other.place.leader;
  for (const auto* group = this; group; group = group->place.parent) {
    if (group == &other || (leader && group->place.leader == leader)) return true;
  }
  return false;
}

// --- parameters -----------------------------------------------------------------------------------------------------

/// What was gathered goes into the leaves of a group, or nowhere if there is none (any more).
class ParamGroup::Destination final : public comm::Placement {
 public:
  Destination(ParamGroup* into, std::shared_ptr<const shard::FlatLayout> layout)
      : group(into), layout_(std::move(layout)) {}
  void segment(int64_t rank, const void* bytes) override {
    if (group) group->place_segment(*layout_, rank, static_cast<const char*>(bytes));
  }
  void whole(const void* bytes) override {
    if (group) group->place_whole(*layout_, static_cast<const char*>(bytes));
  }
  bool pieces(int64_t rank, std::vector<comm::Piece>& into) override {
    return !group || group->list_pieces(*layout_, rank, into);
  }
  ParamGroup* group;

 private:
  std::shared_ptr<const shard::FlatLayout> layout_;
};

ParamGroup::~ParamGroup() {
  if (gathering_) gathering_->destination->group = nullptr;
  if (context_) context_->remove(*this);
}

at::Tensor ParamGroup::gather_input() const {
  if (from_part_) return part_bytes_;
  return assembled_ || offload_ ? axis_.channel->buffer(axis_.length(), device_) : flat_shard_;
}

void ParamGroup::assemble(const at::Tensor& source) const {
  std::vector<std::vector<at::Tensor>> sent(params_.size());
  for (const auto& param : params_) {
    if (param->extension()) sent[param->index()] = sent_by(*param, world_);
  }
  for (size_t i = 0; i < targets_.size(); ++i) {
    const auto& target = targets_[i];
    const auto& from = target.param->extension() ? sent[target.param->index()][target.k] : target.param->shard();
    const auto place = source.narrow(0, axis_.layout->local_offset(i, rank_), axis_.layout->local_length(i, rank_));
    place.view(target.dtype()).copy_(from.reshape({-1}), /*non_blocking=*/offload_.has_value());
  }
}

ParamGroup::Gather ParamGroup::start_gather(ParamGroup* into) {
  RECORD_FUNCTION(gather_label_, {});
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  PlainTensors plain;
  const auto& span = from_part_ ? *part_ : axis_;
  streams_->before_gather();
  const base::OnStream lane(streams_->gather);
  Gather gather{std::make_shared<Destination>(into, span.layout), gather_input(), nullptr};
  std::exception_ptr failed;
  if (offload_ && !assembled_ && !from_part_) gather.source.copy_(flat_shard_, /*non_blocking=*/true);
  if (assembled_ && !from_part_) {
    try {
      assemble(gather.source);
    } catch (...) {
      // The other ranks count on this gather. They get NaNs, and the error when they next meet.
      failed = std::current_exception();
      gather.source.fill_(0xff);
      gather.destination->group = nullptr;
    }
  }
  gather.pending = span.channel->all_gather_to(gather.destination, gather.source, span.layout->segments());
  gather.issued = streams_->gather.mark();
  gather.held_bytes = gather.pending->held_bytes();
  note_param_bytes(gather.held_bytes);
  if (failed) {
    discarded_.push_back(std::move(gather));
    std::rethrow_exception(failed);
  }
  return gather;
}

void ParamGroup::end_gather(Gather& gather) {
  if (gather.issued) base::Stream::current(device_).wait_for(*gather.issued);
  naming_group(name_, "all-gather", [&] { gather.pending->wait(); });
  streams_->after_copy_out(std::move(gather.pending));
  note_param_bytes(-gather.held_bytes);
}

void ParamGroup::begin_gather() {
  TORCH_INTERNAL_ASSERT(state_ == GatherState::kSharded);
  gathering_ = start_gather(this);
  for (auto& param : params_) param->filled_version_ = param->version();
  state_ = GatherState::kGathering;
}

void ParamGroup::finish_gather() {
  TORCH_INTERNAL_ASSERT(state_ == GatherState::kGathering);
  end_gather(*gathering_);
  gathering_.reset();
  allocate_leaves();  // those of a group without a single byte
  state_ = GatherState::kUnsharded;
  if (!extended_) return;
  for (const auto& param : params_) {
    if (param->extension()) param->extension()->receive(param->gathered());
  }
}

std::vector<int64_t> ParamGroup::side_by_side() const {
  constexpr int64_t kLine = 64;  // bytes: no two parameters in one line of a cache
  std::vector<int64_t> at{0};
  for (const auto& target : targets_) at.push_back(at.back() + (target.nbytes() + kLine - 1) / kLine * kLine);
  return at;
}

void ParamGroup::allocate_leaves() {
  if (leaves_allocated_) return;
  leaves_allocated_ = true;
  if (device_.is_cpu() && context_ && unsharded_bytes() >= base::kHugeBuffer) {
    // One buffer for all: groups of a size, as the blocks of a model are, take turns in it.
    const auto at = side_by_side();
    const auto memory = context_->leaf_memory().take(at.back(), at::TensorOptions(at::kByte));
    for (size_t i = 0; i < targets_.size(); ++i) {
      base::share_storage(targets_[i].tensor(), memory, at[i], targets_[i].nbytes());
    }
  } else {
    for (auto& param : params_) param->allocate_gathered();
  }
  note_param_bytes(unsharded_bytes());
}

void ParamGroup::place_segment(const shard::FlatLayout& layout, int64_t rank, const char* bytes) {
  allocate_leaves();
  for (size_t i = 0; i < targets_.size(); ++i) {
    const auto part = layout.part(i, rank);
    if (part.length == 0) continue;
    base::copy_blocks(targets_[i].bytes() + part.at, part.stride, bytes + layout.local_offset(i, rank), part.length,
                      part.length, part.count, device_);
  }
}

bool ParamGroup::list_pieces(const shard::FlatLayout& layout, int64_t rank, std::vector<comm::Piece>& into) {
  constexpr int64_t kWorthAPiece = 4096;  // bytes; smaller ones are copied faster than listed
  if (!device_.is_cpu()) return false;
  allocate_leaves();
  for (size_t i = 0; i < targets_.size(); ++i) {
    const auto part = layout.part(i, rank);
    if (part.count > 1 && part.length < kWorthAPiece) return false;
    for (int64_t slab = 0; slab < part.count; ++slab) {
      into.push_back({targets_[i].bytes() + part.at + slab * part.stride, part.length});
    }
  }
  return true;
}

void ParamGroup::place_whole(const shard::FlatLayout& layout, const char* bytes) {
  allocate_leaves();
  for (size_t i = 0; i < targets_.size(); ++i) {
    char* to = targets_[i].bytes();
    layout.for_each_run(i, [&](const Run& run) { copy_to_array(to, bytes, run, 1, device_); });
  }
}

void ParamGroup::reshard() {
  if (state_ == GatherState::kGathering) {
    gathering_->destination->group = nullptr;
    discarded_.push_back(std::move(*gathering_));
    gathering_.reset();
  }
  free_leaves();
  state_ = GatherState::kSharded;
}

void ParamGroup::free_leaves() {
  if (!leaves_allocated_ && !opened_) return;
  for (auto& param : params_) param->release_gathered();
  // By operators nothing can have been written there (write_back()), but by a pointer it can.
  if (std::exchange(opened_, false)) common_->drop_own_writes();
  if (std::exchange(leaves_allocated_, false)) note_param_bytes(-unsharded_bytes());
}

// --- other ways to gather -------------------------------------------------------------------------------------------

void ParamGroup::set_custom_gather(std::shared_ptr<CustomAllGather> gather) {
  if (gather) refuse_in_place("a custom all-gather");
  if (gather && part_) {
    throw NotSupported(
        "libfsdp: group '" + name_ +
        "' has a number for reshard_after_forward, so its backward gathers over fewer ranks than a custom "
        "all-gather is for; use true or false");
  }
  custom_gather_ = std::move(gather);
  plan_gathers();
}

void ParamGroup::set_extension(ShardedParam& param, std::shared_ptr<Extension> extension,
                               const std::vector<at::Tensor>& like) {
  if (part_) {
    throw NotSupported("libfsdp: parameter '" + param.name() + "' of group '" + name_ +
                       "' has an extension, which gathers over the whole shard axis alone, and the group a number for "
                       "reshard_after_forward; use true or false");
  }
  refuse_in_place("an extension");
  at::NoGradGuard no_grad;
  c10::InferenceMode normal(false);
  reshard();
  std::vector<at::Tensor> receives;
  for (const auto& tensor : like) {
    auto sizes = tensor.dim() == 0 ? std::vector<int64_t>{1} : tensor.sizes().vec();
    sizes[0] *= world_;
    receives.push_back(at::empty(sizes, at::TensorOptions().dtype(tensor.scalar_type()).device(device_)));
  }
  param.set_extension(std::move(extension), std::move(receives));
  extended_ = assembled_ = true;
  plan_gathers();
}

void ParamGroup::set_custom_reduce(std::shared_ptr<CustomReduceScatter> reduce) {
  if (reduce) refuse_in_place("a custom reduce-scatter");
  custom_reduce_ = reduce != nullptr;
  reduce_channel_ = mesh_.state()->axis_channel(mesh_.ndim() - 1, mesh::Lane::kReduce);
  if (reduce) reduce_channel_ = std::make_shared<comm::CustomChannel>(reduce_channel_, nullptr, std::move(reduce));
}

void ParamGroup::set_all_reduce_hook(std::function<void(const at::Tensor&)> hook, std::optional<c10::Stream> stream) {
  all_reduce_hook_ = std::move(hook);
  hook_stream_ = stream && base::Stream::current(device_) ? base::Stream(*stream) : base::Stream();
}

void ParamGroup::set_custom_all_reduce(std::function<void(const at::Tensor&)> reduce) {
  if (world_ > 1) {
    throw InvariantError("libfsdp: group '" + name_ + "' is cut over " + std::to_string(world_) +
                         " ranks: its gradients are reduced and scattered");
  }
  custom_all_reduce_ = std::move(reduce);
}

void ParamGroup::run_hook(const at::Tensor& output) const {
  hook_stream_.wait_for(streams_->reduce);
  {
    const base::OnStream lane(hook_stream_);
    all_reduce_hook_(output);
  }
  streams_->reduce.wait_for(hook_stream_);
}

void ParamGroup::keep_over(int64_t ranks) {
  if (ranks > 0) refuse_in_place("a number for reshard_after_forward");
  drop_part();
  part_.reset();
  if (ranks == 0) return;
  if (extended_) {
    throw NotSupported("libfsdp: group '" + name_ +
                       "' has parameters with an extension, which gathers over the whole shard axis alone; use true or "
                       "false for reshard_after_forward");
  }
  const int64_t axis = mesh_.ndim() - 1;
  part_ = span_over(mesh_.state()->part_channel(axis, ranks, mesh::Lane::kGather), rank_ % ranks);
}

void ParamGroup::keep_part() {
  if (!part_ || state_ != GatherState::kUnsharded) return;
  PlainTensors plain;
  const auto& layout = *part_->layout;
  part_bytes_ = base::empty({part_->length()}, at::TensorOptions().dtype(at::kByte).device(device_));
  for (size_t i = 0; i < targets_.size(); ++i) {
    const auto part = layout.part(i, part_->rank);
    auto* to = static_cast<char*>(part_bytes_.data_ptr()) + layout.local_offset(i, part_->rank);
    base::copy_blocks(to, part.length, targets_[i].bytes() + part.at, part.stride, part.length, part.count, device_);
  }
}

at::Tensor ParamGroup::part_of(const ShardedParam& param) const {
  PlainTensors plain;
  const auto& layout = *part_->layout;
  const auto i = static_cast<size_t>(
      std::find_if(targets_.begin(), targets_.end(), [&](const Target& target) { return target.param == &param; }) -
      targets_.begin());
  return part_bytes_.narrow(0, layout.local_offset(i, part_->rank), layout.local_length(i, part_->rank))
      .view(param.leaf().scalar_type())
      .view(param.part_sizes(param.rows_of(layout.world(), part_->rank).size()));
}

void ParamGroup::join_gather() {
  if (world_ == 1) return;
  discarded_.push_back(start_gather(nullptr));
}

void ParamGroup::drop_discarded() {
  for (auto& gather : discarded_) end_gather(gather);
  discarded_.clear();
}

bool ParamGroup::stale() const {
  return std::any_of(params_.begin(), params_.end(),
                     [](const auto& param) { return param->filled_version_ != param->version(); });
}

void ShardedParam::write_back() {
  at::NoGradGuard no_grad;
  PlainTensors plain;
  if (leaf_.scalar_type() != dtype_) {
    throw NotSupported("libfsdp: parameter '" + name_ +
                       "' was written in place inside forward while a mixed precision policy gathers it in another "
                       "dtype; the write cannot be kept. Write it outside forward, under no_grad.");
  }
  if (extension_) {
    throw NotSupported("libfsdp: parameter '" + name_ +
                       "' was written in place inside forward, where it is what its extension made of what was sent; "
                       "the write cannot be kept. Write it outside forward, under no_grad.");
  }
  if (group_->opened()) {
    throw NotSupported("libfsdp: parameter '" + name_ +
                       "' was written in place inside forward or backward, while other ranks read the same memory "
                       "(set_symm_mem_for_comm). Write it between steps, under no_grad.");
  }
  // The leaf's key would send this through the fallback again; its bytes are here.
  c10::impl::ExcludeDispatchKeyGuard below_key(kKey);
  shard_.copy_(part_of(leaf_, group_->rows_here(*this)));
  group_->context().set_optimizer_event(nullptr);  // it was not the last write
  filled_version_ = version();
}

}  // namespace fsdp::engine
