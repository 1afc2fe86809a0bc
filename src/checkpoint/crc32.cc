#include "checkpoint/crc32.h"

#include <array>
#include <bit>
#include <cstring>

namespace fsdp::checkpoint {
namespace {

constexpr size_t kStride = 16;  // bytes that one round folds in
using Table = std::array<std::array<uint32_t, 256>, kStride>;

// tables[k][b]: the remainder of byte b followed by k zero bytes.
constexpr Table make_tables() {
  Table tables{};
  for (uint32_t b = 0; b < 256; ++b) {
    uint32_t r = b;
    for (int bit = 0; bit < 8; ++bit) {
      r = (r >> 1) ^ ((r & 1) ? 0xEDB88320u : 0u);
    }
    tables[0][b] = r;
  }
  for (size_t k = 1; k < kStride; ++k) {
    for (uint32_t b = 0; b < 256; ++b) {
      const uint32_t r = tables[k - 1][b];
      tables[k][b] = (r >> 8) ^ tables[0][r & 0xFF];
    }
  }
  return tables;
}

constexpr Table kTables = make_tables();
static_assert(std::endian::native == std::endian::little, "the rounds below read words in little-endian order");

inline uint32_t fold(uint32_t word, size_t zeros_behind) {
  return kTables[zeros_behind + 3][word & 0xFF] ^ kTables[zeros_behind + 2][(word >> 8) & 0xFF] ^
         kTables[zeros_behind + 1][(word >> 16) & 0xFF] ^ kTables[zeros_behind][word >> 24];
}

}  // namespace

uint32_t crc32(const void* data, size_t size, uint32_t before) {
  const auto* bytes = static_cast<const unsigned char*>(data);
  uint32_t crc = ~before;
  for (; size >= kStride; size -= kStride, bytes += kStride) {
    uint32_t words[4];
    std::memcpy(words, bytes, kStride);
    crc = fold(words[0] ^ crc, 12) ^ fold(words[1], 8) ^ fold(words[2], 4) ^ fold(words[3], 0);
  }
  for (; size > 0; --size, ++bytes) {
    crc = (crc >> 8) ^ kTables[0][(crc ^ *bytes) & 0xFF];
  }
  return ~crc;
}

}  // namespace fsdp::checkpoint
