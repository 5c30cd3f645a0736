// pack, reduce and unpack for C++ callers: one entry each, whatever the device. The engine calls these and nothing below.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>

#include "common/layout.h"

// pybind11/pybind11.h declares it; not needed here.
namespace pybind11 {
class module_;
}

namespace gsync {

class DeviceTables;
class PointerRing;

/// A layout together with its tables in a device's memory. On the CPU nothing is copied.
/// On a device with streams, use one DeviceLayout on one stream only: its kernels share a counter.
class DeviceLayout {
 public:
  /// Throws c10::NotImplementedError, torch's own for an operation that a device lacks, if this build has no kernels for `device`.
  DeviceLayout(std::shared_ptr<const Layout> layout, c10::Device device);
  ~DeviceLayout();
  DeviceLayout(const DeviceLayout&) = delete;
  DeviceLayout& operator=(const DeviceLayout&) = delete;

  /// Sizes and tables in host memory.
  const Layout& layout() const { return *layout_; }
  c10::Device device() const { return device_; }

  /// Tables in the device's memory.
  LayoutView view() const;
  LayoutView view_of_chunks(int64_t chunk, int64_t count) const;
  const SegmentPartials* segments() const;

  DeviceTables* tables() const { return tables_.get(); }  // null on the CPU
  PointerRing* pointers() const { return pointers_.get(); }

 private:
  std::shared_ptr<const Layout> layout_;
  c10::Device device_;
  std::unique_ptr<DeviceTables> tables_;
  std::unique_ptr<PointerRing> pointers_;
};

/// Whether this build has kernels for devices of that type.
bool has_kernels(c10::DeviceType type);
/// Whether work put on `stream` goes into a CUDA graph instead of being done.
bool is_capturing(c10::Stream stream);

// On a CPU device these run on the calling thread, whose floating-point mode does not matter; `stream` is not looked at.
// Otherwise they only enqueue on `stream`. Tables of pointers are host memory and may be reused when the call returns;
// everything they point to, and every other pointer, is memory of the layout's device. See kernels.h for each argument, residuals
// and the rest of EncodeOptions included.

/// Writes every byte of `payload` [layout.payload_bytes(), aligned to 16 bytes].
void pack(const DeviceLayout& layout, const void* const* gradients, uint8_t* payload, float scale, int64_t* counters,
          c10::Stream stream, const EncodeOptions& encode = {});

/// Writes every byte of `out` [layout.chunk_bytes, aligned to 16 bytes]; payloads: that chunk as each rank sent it.
void reduce(const DeviceLayout& layout, int64_t chunk, const uint8_t* const* payloads, int64_t num_payloads, uint8_t* out,
            float scale, c10::Stream stream, const EncodeOptions& encode = {});
/// The same for a shard: writes every byte of `out` [layout.chunks_per_shard() * layout.chunk_bytes] from payloads
/// [sent.chunks_per_shard() * sent.chunk_bytes] that hold that shard in fp32.
/// Args: sent: of uncompressed(layout.layout()), on the same device.
void reduce_shard(const DeviceLayout& layout, const DeviceLayout& sent, int64_t shard, const uint8_t* const* payloads,
                  int64_t num_payloads, uint8_t* out, float scale, c10::Stream stream, const EncodeOptions& encode = {});
/// The arguments of reduce_shard() for one kernel.
ReduceArgs reduce_shard_args(const DeviceLayout& layout, const DeviceLayout& sent, int64_t shard, const uint8_t* const* payloads,
                             int64_t num_payloads, uint8_t* out, float scale, const EncodeOptions& encode);

/// Writes gradients, and the slice's part of `partials` [layout.num_partials]; sets *found_nonfinite, never clears it.
/// `sum_of_squares` [num_segments] is written from all of `partials`; null for all slices of a bucket but its last.
/// `failed` may be null.
void unpack(const DeviceLayout& layout, const uint8_t* payload, void* const* gradients, double* partials,
            int32_t* found_nonfinite, double* sum_of_squares, const int32_t* failed, c10::Stream stream);

/// Adds Layout, pack, reduce, unpack to the Python module.
void bind_ops(pybind11::module_& module);

}  // namespace gsync
