#pragma once
#include <cstddef>
#include <cstdint>

namespace fsdp::checkpoint {

/// The CRC-32 of zlib, gzip and PNG: crc32(data, n, crc32(before, m)) continues one. About 2 GB/s.
uint32_t crc32(const void* data, size_t size, uint32_t before = 0);

}  // namespace fsdp::checkpoint
