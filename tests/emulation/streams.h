// The streams, events and memory of a device that is not there. A stream is a thread that runs what it is given, in order; an event
// is a point in that order; memory is the host's. Delays before each piece of work, drawn from a seed, bring to light what only the
// usual timing hides.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace emulation {

inline constexpr int kDevices = 4;
inline constexpr auto kDeviceType = c10::DeviceType::PrivateUse1;

/// What was asked of the device since the last reset.
struct Counters {
  int64_t launches = 0;  // of gsync's kernels
  int64_t operations = 0;  // of torch, copies included
  int64_t collectives = 0;
  int64_t event_waits = 0;  // a stream waits for an event
  int64_t event_records = 0;
  int64_t host_waits = 0;  // the host waits for an event, a stream or a copy
  int64_t allocations = 0;
};
void count(int64_t Counters::* counter);
Counters take_counters();

// ---- streams ----

/// Stream 0 .. kDevices-1 are the devices' default streams.
c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream new_stream(c10::DeviceIndex device);
/// Of the calling thread.
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::DeviceIndex current_device();
void set_device(c10::DeviceIndex device);

/// Work is delayed, markers such as events are not.
void enqueue(c10::Stream stream, std::function<void()> task, bool is_work = true);
/// Also for the thread of a stream that has nothing to do with torch's.
void* native_handle(c10::Stream stream);
c10::Stream stream_of(void* native_handle);
bool is_idle(c10::Stream stream);
void synchronize(c10::Stream stream);
/// What a task threw, if one did; asked once.
std::string take_error();

/// Every piece of work on `stream` (-1: on every stream) waits first, between `min_us` and `max_us`.
void set_delay(int64_t stream, int64_t min_us, int64_t max_us, uint64_t seed);
/// A stream that is held does not begin anything.
void hold(int64_t stream, bool is_held);
/// The stream that was made last for a device.
int64_t newest_stream(c10::DeviceIndex device);
/// Waits until no stream can go on by itself: each is idle, held, or waits for an event that has not come. At most `max_ms`.
void settle(int64_t max_ms);
/// Ends all threads; what has not run is dropped.
void shut_down();
bool is_shut_down();

// ---- events ----

/// One recording of an event.
struct Mark {
  bool passed = false;
  std::chrono::steady_clock::time_point when;
};
void record(std::shared_ptr<Mark>& mark, c10::Stream stream);
void block(std::shared_ptr<Mark> mark, c10::Stream stream);
bool has_passed(const std::shared_ptr<Mark>& mark);
void wait_on_host(const std::shared_ptr<Mark>& mark);

// ---- faults ----

/// The switch of a fault: strikes once, after it was passed `after` times. -1: never.
class Fault {
 public:
  void arm(int64_t after) { left_ = after; }
  bool strikes();

 private:
  int64_t left_ = -1;
};
/// From then on the device answers everything with an error, as CUDA does once a kernel has gone wrong.
void lose(bool is_lost);
/// Throws when the device is lost.
void check_device();
Fault& allocation_fault();
Fault& launch_fault();

// ---- call sites of waits ----

/// A wait is known by where gsync's library asked for it, e.g. "1a2b3c": an offset into the library; "" for another library's.
/// Whether the wait that is being asked for is to be left out.
bool is_left_out();
void leave_out(std::vector<std::string> sites);
/// Sites seen since the last call.
std::vector<std::string> take_sites();

// ---- memory ----

c10::Allocator* allocator();
void record_stream(const c10::DataPtr& memory, c10::Stream stream);
/// Whether memory was written after it had been given back, since the last call.
bool take_written_after_free();

}  // namespace emulation
