#pragma once
#include <cstdint>

namespace fsdp::base {

/// Makes `hash` depend on `value`, and on the order of such calls. The same on every rank.
inline void mix(uint64_t& hash, uint64_t value) { hash = (hash ^ value) * 0x9E3779B97F4A7C15ull + (hash >> 29); }

}  // namespace fsdp::base
