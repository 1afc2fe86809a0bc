#pragma once
#include <algorithm>
#include <cstdint>

namespace fsdp::engine {

/// Bytes alive and collectives issued, of one model on one rank. Tests check promises against it.
struct Stats {
  struct Bytes {
    int64_t now = 0;
    int64_t peak = 0;
    void add(int64_t n) {
      now += n;
      peak = std::max(peak, now);
    }
  };
  Bytes unsharded_params;     // leaves with bytes, and gather buffers not yet copied out
  Bytes unsharded_gradients;  // inputs of reductions, accumulated or in flight
  int64_t gathers = 0, reduces = 0, all_reduces = 0, agreements = 0;
};

}  // namespace fsdp::engine
