#pragma once
#include <chrono>
#include <functional>

namespace fsdp::testing {

/// Runs `body(rank)` on `ranks` threads, each with a World of its own on the in-process engine, so that everything
/// that asks World::current() (fsdp::rank(), init_device_mesh, ...) sees a group of `ranks`. Kernels run on one
/// thread each meanwhile. `timeout` bounds every collective.
///
/// Throws one error that lists each failed rank and what it threw. EXPECT_* works in the body. A fatal ASSERT_* ends
/// only its own rank: its channels close, its peers get CommError, and the failure is recorded as usual.
void run_ranks(int ranks, const std::function<void(int rank)>& body,
               std::chrono::milliseconds timeout = std::chrono::seconds(30));

}  // namespace fsdp::testing
