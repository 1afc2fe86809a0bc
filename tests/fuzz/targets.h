#pragma once
#include <cstddef>
#include <cstdint>

/// What a fuzzer feeds. Each takes any bytes, and aborts if a reader of hostile input breaks a promise: it may throw
/// its own error, or give a result whose every number was checked.
namespace fsdp::fuzz {

/// The bytes are a safetensors file.
void header(const uint8_t* data, size_t size);
/// The bytes are an index.json, from behind its checksum on.
void index(const uint8_t* data, size_t size);

}  // namespace fsdp::fuzz
