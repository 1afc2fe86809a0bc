#include "fake_device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sstream>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace fsdp::testing::fake_device {
namespace {

using Clock = std::map<int64_t, int64_t>;  // by stream: how much of its work is before

void merge(Clock& into, const Clock& other) {
  for (const auto& [stream, time] : other) into[stream] = std::max(into[stream], time);
}

struct Access {
  int64_t stream, time;
  std::string what;
};

struct Block {
  int64_t nbytes = 0, stream = 0;
  std::vector<Access> writes, reads;  // the last of each stream
};

struct Simulation {
  int64_t current = 0, made = 0;
  std::map<int64_t, Clock> streams;
  Clock host;
  std::map<const char*, Block> blocks;
  std::vector<Block> freed;
  std::vector<std::string> races;

  bool before(const Access& access, int64_t stream) { return streams[stream][access.stream] >= access.time; }

  void check(const std::vector<Access>& accesses, int64_t stream, const std::string& what) {
    for (const auto& access : accesses) {
      if (before(access, stream)) continue;
      std::ostringstream out;
      out << what << " on stream " << stream << " does not wait for " << access.what << " on stream " << access.stream;
      races.push_back(out.str());
    }
  }
  static void note(std::vector<Access>& accesses, Access access) {
    for (auto& other : accesses) {
      if (other.stream == access.stream) {
        other = std::move(access);
        return;
      }
    }
    accesses.push_back(std::move(access));
  }
  void touch(const at::Tensor& tensor, bool write, const std::string& what) {
    if (tensor.numel() == 0) return;
    const auto* at = static_cast<const char*>(tensor.const_data_ptr());
    auto found = blocks.upper_bound(at);
    if (found == blocks.begin()) return;
    auto& [begin, block] = *--found;
    if (at >= begin + block.nbytes) return;
    check(block.writes, current, what);
    if (write) check(block.reads, current, what);
    note(write ? block.writes : block.reads, {current, streams[current][current], what});
  }
  /// The current stream may get any block that was freed and is its own.
  void reuse() {
    auto mine = std::stable_partition(freed.begin(), freed.end(), [&](const auto& b) { return b.stream != current; });
    for (auto block = mine; block != freed.end(); ++block) {
      check(block->writes, current, "using a freed block again");
      check(block->reads, current, "using a freed block again");
    }
    freed.erase(mine, freed.end());
  }
  void begin_kernel() { ++streams[current][current]; }
};

// Heap memory that is never freed: blocks may outlive their thread's statics.
Simulation& simulation() {
  thread_local auto* instance = new Simulation;
  return *instance;
}

void free_block(void* at) {
  auto& sim = simulation();
  const auto found = sim.blocks.find(static_cast<char*>(at));
  if (found != sim.blocks.end()) {
    sim.freed.push_back(std::move(found->second));
    sim.blocks.erase(found);
  }
  std::free(at);
}

struct HostAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* at = nbytes > 0 ? std::malloc(nbytes) : nullptr;
    auto& sim = simulation();
    sim.reuse();
    if (at) sim.blocks[static_cast<char*>(at)] = {static_cast<int64_t>(nbytes), sim.current, {}, {}};
    return {at, at, &free_block, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};
HostAllocator allocator;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator)

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::Stream stream(int64_t id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(simulation().current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(++simulation().made); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(++simulation().made); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(std::exchange(simulation().current, next.id()));
  }
  void record(void** event, const c10::Stream& on, c10::DeviceIndex, c10::EventFlag) const override {
    auto& sim = simulation();
    if (!*event) *event = new Clock;
    *static_cast<Clock*>(*event) = sim.streams[on.id()];
  }
  void block(void* event, const c10::Stream& on) const override {
    if (event) merge(simulation().streams[on.id()], *static_cast<Clock*>(event));
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeStream(const c10::Stream& on) const override {
    merge(simulation().host, simulation().streams[on.id()]);
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Clock*>(event); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {
    simulation().races.push_back("record_stream was called");
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

/// The same bytes as the CPU sees them.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.is_cpu() || !tensor.defined()) return tensor;
  return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU).requires_grad(false));
}

at::Tensor& copy_into(at::Tensor& to, const at::Tensor& from, bool) {
  auto& sim = simulation();
  sim.begin_kernel();
  if (!from.is_cpu()) sim.touch(from, false, "reading for a copy");
  if (!to.is_cpu()) sim.touch(to, true, "writing a copy");
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  auto target = to;
  return copy_into(target, from, false);
}

/// The operator itself is a kernel of the current stream; what it needs is copied to the host and back.
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      sizes, strides, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef sizes) { return at::native::view(self, sizes); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("copy_", &copy_into);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize",
         [](const at::Tensor& from, const at::Tensor& to) { return copy_from(from, to, false); });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

}  // namespace

void reset() { simulation() = Simulation(); }
const std::vector<std::string>& races() { return simulation().races; }
int64_t seen(int64_t stream, int64_t of) { return simulation().streams[stream][of]; }
int64_t waited_for(int64_t stream) { return simulation().host[stream]; }
void use_stream(int64_t id) { simulation().current = id; }

}  // namespace fsdp::testing::fake_device
