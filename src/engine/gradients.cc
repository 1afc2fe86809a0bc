// What a ParamGroup does with the gradients of its parameters (docs/design/gradients.md).
#include <algorithm>
#include <chrono>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/StringUtil.h>
#include <fsdp/error.h>

#include "base/huge_pages.h"
#include "engine/context.h"
#include "engine/naming_group.h"
#include "engine/param_group.h"
#include "engine/plain_tensors.h"
#include "engine/run_views.h"

namespace fsdp::engine {

at::ScalarType ParamGroup::reduce_dtype(const ShardedParam& param) const {
  if (!c10::isFloatingType(param.dtype())) return param.dtype();
  return policy_.reduce_dtype.value_or(policy_.param_dtype.value_or(param.dtype()));
}

void ParamGroup::capture(ShardedParam& param, const at::Tensor& gradient) { context_->on_gradient(param, gradient); }

void ParamGroup::update_membership() {
  bool changed = false;
  for (auto& param : params_) changed = changed || (param->wants_gradient() || param->held_) != param->in_bucket_;
  if (!changed) return;
  PlainTensors plain;
  at::NoGradGuard no_grad;
  // What is held goes into the new layout, parameter by parameter.
  std::vector<at::Tensor> held(params_.size());
  for (size_t i = 0; i < params_.size(); ++i) {
    auto& param = *params_[i];
    if (!param.held_) continue;
    auto& bucket = *buckets_[param.bucket_];
    held[i] = base::empty({param.numel()}, bucket.input.options());
    bucket.layout->for_each_run(
        param.bucket_index_, [&](const Run& run) { run_in_array(held[i], run).copy_(run_in_flat(bucket.input, run)); });
  }
  for (auto& bucket : buckets_) {
    if (bucket->input.defined()) note_gradient_bytes(-static_cast<int64_t>(bucket->input.nbytes()));
    TORCH_INTERNAL_ASSERT(!bucket->partial.defined(), "requires_grad changed while a replica sum is pending");
  }
  buckets_.clear();
  for (auto& param : params_) {
    param->in_bucket_ = param->wants_gradient() || param->held_;
    if (!param->in_bucket_) continue;
    const auto dtype = reduce_dtype(*param);
    auto found = std::find_if(buckets_.begin(), buckets_.end(), [&](const auto& b) { return b->dtype == dtype; });
    if (found == buckets_.end()) {
      buckets_.push_back(std::make_shared<Bucket>(Bucket{dtype, {}, nullptr, {}, {}}));
      found = buckets_.end() - 1;
    }
    param->bucket_ = found - buckets_.begin();
    param->bucket_index_ = (*found)->params.size();
    (*found)->params.push_back(param.get());
  }
  for (auto& bucket : buckets_) {
    std::vector<shard::FlatLayout::Array> arrays;
    for (auto* param : bucket->params) arrays.push_back(param->array(1));
    bucket->layout = std::make_unique<shard::FlatLayout>(std::move(arrays), world_);
  }
  for (size_t i = 0; i < params_.size(); ++i) {
    if (!held[i].defined()) continue;
    params_[i]->held_ = false;
    store_gradient(*params_[i], held[i].view(params_[i]->sizes()));
    --params_[i]->arrivals_;
  }
}

void ParamGroup::allocate_input(Bucket& bucket) {
  PlainTensors plain;
  const int64_t bytes = bucket.layout->segments().total() * static_cast<int64_t>(c10::elementSize(bucket.dtype));
  bucket.input = reduce_channel_->buffer(bytes, device_).view(bucket.dtype);
  note_gradient_bytes(bytes);
}

void ParamGroup::store_gradient(ShardedParam& param, at::Tensor gradient) {
  if (!param.in_bucket_) update_membership();
  auto& bucket = *buckets_[param.bucket_];
  if (!bucket.input.defined()) {
    allocate_input(bucket);
  }
  // A gradient may itself be a sharded tensor's alias (d(w.v)/dv is w): the dispatcher then finds its bytes.
  if (gradient.is_sparse()) gradient = gradient.to_dense();
  if (gradient.key_set().has(kKey)) gradient = gradient.clone();
  if (gradient.scalar_type() != bucket.dtype) gradient = gradient.to(bucket.dtype);
  gradient = gradient.contiguous();
  if (param.held_) {
    PlainTensors plain;
    const auto flat = gradient.view({-1});
    bucket.layout->for_each_run(param.bucket_index_,
                                [&](const Run& run) { run_in_flat(bucket.input, run).add_(run_in_array(flat, run)); });
  } else {
    const int64_t bytes = static_cast<int64_t>(c10::elementSize(bucket.dtype));
    char* to = static_cast<char*>(bucket.input.data_ptr());
    const char* from = static_cast<const char*>(gradient.const_data_ptr());
    bucket.layout->for_each_run(param.bucket_index_,
                                [&](const Run& run) { copy_to_flat(to, from, run, bytes, device_); });
  }
  param.held_ = true;
  ++param.arrivals_;
}

bool ParamGroup::holds_gradients() const {
  return std::any_of(params_.begin(), params_.end(), [](const auto& param) { return param->held_; });
}

bool ParamGroup::complete() const {
  return std::all_of(params_.begin(), params_.end(), [](const auto& param) {
    return !param->in_bucket_ || !param->touched_ || param->arrivals_ >= param->expected_arrivals_;
  });
}

void ParamGroup::zero_absent(Bucket& bucket) {
  for (auto* param : bucket.params) {
    if (param->held_) continue;
    bucket.layout->for_each_run(param->bucket_index_, [&](const Run& run) { run_in_flat(bucket.input, run).zero_(); });
  }
}

void ParamGroup::run_gradient_hook() {
  if (!gradient_hook_ || !holds_gradients()) return;
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  auto& bucket = *buckets_.at(0);
  at::Tensor line;
  {
    PlainTensors plain;
    zero_absent(bucket);
    line = bucket.input.narrow(0, 0, bucket.layout->segments().total());  // segments follow one another as in the line
  }
  const auto result = gradient_hook_(line);
  if (!result.is_same(line)) line.copy_(result);
}

void ParamGroup::begin_reduce() {
  RECORD_FUNCTION(reduce_label_, {});
  c10::InferenceMode normal(false);
  at::NoGradGuard no_grad;
  PlainTensors plain;
  for (auto& bucket : buckets_) {
    const auto options = at::TensorOptions().dtype(bucket->dtype).device(device_);
    const auto& segments = bucket->layout->segments();
    if (!bucket->input.defined()) {
      allocate_input(*bucket);
    }
    zero_absent(*bucket);
    // fp16 overflows in the sum: half of the division comes before it (finish_reduce does the rest).
    if (bucket->dtype == at::kHalf && !custom_all_reduce_) {
      bucket->input.mul_(1.0 / context_->pre_divide_factor(*this));
    }
    streams_->reduce.wait_for_current();
    const base::OnStream lane(streams_->reduce);
    Reduction reduction{bucket, std::move(bucket->input), {}, nullptr};
    if (world_ > 1) {
      reduction.output = base::empty({segments.length(rank_)}, options);
      reduction.pending = reduce_channel_->reduce_scatter(reduction.output, reduction.input, segments);
    } else {
      reduction.output = reduction.input;
    }
    bucket->input.reset();
    reductions_.push_back(std::move(reduction));
  }
  for (auto& param : params_) param->held_ = false;
}

bool ParamGroup::wait_inputs(std::chrono::milliseconds limit) {
  const auto until = std::chrono::steady_clock::now() + limit;
  for (auto& reduction : reductions_) {
    if (reduction.pending) {
      const base::OnStream lane(streams_->reduce);
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
      bool done = false;
      naming_group(name_, "reduce-scatter", [&] { done = reduction.pending->wait_for(left); });
      if (!done) return false;
    }
    streams_->reduce.hold_current();
    free_input(reduction);
  }
  return true;
}

void ParamGroup::free_input(Reduction& reduction) {
  if (reduction.input.defined()) note_gradient_bytes(-static_cast<int64_t>(reduction.input.nbytes()));
  reduction.pending.reset();
  reduction.input.reset();
}

void ParamGroup::average(Bucket& bucket, at::Tensor& output) {
  if (bucket.partial.defined()) {
    output.add_(bucket.partial);
    bucket.partial.reset();
  }
  if (replica_channel_ && replicas_ > 1) {
    if (!flags_.all_reduce_gradients) {
      bucket.partial = output;
      output.reset();
      return;
    }
    context_->count_all_reduce(*this);
    if (!custom_all_reduce_) {
      naming_group(name_, "all-reduce", [&] { replica_channel_->all_reduce(output, comm::ReduceOp::kSum)->wait(); });
    }
  }
  if (custom_all_reduce_) {
    const auto numel = output.numel();
    custom_all_reduce_(output);
    if (output.numel() == numel) return;
    throw InvalidArgument(c10::str("libfsdp: the custom all-reduce of group '", name_, "' left ", output.numel(),
                                   " elements of ", numel, "; it works in place"));
  }
  double factor = flags_.divide_factor > 0 ? flags_.divide_factor : static_cast<double>(world_ * replicas_);
  if (bucket.dtype == at::kHalf) factor /= context_->pre_divide_factor(*this);
  if (factor != 1 && c10::isFloatingType(bucket.dtype)) output.div_(factor);
  if (factor != 1 && c10::isComplexType(bucket.dtype)) output.div_(factor);
}

at::Tensor ParamGroup::rows_of(const Bucket& bucket, size_t i, const at::Tensor& output) const {
  const auto& param = *bucket.params[i];
  return output.narrow(0, bucket.layout->local_offset(i, rank_), bucket.layout->local_length(i, rank_))
      .view(param.shard().sizes());
}

void ParamGroup::finish_reduce(const uint8_t* used) {
  at::NoGradGuard no_grad;
  c10::InferenceMode normal(false);
  std::vector<Reduction> read;  // inputs that the reduce stream reads: freed once the current stream comes after that
  streams_->reduce.wait_for_current();
  std::optional<base::OnStream> lane(streams_->reduce);
  while (!reductions_.empty()) {
    auto reduction = std::move(reductions_.front());
    reductions_.pop_front();
    if (reduction.pending) naming_group(name_, "reduce-scatter", [&] { reduction.pending->wait(); });
    if (streams_->reduce) {
      read.push_back({reduction.bucket, std::move(reduction.input), {}, std::move(reduction.pending)});
    } else {
      free_input(reduction);
    }
    auto& bucket = *reduction.bucket;
    {
      PlainTensors plain;
      average(bucket, reduction.output);
    }
    if (!reduction.output.defined()) continue;
    if (all_reduce_hook_) run_hook(reduction.output);
    for (size_t i = 0; i < bucket.params.size(); ++i) {
      auto& param = *bucket.params[i];
      if (!used[param.index()]) continue;
      at::Tensor rows;
      {
        PlainTensors plain;
        rows = rows_of(bucket, i, reduction.output);
        if (!policy_.keep_reduced && rows.scalar_type() != param.dtype()) rows = rows.to(param.dtype());
        if (offload_) offloaded_.emplace_back(&param, on_host(rows));
      }
      if (!offload_) param.slot().accumulate_gradient(rows);
    }
  }
  lane.reset();
  streams_->reduce.hold_current();
  for (auto& reduction : read) free_input(reduction);
}

at::Tensor ParamGroup::on_host(const at::Tensor& rows) const {
  auto host = base::empty(rows.sizes(), shard_options().dtype(rows.scalar_type()));
  return host.copy_(rows, /*non_blocking=*/true);
}

void ParamGroup::finish_offload() {
  if (offloaded_.empty()) return;
  at::NoGradGuard no_grad;
  c10::InferenceMode normal(false);
  streams_->reduce.synchronize();
  wait_for_reads();
  for (const auto& [param, rows] : std::exchange(offloaded_, {})) param->slot().accumulate_gradient(rows);
}

void ParamGroup::wait_for_reads() const {
  if (offload_) streams_->gather.synchronize();
}

void ParamGroup::forget_touches() {
  place.touched = false;
  for (auto& param : params_) param->touched_ = false;
}

void ParamGroup::remember_arrivals() {
  for (auto& param : params_) {
    if (param->arrivals_ > 0) param->expected_arrivals_ = param->arrivals_;
    param->arrivals_ = 0;
  }
}

void ParamGroup::drop_gradients() {
  for (auto& reduction : reductions_) {
    if (reduction.pending) {
      try {
        reduction.pending->wait();
      } catch (const std::exception&) {
        // The iteration is being given up; what is lost here was reported when it was waited for.
      }
    }
    free_input(reduction);
  }
  reductions_.clear();
  offloaded_.clear();
  for (auto& bucket : buckets_) {
    if (bucket->input.defined()) note_gradient_bytes(-static_cast<int64_t>(bucket->input.nbytes()));
    bucket->input.reset();
    bucket->partial.reset();
  }
  for (auto& param : params_) {
    param->held_ = false;
    param->arrivals_ = 0;
  }
}

}  // namespace fsdp::engine
