#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <optional>
#include <vector>

#include "cpu/kernels.h"
#include "device_tables.h"
#include "kernel_table.h"
#include "ops_binding.h"

#ifdef GSYNC_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/launch.h"
#endif

namespace gsync {
namespace {

constexpr KernelTable kCpuKernels{
    INT64_MAX,
    [](const PackArgs& args, const Workspace&, c10::Stream) { cpu::pack(args, 0, args.layout.num_tiles); },
    [](const ReduceArgs& args, const Workspace&, c10::Stream) { cpu::reduce(args, 0, args.layout.num_tiles); },
    [](const UnpackArgs& args, const Workspace&, c10::Stream) {
      cpu::unpack(args, 0, args.layout.num_tiles);
      if (args.segments != nullptr) cpu::sum_partials(args);
    },
};

#ifdef GSYNC_WITH_CUDA
cudaStream_t cuda_stream(c10::Stream stream) { return c10::cuda::CUDAStream(stream).stream(); }

void check_launch(cudaError_t error) {
  TORCH_CHECK(
      error != cudaErrorNoKernelImageForDevice,
      "gsync: this build has no kernels for this GPU; TORCH_CUDA_ARCH_LIST says for which architectures a build makes them "
      "(`gsync doctor` shows those of this one)");
  C10_CUDA_CHECK(error);
}

constexpr KernelTable kCudaKernels{
    cuda::kMaxAddressesByValue,
    [](const PackArgs& args, const Workspace& space, c10::Stream on) { check_launch(cuda::pack(args, space, cuda_stream(on))); },
    [](const ReduceArgs& args, const Workspace& space, c10::Stream on) {
      check_launch(cuda::reduce(args, space, cuda_stream(on)));
    },
    [](const UnpackArgs& args, const Workspace& space, c10::Stream on) {
      check_launch(cuda::unpack(args, space, cuda_stream(on)));
    },
};
#endif

// Of types that are not known here. Read by every launch, so without a lock.
std::array<std::atomic<const KernelTable*>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> registered_kernels{};

// What a launch of `layout` on `stream` needs beside its arguments. `encode`: whose residuals follow the addresses in the table.
Workspace workspace(const DeviceLayout& layout, const KernelTable& kernels, const void* const* addresses, int64_t count,
                    c10::Stream stream, const EncodeOptions& encode = {}) {
  Workspace result;
  if (layout.tables() == nullptr) return result;
  layout.tables()->used_on(stream);
  const int64_t num_residuals = encode.residuals == nullptr ? 0 : layout.layout().num_segments;
  if (count + num_residuals > kernels.max_addresses_by_value) {
    std::vector<const void*> table(addresses, addresses + count);
    table.insert(table.end(), encode.residuals, encode.residuals + num_residuals);
    result.addresses = layout.pointers()->send(table.data(), count + num_residuals, stream);
  }
  result.ticket = layout.tables()->ticket();
  return result;
}

const KernelTable& kernels_for(c10::Device device) {
  const KernelTable* kernels = kernels_of(device.type());
  TORCH_CHECK_NOT_IMPLEMENTED(kernels != nullptr, "gsync: this build has no native kernels for device type ", device.type());
  return *kernels;
}

// The device to switch to; none on the CPU, where there is nothing to switch.
std::optional<c10::Device> on_device(const DeviceLayout& layout) {
  return layout.device().is_cpu() ? std::nullopt : std::optional<c10::Device>(layout.device());
}

}  // namespace

const KernelTable* kernels_of(c10::DeviceType type) {
  if (type == c10::DeviceType::CPU) return &kCpuKernels;
#ifdef GSYNC_WITH_CUDA
  if (type == c10::DeviceType::CUDA) return &kCudaKernels;
#endif
  return registered_kernels[static_cast<size_t>(type)].load();
}

bool is_capturing([[maybe_unused]] c10::Stream stream) {
#ifdef GSYNC_WITH_CUDA
  if (stream.device_type() == c10::DeviceType::CUDA) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    C10_CUDA_CHECK(cudaStreamIsCapturing(cuda_stream(stream), &status));
    return status != cudaStreamCaptureStatusNone;
  }
#endif
  return false;
}

