#pragma once
#include <vector>

#include <ATen/core/Tensor.h>

namespace fsdp::engine {

/// What the gathers of one parameter move in the place of its shard, and what is made of it (a quantized form, say).
/// Its methods are called on whatever thread gathers, and may throw.
class Extension {
 public:
  virtual ~Extension() = default;
  /// Ahead of a gather: what this rank sends. As many tensors, of the same sizes and dtypes, each time and on every
  /// rank.
  virtual std::vector<at::Tensor> send() = 0;
  /// After it: each of them from every rank, joined along dim 0. The same tensors each time; their bytes, and those of
  /// views of them, are there until release().
  virtual void receive(const std::vector<at::Tensor>& received) = 0;
  /// The parameter is freed: so is what receive() made of it.
  virtual void release() noexcept = 0;
};

}  // namespace fsdp::engine
