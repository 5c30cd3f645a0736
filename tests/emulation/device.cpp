// The device as torch sees it: guard, allocator, hooks.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <utility>

#include "streams.h"

namespace emulation {
namespace {

using Event = std::shared_ptr<Mark>;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kDeviceType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    set_device(device.index());
    return before;
  }
  c10::Device getDevice() const override { return {kDeviceType, current_device()}; }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { set_device(device.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return default_stream(device.index()); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high*/) const override { return new_stream(device.index()); }
  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override { return new_stream(device.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return native_handle(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    check_device();
    return is_idle(stream);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    check_device();
    synchronize(stream);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/, c10::EventFlag /*flag*/) const override {
    check_device();
    if (*event == nullptr) *event = new Event;
    emulation::record(*static_cast<Event*>(*event), stream);
  }
  void block(void* event, const c10::Stream& stream) const override {
    check_device();
    emulation::block(*static_cast<Event*>(event), stream);
  }
  bool queryEvent(void* event) const override {
    check_device();
    return has_passed(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override { wait_on_host(*static_cast<Event*>(event)); }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* start, void* stop, c10::DeviceIndex /*device*/) const override {
    return std::chrono::duration<double, std::milli>((*static_cast<Event*>(stop))->when - (*static_cast<Event*>(start))->when)
        .count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_stream(memory, stream);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Memory is given back in the order of the stream it was allocated for, as by a caching allocator: work that is there already may
// still use it, work on other streams only if it was told of them. What is given back is overwritten, and kept for a while to see
// whether somebody writes there still.
constexpr int kFreed = 0xDD;
constexpr size_t kAlignment = 256;
constexpr size_t kKeptBytes = size_t{64} << 20;

struct Memory {
  uint8_t* data;
  size_t bytes;
};

std::mutex kept_mutex;
std::deque<Memory> kept;
size_t kept_bytes = 0;
bool kept_was_written = false;

void look_and_free(const Memory& memory) {
  for (size_t i = 0; i < memory.bytes; ++i) kept_was_written = kept_was_written || memory.data[i] != kFreed;
  std::free(memory.data);
}

struct Block {
  Memory memory;
  std::vector<c10::Stream> users;  // the first is the one it was allocated for

  ~Block() {
    std::memset(memory.data, kFreed, memory.bytes);
    std::lock_guard<std::mutex> lock(kept_mutex);
    kept.push_back(memory);
    kept_bytes += memory.bytes;
    while (kept_bytes > kKeptBytes) {
      kept_bytes -= kept.front().bytes;
      look_and_free(kept.front());
      kept.pop_front();
    }
  }
};

std::mutex users_mutex;

void free_block(void* context) {
  const std::shared_ptr<Block> block(static_cast<Block*>(context));
  if (is_shut_down()) return;
  // The last stream to come past this point frees it.
  for (const c10::Stream& stream : block->users) enqueue(stream, [block] {}, /*is_work=*/false);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(kDeviceType, current_device());
    if (bytes == 0) return {nullptr, nullptr, &free_nothing, device};
    check_device();
    count(&Counters::allocations);
    TORCH_CHECK_WITH(OutOfMemoryError, !allocation_fault().strikes(), "out of memory on ", device, ": ", bytes, " bytes");
    auto* data = static_cast<uint8_t*>(std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment));
    std::memset(data, kFreed, bytes);
    return {data, new Block{{data, bytes}, {current_stream(device.index())}}, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  static void free_nothing(void* /*context*/) {}
};

// Of the host, for copies that the host does not wait for.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes == 0 ? nullptr : std::aligned_alloc(kAlignment, (bytes + kAlignment - 1) / kAlignment * kAlignment);
    return {data, data, &std::free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  at::Device getDeviceFromPtr(void* /*data*/) const override { return {kDeviceType, current_device()}; }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* pinned = new PinnedAllocator;
    return pinned;
  }
};

[[maybe_unused]] const bool registered = [] {
  c10::SetAllocator(kDeviceType, allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

c10::Allocator* allocator() {
  static auto* instance = new Allocator;
  return instance;
}

bool take_written_after_free() {
  std::lock_guard<std::mutex> lock(kept_mutex);
  for (const Memory& memory : kept) look_and_free(memory);
  kept.clear();
  kept_bytes = 0;
  return std::exchange(kept_was_written, false);
}

void record_stream(const c10::DataPtr& memory, c10::Stream stream) {
  if (memory.get_deleter() != &free_block) return;
  auto* block = static_cast<Block*>(memory.get_context());
  std::lock_guard<std::mutex> lock(users_mutex);
  for (const c10::Stream& user : block->users) {
    if (user == stream) return;
  }
  block->users.push_back(stream);
}

}  // namespace emulation