void register_kernels(c10::DeviceType type, const KernelTable* table) {
  TORCH_CHECK_VALUE(kernels_of(type) == nullptr, "register_kernels: devices of type ", type, " have kernels already");
  registered_kernels[static_cast<size_t>(type)].store(table);
}

bool has_kernels(c10::DeviceType type) { return kernels_of(type) != nullptr; }

DeviceLayout::DeviceLayout(std::shared_ptr<const Layout> layout, c10::Device device)
    : layout_(std::move(layout)), device_(device) {
  kernels_for(device);
  if (!device.is_cpu()) {
    tables_ = std::make_unique<DeviceTables>(*layout_, device);
    pointers_ = std::make_unique<PointerRing>(device);
  }
}

DeviceLayout::~DeviceLayout() = default;

LayoutView DeviceLayout::view() const {
  LayoutView view = layout_->view();
  if (tables_) {
    view.shares = tables_->shares();
    view.tiles = tables_->tiles();
  }
  return view;
}

LayoutView DeviceLayout::view_of_chunks(int64_t chunk, int64_t count) const {
  LayoutView view = layout_->view_of_chunks(chunk, count);
  if (tables_) {
    view.shares = tables_->shares();
    view.tiles = tables_->tiles() + layout_->chunk_first_tile[chunk];
  }
  return view;
}

const SegmentPartials* DeviceLayout::segments() const { return tables_ ? tables_->partials() : layout_->partials.data(); }

void pack(const DeviceLayout& layout, const void* const* gradients, uint8_t* payload, float scale, int64_t* counters,
          c10::Stream stream, const EncodeOptions& encode) {
  const PackArgs args{layout.view(), gradients, payload, scale, counters, encode};
  const KernelTable& kernels = kernels_for(layout.device());
  const c10::OptionalDeviceGuard guard(on_device(layout));
  kernels.pack(args, workspace(layout, kernels, gradients, args.layout.num_segments, stream, encode), stream);
}

static void reduce(const DeviceLayout& layout, const ReduceArgs& args, c10::Stream stream) {
  const KernelTable& kernels = kernels_for(layout.device());
  const c10::OptionalDeviceGuard guard(on_device(layout));
  const auto* addresses = reinterpret_cast<const void* const*>(args.payloads);
  kernels.reduce(args, workspace(layout, kernels, addresses, args.num_payloads, stream, args.encode), stream);
}

void reduce(const DeviceLayout& layout, int64_t chunk, const uint8_t* const* payloads, int64_t num_payloads, uint8_t* out,
            float scale, c10::Stream stream, const EncodeOptions& encode) {
  reduce(layout, ReduceArgs{layout.view_of_chunks(chunk, 1), payloads, num_payloads, out, scale, encode}, stream);
}

ReduceArgs reduce_shard_args(const DeviceLayout& layout, const DeviceLayout& sent, int64_t shard, const uint8_t* const* payloads,
                             int64_t num_payloads, uint8_t* out, float scale, const EncodeOptions& encode) {
  const int64_t count = layout.layout().chunks_per_shard();
  const LayoutView view = layout.view_of_chunks(shard * count, count);
  return {view, payloads, num_payloads, out, scale, encode, sent.view().shares, sent.layout().chunk_bytes, shard * count};
}

void reduce_shard(const DeviceLayout& layout, const DeviceLayout& sent, int64_t shard, const uint8_t* const* payloads,
                  int64_t num_payloads, uint8_t* out, float scale, c10::Stream stream, const EncodeOptions& encode) {
  if (sent.tables() != nullptr) sent.tables()->used_on(stream);
  reduce(layout, reduce_shard_args(layout, sent, shard, payloads, num_payloads, out, scale, encode), stream);
}

void unpack(const DeviceLayout& layout, const uint8_t* payload, void* const* gradients, double* partials,
            int32_t* found_nonfinite, double* sum_of_squares, const int32_t* failed, c10::Stream stream) {
  const UnpackArgs args{layout.view(),  payload,         gradients,
                        partials,       found_nonfinite, sum_of_squares == nullptr ? nullptr : layout.segments(),
                        sum_of_squares, failed};
  const KernelTable& kernels = kernels_for(layout.device());
  const c10::OptionalDeviceGuard guard(on_device(layout));
  kernels.unpack(args, workspace(layout, kernels, gradients, args.layout.num_segments, stream), stream);
}

}  // namespace gsync
