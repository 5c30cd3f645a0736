#include "exchange.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "payload_memory.h"
#include "range.h"
#include "transport_hierarchical.h"

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

// The pieces of a buffer, each of `bytes`, one after the other.
std::vector<const uint8_t*> pieces_of(const at::Tensor& buffer, int64_t count, int64_t bytes) {
  std::vector<const uint8_t*> pieces;
  pieces.reserve(count);
  for (int64_t i = 0; i < count; ++i) pieces.push_back(bytes_of(buffer) + i * bytes);
  return pieces;
}

class Local final : public Exchange {
 public:
  std::string name() const override { return "local"; }
  bool encodes() const override { return false; }
  int64_t num_chunks() const override { return 1; }
  bool one_codec() const override { return false; }
  int64_t wire_bytes(const SliceLayout& /*layout*/) const override { return 0; }
  void reserve(const SliceLayout& layout, SliceBuffers& buffers) const override {
    grow(buffers.payload, layout.wire->layout().payload_bytes(), layout.wire->device());
  }
  std::shared_ptr<Collective> issue(int /*stage*/, const SliceLayout& /*layout*/, SliceBuffers& /*buffers*/,
                                    c10::Stream /*stream*/, const Encodings& /*encodings*/) const override {
    return nullptr;
  }
};

class AllReduce final : public Exchange {
 public:
  AllReduce(std::shared_ptr<Transport> transport, int world_size) : transport_(std::move(transport)), world_size_(world_size) {}

  std::string name() const override { return "all_reduce"; }
  int64_t num_chunks() const override { return 1; }
  bool one_codec() const override { return true; }
  int64_t wire_bytes(const SliceLayout& layout) const override {
    return 2 * layout.wire->layout().payload_bytes() * (world_size_ - 1) / world_size_;
  }
  void reserve(const SliceLayout& layout, SliceBuffers& buffers) const override {
    grow(buffers.payload, layout.wire->layout().payload_bytes(), layout.wire->device());
  }
  std::shared_ptr<Collective> issue(int stage, const SliceLayout& layout, SliceBuffers& buffers, c10::Stream /*stream*/,
                                    const Encodings& /*encodings*/) const override {
    if (stage > 0) return nullptr;
    const at::Tensor payload = first(buffers.payload, layout.wire->layout().payload_bytes());
    return transport_->all_reduce(payload.view(wire_type(layout.wire->layout())));
  }

 private:
  std::shared_ptr<Transport> transport_;
  int64_t world_size_;
};

class ScatterGather final : public Exchange {
 public:
  ScatterGather(std::shared_ptr<Transport> transport, int rank, int world_size)
      : transport_(std::move(transport)), rank_(rank), world_size_(world_size) {}

  std::string name() const override { return "scatter_gather"; }
  int64_t num_chunks() const override { return world_size_; }
  int64_t my_chunk() const override { return rank_; }
  bool one_codec() const override { return false; }
  int64_t wire_bytes(const SliceLayout& layout) const override {
    return 2 * layout.wire->layout().chunk_bytes * (world_size_ - 1);
  }
  void reserve(const SliceLayout& layout, SliceBuffers& buffers) const override {
    const Layout& sizes = layout.wire->layout();
    grow(buffers.payload, sizes.payload_bytes(), layout.wire->device());
    grow(buffers.received, sizes.payload_bytes(), layout.wire->device());
    grow(buffers.reduced, sizes.chunk_bytes, layout.wire->device());
  }
  std::shared_ptr<Collective> issue(int stage, const SliceLayout& layout, SliceBuffers& buffers, c10::Stream stream,
                                    const Encodings& encodings) const override {
    const int64_t chunk_bytes = layout.wire->layout().chunk_bytes;
    const at::Tensor payload = first(buffers.payload, world_size_ * chunk_bytes);
    if (stage == 0) return transport_->all_to_all(first(buffers.received, world_size_ * chunk_bytes), payload);
    if (stage > 1) return nullptr;
    const auto chunks = pieces_of(buffers.received, world_size_, chunk_bytes);
    {
      const Range range("gsync::reduce");
      reduce(*layout.wire, rank_, chunks.data(), world_size_, bytes_of(buffers.reduced), 1.0f, stream, encodings.reduce);
    }
    // The payload has been sent, so its memory takes the result.
    return transport_->all_gather(payload, first(buffers.reduced, chunk_bytes));
  }

 private:
  std::shared_ptr<Transport> transport_;
  int64_t rank_;
  int64_t world_size_;
};

class Hierarchical final : public Exchange {
 public:
  explicit Hierarchical(std::shared_ptr<HierarchicalTransport> transport)
      : transport_(std::move(transport)), ranks_(transport_->place().ranks_per_host), hosts_(transport_->place().num_hosts) {}

