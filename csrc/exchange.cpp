#include "exchange.h"

#include <c10/util/Exception.h>

#include <utility>
#include <vector>

#include "payload_memory.h"
#include "range.h"

namespace gsync {
namespace {

void grow(at::Tensor& buffer, int64_t bytes, c10::Device device) {
  if (buffer.defined() && buffer.numel() >= bytes) return;
  buffer.reset();  // give the old memory back first
  buffer = empty_payload(bytes, device);
}

uint8_t* bytes_of(const at::Tensor& buffer) { return static_cast<uint8_t*>(buffer.mutable_data_ptr()); }

at::Tensor first(const at::Tensor& buffer, int64_t bytes) { return buffer.narrow(0, 0, bytes); }

// The type in which the library sums; its flags are elements of that type too, so the whole chunk is one array.
at::ScalarType wire_type(const Layout& layout) {
  for (const Share& share : layout.shares) {
    if (share.kind == Kind::kFp32) return at::kFloat;
    if (share.kind == Kind::kFp16) return at::kHalf;
    if (share.kind == Kind::kBf16) return at::kBFloat16;
  }
  return at::kFloat;  // a slice without elements: flags and padding, written as zeros or 1.0
}

class Local final : public Exchange {
 public:
  bool encodes() const override { return false; }
  int64_t num_chunks() const override { return 1; }
  bool one_codec() const override { return false; }
  int64_t wire_bytes(const Layout& /*layout*/) const override { return 0; }
  void reserve(const DeviceLayout& layout, SliceBuffers& buffers) const override {
    grow(buffers.payload, layout.layout().payload_bytes(), layout.device());
  }
  std::shared_ptr<Collective> issue(int /*stage*/, const DeviceLayout& /*layout*/, SliceBuffers& /*buffers*/,
                                    c10::Stream /*stream*/, const EncodeOptions& /*reduce_encode*/) const override {
    return nullptr;
  }
};

class AllReduce final : public Exchange {
 public:
  AllReduce(std::shared_ptr<Transport> transport, int world_size) : transport_(std::move(transport)), world_size_(world_size) {}

  int64_t num_chunks() const override { return 1; }
  bool one_codec() const override { return true; }
  int64_t wire_bytes(const Layout& layout) const override { return 2 * layout.payload_bytes() * (world_size_ - 1) / world_size_; }
  void reserve(const DeviceLayout& layout, SliceBuffers& buffers) const override {
    grow(buffers.payload, layout.layout().payload_bytes(), layout.device());
  }
  std::shared_ptr<Collective> issue(int stage, const DeviceLayout& layout, SliceBuffers& buffers, c10::Stream /*stream*/,
                                    const EncodeOptions& /*reduce_encode*/) const override {
    if (stage > 0) return nullptr;
    const at::Tensor payload = first(buffers.payload, layout.layout().payload_bytes());
    return transport_->all_reduce(payload.view(wire_type(layout.layout())));
  }

 private:
  std::shared_ptr<Transport> transport_;
  int64_t world_size_;
};

class ScatterGather final : public Exchange {
 public:
  ScatterGather(std::shared_ptr<Transport> transport, int rank, int world_size)
      : transport_(std::move(transport)), rank_(rank), world_size_(world_size) {}

  int64_t num_chunks() const override { return world_size_; }
  bool one_codec() const override { return false; }
  int64_t wire_bytes(const Layout& layout) const override { return 2 * layout.chunk_bytes * (world_size_ - 1); }
  void reserve(const DeviceLayout& layout, SliceBuffers& buffers) const override {
    grow(buffers.payload, layout.layout().payload_bytes(), layout.device());
    grow(buffers.received, layout.layout().payload_bytes(), layout.device());
    grow(buffers.reduced, layout.layout().chunk_bytes, layout.device());
  }
  std::shared_ptr<Collective> issue(int stage, const DeviceLayout& layout, SliceBuffers& buffers, c10::Stream stream,
                                    const EncodeOptions& reduce_encode) const override {
    const int64_t chunk_bytes = layout.layout().chunk_bytes;
    const at::Tensor payload = first(buffers.payload, world_size_ * chunk_bytes);
    if (stage == 0) return transport_->all_to_all(first(buffers.received, world_size_ * chunk_bytes), payload);
    if (stage > 1) return nullptr;
    std::vector<const uint8_t*> chunks;
    chunks.reserve(world_size_);
    for (int64_t rank = 0; rank < world_size_; ++rank) chunks.push_back(bytes_of(buffers.received) + rank * chunk_bytes);
    {
      const Range range("gsync::reduce");
      reduce(layout, rank_, chunks.data(), world_size_, bytes_of(buffers.reduced), 1.0f, stream, reduce_encode);
    }
    // The payload has been sent, so its memory takes the result.
    return transport_->all_gather(payload, first(buffers.reduced, chunk_bytes));
  }

 private:
  std::shared_ptr<Transport> transport_;
  int64_t rank_;
  int64_t world_size_;
};

}  // namespace

int64_t SliceBuffers::bytes() const {
  int64_t total = 0;
  for (const at::Tensor* buffer : {&payload, &received, &reduced}) {
    if (buffer->defined()) total += buffer->numel();
  }
  return total;
}

std::unique_ptr<Exchange> make_exchange(const std::string& name, std::shared_ptr<Transport> transport, int rank, int world_size) {
  TORCH_CHECK_VALUE(name == "all_reduce" || name == "scatter_gather",
                    "Engine: exchange must be all_reduce or scatter_gather, got ", name);
  if (!transport) return std::make_unique<Local>();
  if (name == "all_reduce") return std::make_unique<AllReduce>(std::move(transport), world_size);
  return std::make_unique<ScatterGather>(std::move(transport), rank, world_size);
}

}  // namespace gsync
