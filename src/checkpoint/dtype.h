#pragma once
#include <cstdint>
#include <optional>
#include <string_view>

namespace fsdp::checkpoint {

/// Element types of the safetensors format that are whole bytes.
enum class DType : uint8_t {
  kBool,
  kU8,
  kI8,
  kF8E5M2,
  kF8E4M3,
  kF8E8M0,
  kI16,
  kU16,
  kF16,
  kBF16,
  kI32,
  kU32,
  kF32,
  kI64,
  kU64,
  kF64,
  kC64,
};

/// "F32"
std::string_view dtype_name(DType dtype);
std::optional<DType> dtype_from_name(std::string_view name);
/// Bytes of one element.
uint64_t dtype_size(DType dtype);

}  // namespace fsdp::checkpoint