  std::string name() const override { return "hierarchical"; }
  int64_t num_chunks() const override { return ranks_ * hosts_; }
  int64_t num_shards() const override { return ranks_; }
  int64_t my_shard() const override { return transport_->place().local_rank; }
  int64_t my_chunk() const override { return my_shard() * hosts_ + transport_->place().host; }
  bool one_codec() const override { return false; }
  int64_t wire_bytes(const SliceLayout& layout) const override {
    const int64_t inside =
        (layout.wire->layout().chunk_bytes + layout.uncompressed->layout().chunk_bytes) * hosts_ * (ranks_ - 1);
    return inside + 2 * layout.wire->layout().chunk_bytes * (hosts_ - 1);
  }
  void reserve(const SliceLayout& layout, SliceBuffers& buffers) const override {
    const c10::Device device = layout.wire->device();
    const int64_t chunk_bytes = layout.wire->layout().chunk_bytes;
    const int64_t sent_bytes = layout.uncompressed->layout().payload_bytes();
    grow(buffers.payload, std::max(sent_bytes, num_chunks() * chunk_bytes), device);
    grow(buffers.received, std::max(sent_bytes, hosts_ * chunk_bytes), device);
    grow(buffers.reduced, chunk_bytes, device);
    grow(buffers.shard, hosts_ * chunk_bytes, device);
  }
  std::shared_ptr<Collective> issue(int stage, const SliceLayout& layout, SliceBuffers& buffers, c10::Stream stream,
                                    const Encodings& encodings) const override {
    const int64_t chunk_bytes = layout.wire->layout().chunk_bytes;
    const int64_t sent_bytes = layout.uncompressed->layout().payload_bytes();
    const at::Tensor shard = first(buffers.shard, hosts_ * chunk_bytes);
    // With one host the shard is done when it has been encoded.
    if (hosts_ == 1 && stage > kScatterInside) stage += kGatherInside - kScatterBetween;
    switch (stage) {
      case kScatterInside:
        return transport_->inner()->all_to_all(first(buffers.received, sent_bytes), first(buffers.payload, sent_bytes));
      case kScatterBetween:
        encode_shard(layout, buffers, stream, encodings.first);
        return transport_->outer()->all_to_all(first(buffers.received, hosts_ * chunk_bytes), shard);
      case kGatherBetween: {
        const auto chunks = pieces_of(buffers.received, hosts_, chunk_bytes);
        const Range range("gsync::reduce");
        reduce(*layout.wire, my_chunk(), chunks.data(), hosts_, bytes_of(buffers.reduced), 1.0f, stream, encodings.reduce);
        return transport_->outer()->all_gather(shard, first(buffers.reduced, chunk_bytes));
      }
      case kGatherInside:
        if (hosts_ == 1) encode_shard(layout, buffers, stream, encodings.first);
        return transport_->inner()->all_gather(first(buffers.payload, num_chunks() * chunk_bytes), shard);
      default: return nullptr;
    }
  }

 private:
  enum Stage { kScatterInside, kScatterBetween, kGatherBetween, kGatherInside };

  void encode_shard(const SliceLayout& layout, SliceBuffers& buffers, c10::Stream stream, const EncodeOptions& encode) const {
    const auto sent = pieces_of(buffers.received, ranks_, layout.uncompressed->layout().payload_bytes() / ranks_);
    const Range range("gsync::reduce");
    reduce_shard(*layout.wire, *layout.uncompressed, my_shard(), sent.data(), ranks_, bytes_of(buffers.shard), 1.0f, stream,
                 encode);
  }

  std::shared_ptr<HierarchicalTransport> transport_;
  int64_t ranks_;  // of a host
  int64_t hosts_;
};

}  // namespace

int64_t SliceBuffers::bytes() const {
  int64_t total = 0;
  for (const at::Tensor* buffer : {&payload, &received, &reduced, &shard}) {
    if (buffer->defined()) total += buffer->numel();
  }
  return total;
}

std::unique_ptr<Exchange> make_exchange(const std::string& name, std::shared_ptr<Transport> transport, int rank, int world_size) {
  TORCH_CHECK_VALUE(name == "all_reduce" || name == "scatter_gather" || name == "hierarchical",
                    "Engine: exchange must be all_reduce, scatter_gather or hierarchical, got ", name);
  if (!transport) return std::make_unique<Local>();
  if (name == "hierarchical") {
    auto levels = std::dynamic_pointer_cast<HierarchicalTransport>(transport);
    TORCH_CHECK_VALUE(
        levels && levels->place().ranks_per_host > 1 && levels->place().ranks_per_host * levels->place().num_hosts == world_size,
        "Engine: hierarchical needs a HierarchicalTransport over ", world_size, " ranks, at least 2 a host");
    return std::make_unique<Hierarchical>(std::move(levels));
  }
  if (name == "all_reduce") return std::make_unique<AllReduce>(std::move(transport), world_size);
  return std::make_unique<ScatterGather>(std::move(transport), rank, world_size);
}

Exchanges::Exchanges(std::shared_ptr<Transport> transport, int rank, int world_size)
    : transport_(std::move(transport)), rank_(rank), world_size_(world_size) {}

const Exchange& Exchanges::get(const std::string& name) {
  std::unique_ptr<Exchange>& exchange = made_[name];
  if (!exchange) exchange = make_exchange(name, transport_, rank_, world_size_);
  return *exchange;
}

}  // namespace gsync
