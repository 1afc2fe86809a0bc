#include "checkpoint/dtype.h"

#include <array>

namespace fsdp::checkpoint {
namespace {

struct Row {
  std::string_view name;
  uint64_t size;
};

// In the order of the enum.
constexpr std::array<Row, 17> kRows{{
    {"BOOL", 1},
    {"U8", 1},
    {"I8", 1},
    {"F8_E5M2", 1},
    {"F8_E4M3", 1},
    {"F8_E8M0", 1},
    {"I16", 2},
    {"U16", 2},
    {"F16", 2},
    {"BF16", 2},
    {"I32", 4},
    {"U32", 4},
    {"F32", 4},
    {"I64", 8},
    {"U64", 8},
    {"F64", 8},
    {"C64", 8},
}};
static_assert(kRows.size() == static_cast<size_t>(DType::kC64) + 1);

}  // namespace

std::string_view dtype_name(DType dtype) { return kRows[static_cast<size_t>(dtype)].name; }

uint64_t dtype_size(DType dtype) { return kRows[static_cast<size_t>(dtype)].size; }

std::optional<DType> dtype_from_name(std::string_view name) {
  for (size_t i = 0; i < kRows.size(); ++i) {
    if (kRows[i].name == name) {
      return static_cast<DType>(i);
    }
  }
  return std::nullopt;
}

}  // namespace fsdp::checkpoint
