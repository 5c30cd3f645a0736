// Host tables on a device: a layout's tables, uploaded once, and tables of addresses too long for a kernel's parameters.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <deque>
#include <optional>

#include "common/layout.h"

namespace gsync {

/// A layout's tables in a device's memory, in one allocation.
class DeviceTables {
 public:
  /// Copies the tables; they are there when the constructor returns, for every stream.
  DeviceTables(const Layout& layout, c10::Device device);

  const Share* shares() const { return reinterpret_cast<const Share*>(base() + shares_); }
  const Tile* tiles() const { return reinterpret_cast<const Tile*>(base() + tiles_); }
  const SegmentPartials* partials() const { return reinterpret_cast<const SegmentPartials*>(base() + partials_); }
  /// Counts the thread blocks that are done; zero between launches. One launch at a time may use it.
  uint32_t* ticket() const { return reinterpret_cast<uint32_t*>(base() + ticket_); }
  /// Keeps the memory, when these tables are gone, until work that is now on `stream` has finished.
  void used_on(c10::Stream stream);

 private:
  uint8_t* base() const { return static_cast<uint8_t*>(memory_.mutable_data_ptr()); }

  at::Tensor memory_;
  std::optional<c10::Stream> stream_;
  int64_t shares_ = 0;
  int64_t tiles_ = 0;
  int64_t partials_ = 0;
  int64_t ticket_ = 0;
};

/// Sends tables of addresses to a device without waiting: a ring of pinned host buffers, each guarded by an event. A buffer that is
/// still being read is left alone and a new one made, so there are as many as the host runs ahead of the device. They stay.
class PointerRing {
 public:
  explicit PointerRing(c10::Device device) : device_(device) {}

  /// Copies `count` addresses on `stream`; the result may be used by work that is put on that stream before the next call.
  const void* const* send(const void* const* pointers, int64_t count, c10::Stream stream);

 private:
  struct Slot {
    at::Tensor host;
    at::Tensor device;
    c10::Event sent;  // the host buffer may be written again
  };

  c10::Device device_;
  std::deque<Slot> slots_;  // the one used last is at the back
};

}  // namespace gsync
