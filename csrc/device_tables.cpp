#include "device_tables.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>

#include <algorithm>
#include <cstring>

namespace gsync {
namespace {

int64_t append(std::vector<uint8_t>& bytes, const void* data, size_t num_bytes) {
  const size_t offset = (bytes.size() + 15) / 16 * 16;
  bytes.resize(offset + num_bytes);
  if (num_bytes > 0) std::memcpy(bytes.data() + offset, data, num_bytes);
  return static_cast<int64_t>(offset);
}

}  // namespace

DeviceTables::DeviceTables(const Layout& layout, c10::Device device) {
  std::vector<uint8_t> bytes;
  const uint32_t zero = 0;
  ticket_ = append(bytes, &zero, sizeof(zero));
  shares_ = append(bytes, layout.shares.data(), layout.shares.size() * sizeof(Share));
  tiles_ = append(bytes, layout.tiles.data(), layout.tiles.size() * sizeof(Tile));
  partials_ = append(bytes, layout.partials.data(), layout.partials.size() * sizeof(SegmentPartials));
  const at::Tensor host = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(host.mutable_data_ptr(), bytes.data(), bytes.size());
  memory_ = at::empty(host.sizes(), at::TensorOptions(at::kByte).device(device));
  memory_.copy_(host);  // from pageable memory: waits until it is there
}

void DeviceTables::used_on(c10::Stream stream) {
  if (stream_ == stream) return;
  memory_.record_stream(stream);
  stream_ = stream;
}

const void* const* PointerRing::send(const void* const* pointers, int64_t count, c10::Stream stream) {
  const c10::StreamGuard guard(stream);
  if (slots_.empty() || !slots_.front().sent.query()) {
    slots_.push_back({{}, {}, c10::Event(device_.type())});
  } else {
    slots_.push_back(std::move(slots_.front()));
    slots_.pop_front();
  }
  Slot& slot = slots_.back();
  if (!slot.host.defined() || slot.host.numel() < count) {
    // Later work may still read the old device buffer: the allocator keeps it until this stream is past that.
    const int64_t capacity = std::max<int64_t>(count, 4096);
    slot.host = at::empty({capacity}, at::TensorOptions(at::kLong).pinned_memory(true));
    slot.device = at::empty({capacity}, at::TensorOptions(at::kLong).device(device_));
  }
  std::memcpy(slot.host.mutable_data_ptr(), pointers, count * sizeof(void*));
  slot.device.narrow(0, 0, count).copy_(slot.host.narrow(0, 0, count), /*non_blocking=*/true);
  slot.sent.record(stream);
  return static_cast<const void* const*>(slot.device.data_ptr());
}

}  // namespace gsync
