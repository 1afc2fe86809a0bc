#pragma once
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <fsdp/device_mesh.h>
#include <fsdp/export.h>
#include <torch/optim/optimizer.h>

namespace fsdp {

struct GradScalerOptions {
  double init_scale = 65536;
  double growth_factor = 2;
  double backoff_factor = 0.5;
  int64_t growth_interval = 2000;
  /// False: step() steps, and nothing else does anything.
  bool enabled = true;
  /// False: unscale_ refuses float16 gradients, in which small values may be gone.
  bool allow_fp16_gradients = true;
};

/// What a scaler resumes from; see GradScalerOptions.
struct GradScalerState {
  double scale = 0;
  double growth_factor = 0;
  double backoff_factor = 0;
  int64_t growth_interval = 0;
  int64_t growth_tracker = 0;
};

/// Scales losses, so that gradients of low precision neither vanish nor overflow, for sharded and plain parameters:
///
///     scaler.scale(loss).backward();
///     scaler.unscale_(optimizer);  // only if the gradients are looked at, as to clip them
///     scaler.step(optimizer);      // unless a gradient is infinite or NaN on any rank
///     scaler.update();
///
/// Ranks of one mesh do alike: an overflow in one rank's shard makes all of them skip, and back off. An optimizer is
/// known by its address, from its first unscale_ or step until update().
class FSDP_API ShardedGradScaler {
 public:
  /// `mesh`: the ranks that must agree; without one all ranks of init_process_group.
  /// InvalidArgument: a growth factor of at most 1, a backoff factor of at least 1, an interval or a scale below 0.
  explicit ShardedGradScaler(const GradScalerOptions& options = {}, DeviceMesh mesh = {});
  ~ShardedGradScaler();

  /// `output` times the scale, of its dtype. Never communicates.
  at::Tensor scale(const at::Tensor& output) const;
  std::vector<at::Tensor> scale(const std::vector<at::Tensor>& outputs) const;

  /// Divides the gradients of the optimizer's parameters by the scale, in place. Any floating dtype; those of sparse
  /// layout InvalidArgument. Collective: one all-reduce of one number, on a rank without gradients too.
  /// Error: called twice before update(), or after step().
  void unscale_(torch::optim::Optimizer& optimizer);
  /// Steps if all gradients are finite, on all ranks; false where it did not. Unscales first if unscale_() was not
  /// called. Collective then. Error: called twice before update().
  bool step(torch::optim::Optimizer& optimizer);
  /// Ends an iteration: after a skipped step the scale is multiplied by the backoff factor; after growth_interval
  /// iterations in a row without one, by the growth factor. With `new_scale`, it is that instead.
  /// Error: no optimizer was unscaled.
  void update(std::optional<double> new_scale = std::nullopt);

  bool is_enabled() const;
  /// 1 if not enabled.
  double get_scale() const;
  double get_growth_factor() const;
  double get_backoff_factor() const;
  int64_t get_growth_interval() const;
  void set_growth_factor(double factor);
  void set_backoff_factor(double factor);
  void set_growth_interval(int64_t interval);

  /// Alike on all ranks.
  GradScalerState state_dict() const;
  /// InvalidArgument for values that the constructor refuses. Does nothing if not enabled.
  void load_state_dict(const GradScalerState& state);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fsdp
