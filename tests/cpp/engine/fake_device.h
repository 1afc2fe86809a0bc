#pragma once
#include <string>
#include <vector>

#include <c10/core/Device.h>

/// A device with streams in host memory (PrivateUse1), for tests of the order in which streams wait for each other.
/// Work is done at once, on the host, by the CPU's kernels; only the order that the streams promise is modelled: each
/// stream and event has a vector clock, and each access to a block of memory is checked against those before it. Two
/// accesses of which one writes, that no wait puts in an order, are a race. A freed block belongs to the next that
/// allocates on the same stream, as with caching allocators; that its uses elsewhere are not over then is a race too.
namespace fsdp::testing::fake_device {

inline const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);

/// Forgets the past of this thread's device: each thread has one of its own.
void reset();
/// Races since reset(), in words.
const std::vector<std::string>& races();
/// How much of the work of stream `of` is done before what comes next on `stream`; seen(s, s) is all of it.
int64_t seen(int64_t stream, int64_t of);
/// How much of the work of `stream` the host has waited for.
int64_t waited_for(int64_t stream);
/// The stream that this thread's work is on from now on. It begins on 0; streams of the pool count from 1.
void use_stream(int64_t id);

}  // namespace fsdp::testing::fake_device
