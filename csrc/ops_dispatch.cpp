#include <c10/util/Exception.h>

#include <vector>

#include "cpu/kernels.h"
#include "device_tables.h"
#include "ops_binding.h"

#ifdef GSYNC_WITH_CUDA
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/launch.h"
#endif

namespace gsync {
namespace {

#ifdef GSYNC_WITH_CUDA
cudaStream_t cuda_stream(c10::Stream stream) { return c10::cuda::CUDAStream(stream).stream(); }

void check_launch(cudaError_t error) {
  TORCH_CHECK(
      error != cudaErrorNoKernelImageForDevice,
      "gsync: this build has no kernels for this GPU; TORCH_CUDA_ARCH_LIST says for which architectures a build makes them "
      "(`gsync doctor` shows those of this one)");
  C10_CUDA_CHECK(error);
}

// What a launch of `layout` on `stream` needs beside its arguments. `encode`: whose residuals follow the addresses in the table.
cuda::Workspace workspace(const DeviceLayout& layout, const void* const* addresses, int64_t count, c10::Stream stream,
                          const EncodeOptions& encode = {}) {
  layout.tables()->used_on(stream);
  cuda::Workspace result;
  const int64_t num_residuals = encode.residuals == nullptr ? 0 : layout.layout().num_segments;
  if (count + num_residuals > cuda::kMaxAddressesByValue) {
    std::vector<const void*> table(addresses, addresses + count);
    table.insert(table.end(), encode.residuals, encode.residuals + num_residuals);
    result.addresses = layout.pointers()->send(table.data(), count + num_residuals, stream);
  }
  result.ticket = layout.tables()->ticket();
  return result;
}
#endif

[[noreturn]] void refuse(c10::DeviceType type) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "gsync: this build has no native kernels for device type ", type);
}

}  // namespace

bool has_kernels(c10::DeviceType type) {
#ifdef GSYNC_WITH_CUDA
  if (type == c10::DeviceType::CUDA) return true;
#endif
  return type == c10::DeviceType::CPU;
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

DeviceLayout::DeviceLayout(std::shared_ptr<const Layout> layout, c10::Device device)
    : layout_(std::move(layout)), device_(device) {
  if (!has_kernels(device.type())) refuse(device.type());
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

LayoutView DeviceLayout::view_of_chunk(int64_t chunk) const {
  LayoutView view = layout_->view_of_chunk(chunk);
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
  if (layout.device().is_cpu()) return cpu::pack(args, 0, args.layout.num_tiles);
#ifdef GSYNC_WITH_CUDA
  if (layout.device().is_cuda()) {
    const c10::DeviceGuard guard(layout.device());
    const cuda::Workspace space = workspace(layout, gradients, args.layout.num_segments, stream, encode);
    check_launch(cuda::pack(args, space, cuda_stream(stream)));
    return;
  }
#endif
  refuse(stream.device_type());
}

void reduce(const DeviceLayout& layout, int64_t chunk, const uint8_t* const* payloads, int64_t num_payloads, uint8_t* out,
            float scale, c10::Stream stream, const EncodeOptions& encode) {
  const ReduceArgs args{layout.view_of_chunk(chunk), payloads, num_payloads, out, scale, encode};
  if (layout.device().is_cpu()) return cpu::reduce(args, 0, args.layout.num_tiles);
#ifdef GSYNC_WITH_CUDA
  if (layout.device().is_cuda()) {
    const c10::DeviceGuard guard(layout.device());
    const cuda::Workspace space = workspace(layout, reinterpret_cast<const void* const*>(payloads), num_payloads, stream, encode);
    check_launch(cuda::reduce(args, space, cuda_stream(stream)));
    return;
  }
#endif
  refuse(stream.device_type());
}

void unpack(const DeviceLayout& layout, const uint8_t* payload, void* const* gradients, double* partials,
            int32_t* found_nonfinite, double* sum_of_squares, const int32_t* failed, c10::Stream stream) {
  const UnpackArgs args{layout.view(),  payload,         gradients,
                        partials,       found_nonfinite, sum_of_squares == nullptr ? nullptr : layout.segments(),
                        sum_of_squares, failed};
  if (layout.device().is_cpu()) {
    cpu::unpack(args, 0, args.layout.num_tiles);
    if (args.segments != nullptr) cpu::sum_partials(args);
    return;
  }
#ifdef GSYNC_WITH_CUDA
  if (layout.device().is_cuda()) {
    const c10::DeviceGuard guard(layout.device());
    const cuda::Workspace space = workspace(layout, gradients, args.layout.num_segments, stream);
    check_launch(cuda::unpack(args, space, cuda_stream(stream)));
    return;
  }
#endif
  refuse(stream.device_type());
}

}  // namespace gsync
