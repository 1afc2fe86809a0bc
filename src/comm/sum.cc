#include "comm/sum.h"

#include <algorithm>
#include <cmath>

#include <c10/util/BFloat16.h>
#include <c10/util/complex.h>
#include <c10/util/Half.h>
#include <c10/util/StringUtil.h>
#include <fsdp/error.h>

namespace fsdp::comm {
namespace {

// Elements that are reduced over all parts before the next: the accumulator stays in the first-level cache.
constexpr int64_t kBlock = 2048;

struct Sum {
  template <class T>
  static T apply(T a, T b) {
    return a + b;
  }
};
// A value that is not a number wins, as in torch.
struct Max {
  template <class T>
  static T apply(T a, T b) {
    return (a > b || a != a) ? a : b;
  }
};
struct Min {
  template <class T>
  static T apply(T a, T b) {
    return (a < b || a != a) ? a : b;
  }
};

template <class T, class Accumulator, class Op>
void reduce(void* out_bytes, const std::vector<const void*>& parts, int64_t count) {
  T* out = static_cast<T*>(out_bytes);
  alignas(64) Accumulator sum[kBlock];
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    const T* first = static_cast<const T*>(parts[0]) + begin;
    if (parts.size() == 2) {
      const T* second = static_cast<const T*>(parts[1]) + begin;
      for (int64_t i = 0; i < n; ++i) {
        out[begin + i] =
            static_cast<T>(Op::apply(static_cast<Accumulator>(first[i]), static_cast<Accumulator>(second[i])));
      }
      continue;
    }
    for (int64_t i = 0; i < n; ++i) sum[i] = static_cast<Accumulator>(first[i]);
    for (size_t p = 1; p < parts.size(); ++p) {
      const T* part = static_cast<const T*>(parts[p]) + begin;
      for (int64_t i = 0; i < n; ++i) sum[i] = Op::apply(sum[i], static_cast<Accumulator>(part[i]));
    }
    for (int64_t i = 0; i < n; ++i) out[begin + i] = static_cast<T>(sum[i]);
  }
}

const char* name_of(ReduceOp op) { return op == ReduceOp::kSum ? "sum" : op == ReduceOp::kMax ? "maximum" : "minimum"; }

template <class T, class Accumulator = T>
void reduce_as(void* out, const std::vector<const void*>& parts, int64_t count, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce<T, Accumulator, Sum>(out, parts, count);
    case ReduceOp::kMax:
      return reduce<T, Accumulator, Max>(out, parts, count);
    case ReduceOp::kMin:
      return reduce<T, Accumulator, Min>(out, parts, count);
  }
}

}  // namespace

void reduce_parts(void* out, const std::vector<const void*>& parts, int64_t count, at::ScalarType dtype, ReduceOp op) {
  switch (dtype) {
    case at::kFloat:
      return reduce_as<float>(out, parts, count, op);
    case at::kDouble:
      return reduce_as<double>(out, parts, count, op);
    case at::kBFloat16:
      return reduce_as<c10::BFloat16, float>(out, parts, count, op);
    case at::kHalf:
      return reduce_as<c10::Half, float>(out, parts, count, op);
    case at::kByte:
      return reduce_as<uint8_t>(out, parts, count, op);
    case at::kChar:
      return reduce_as<int8_t>(out, parts, count, op);
    case at::kShort:
      return reduce_as<int16_t>(out, parts, count, op);
    case at::kInt:
      return reduce_as<int32_t>(out, parts, count, op);
    case at::kLong:
      return reduce_as<int64_t>(out, parts, count, op);
    case at::kComplexFloat:
      if (op == ReduceOp::kSum) return reduce<c10::complex<float>, c10::complex<float>, Sum>(out, parts, count);
      break;
    case at::kComplexDouble:
      if (op == ReduceOp::kSum) return reduce<c10::complex<double>, c10::complex<double>, Sum>(out, parts, count);
      break;
    default:
      break;
  }
  throw NotSupported(c10::str("ranks of the CPU have no ", name_of(op), " of ", dtype, " tensors"));
}

}  // namespace fsdp::comm
