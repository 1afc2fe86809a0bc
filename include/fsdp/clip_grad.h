#pragma once
#include <vector>

#include <ATen/core/Tensor.h>
#include <fsdp/export.h>

namespace fsdp {

/// Scales the gradients of `parameters` in place so that their joint norm is at most `max_norm`; returns the norm
/// before (a 0-dim tensor, equal on every rank).
/// norm_type: 1, 2, infinity, or any positive order. Parameters may be sharded on several meshes, or plain; those
/// without a gradient are skipped. Parameters over a mesh of their own count for each such mesh that the model's ranks
/// make up (all experts). Along axes that are not data-parallel (dp_mesh_dims) norms are each rank's own: join them
/// before you scale. Collective: one all-reduce a mesh, two for a mesh of its own.
/// InvalidArgument if norm_type is not positive; Error if error_if_nonfinite and the norm is NaN or infinite.
FSDP_API at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm, double norm_type = 2.0,
                                    bool error_if_nonfinite = false);

}  // namespace fsdp
