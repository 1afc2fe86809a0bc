#pragma once
#include <ATen/core/Tensor.h>

#include "base/memory.h"
#include "shard/layout.h"

/// A run's pieces (shard::FlatLayout::Run) in the two places where they lie.
namespace fsdp::engine {

using Run = shard::FlatLayout::Run;

/// As a tensor {slabs, count, length}, in the rank-major buffer `flat` ...
inline at::Tensor run_in_flat(const at::Tensor& flat, const Run& run) {
  return flat.as_strided({run.slabs, run.count, run.length}, {run.length, run.flat_stride, 1},
                         flat.storage_offset() + run.flat);
}
/// ... and in the array's own elements, which are 1-D.
inline at::Tensor run_in_array(const at::Tensor& array, const Run& run) {
  return array.as_strided({run.slabs, run.count, run.length}, {run.slab_stride, run.length, 1},
                          array.storage_offset() + run.at);
}

namespace detail {

struct Side {
  int64_t slab, piece;  // how far apart, in units
};

inline void copy_pieces(char* to, Side out, const char* from, Side in, const Run& run, int64_t unit,
                        c10::Device device) {
  const bool by_slab = run.slabs < run.count;  // the longer loop inside
  const int64_t rounds = by_slab ? run.slabs : run.count, count = by_slab ? run.count : run.slabs;
  if (!by_slab) {
    std::swap(out.slab, out.piece);
    std::swap(in.slab, in.piece);
  }
  for (int64_t i = 0; i < rounds; ++i) {
    base::copy_blocks(to + i * out.slab * unit, out.piece * unit, from + i * in.slab * unit, in.piece * unit,
                      run.length * unit, count, device);
  }
}

}  // namespace detail

/// Copies a run's pieces, of `unit` bytes a unit, from the buffer into the array ...
inline void copy_to_array(char* array, const char* flat, const Run& run, int64_t unit, c10::Device device) {
  detail::copy_pieces(array + run.at * unit, {run.slab_stride, run.length}, flat + run.flat * unit,
                      {run.length, run.flat_stride}, run, unit, device);
}
/// ... and back.
inline void copy_to_flat(char* flat, const char* array, const Run& run, int64_t unit, c10::Device device) {
  detail::copy_pieces(flat + run.flat * unit, {run.length, run.flat_stride}, array + run.at * unit,
                      {run.slab_stride, run.length}, run, unit, device);
}

}  // namespace fsdp::engine
