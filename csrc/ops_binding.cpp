// _C.Layout, _C.pack, _C.reduce, _C.unpack: what gsync/ops.py calls. It has checked values; here only what memory safety needs.
#include "ops_binding.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/utils/pybind.h>

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cpu/kernels.h"
#include "kernel_table.h"
#include "payload_memory.h"

namespace py = pybind11;

namespace gsync {
namespace {

using OptionalTensors = std::vector<std::optional<at::Tensor>>;

// Tiles per task of at::parallel_for: 64 Ki elements, some 10 us.
constexpr int64_t kTilesPerTask = 16;

c10::Stream current_stream(c10::Device device) {
  if (device.is_cpu()) return c10::Stream(c10::Stream::DEFAULT, device);
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

/// A layout and its copies on the devices and streams that used it.
class LayoutHandle {
 public:
  LayoutHandle(const std::vector<int64_t>& numels, const std::vector<int>& dtypes, const std::vector<int>& codecs,
               const std::vector<uint64_t>& hashes, int64_t num_chunks, int64_t slice_idx, int64_t num_slices,
               const std::optional<std::vector<int64_t>>& block_sizes, int64_t num_shards) {
    const size_t count = numels.size();
    TORCH_CHECK_VALUE(dtypes.size() == count && codecs.size() == count && hashes.size() == count &&
                          (!block_sizes || block_sizes->size() == count),
                      "layout: numels, dtypes, codecs, hashes, block_sizes have ", count, ", ", dtypes.size(), ", ",
                      codecs.size(), ", ", hashes.size(), ", ", block_sizes ? block_sizes->size() : count,
                      " elements, expected the same number");
    std::vector<Segment> segments;
    for (size_t i = 0; i < numels.size(); ++i) {
      segments.push_back({numels[i], static_cast<Dtype>(dtypes[i]), static_cast<Kind>(codecs[i]), hashes[i],
                          block_sizes ? (*block_sizes)[i] : 0});
    }
    layout_ = std::make_shared<const Layout>(build_layout(segments, num_chunks, slice_idx, num_slices, num_shards));
    dtypes_ = dtypes;
    // How much of a gradient its shares reach.
    numels_ = numels;
  }

  std::unique_ptr<LayoutHandle> in_fp32() const {
    return std::unique_ptr<LayoutHandle>(new LayoutHandle(std::make_shared<const Layout>(uncompressed(*layout_)), *this));
  }

  const Layout& layout() const { return *layout_; }
  int dtype(int64_t segment) const { return dtypes_[segment]; }
  int64_t numel(int64_t segment) const { return numels_[segment]; }

  const DeviceLayout& on(c10::Stream stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& entry = on_devices_[{stream.device(), stream.id()}];
    if (!entry) entry = std::make_unique<DeviceLayout>(layout_, stream.device());
    return *entry;
  }

 private:
  LayoutHandle(std::shared_ptr<const Layout> layout, const LayoutHandle& other)
      : layout_(std::move(layout)), dtypes_(other.dtypes_), numels_(other.numels_) {}

  struct Less {
    bool operator()(const std::pair<c10::Device, c10::StreamId>& a, const std::pair<c10::Device, c10::StreamId>& b) const {
      return std::tuple(a.first.type(), a.first.index(), a.second) < std::tuple(b.first.type(), b.first.index(), b.second);
    }
  };

  std::shared_ptr<const Layout> layout_;
  std::vector<int> dtypes_;
  std::vector<int64_t> numels_;
  std::mutex mutex_;
  std::map<std::pair<c10::Device, c10::StreamId>, std::unique_ptr<DeviceLayout>, Less> on_devices_;
};

const char* name_of(cpu::Level level) {
  switch (level) {
    case cpu::Level::kAvx512: return "avx512";
    case cpu::Level::kAvx2: return "avx2";
    default: return "baseline";
  }
}

cpu::Level parse_level(const std::optional<std::string>& name) {
  if (!name) return cpu::best_level();
  std::string known;
  for (const cpu::Level level : cpu::available_levels()) {
    if (*name == name_of(level)) return level;
    known += std::string(known.empty() ? "" : ", ") + name_of(level);
  }
  TORCH_CHECK_VALUE(false, "cpu_level is '", *name, "', expected one this processor has: ", known);
}

int dtype_code(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat: return static_cast<int>(Dtype::kFp32);
    case at::kHalf: return static_cast<int>(Dtype::kFp16);
    case at::kBFloat16: return static_cast<int>(Dtype::kBf16);
    case at::kDouble: return static_cast<int>(Dtype::kFp64);
    default: return -1;
  }
}

void check_bytes(const char* operation, const char* name, const at::Tensor& tensor, int64_t num_bytes) {
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kByte && tensor.is_contiguous() && tensor.numel() == num_bytes, operation, ": ",
                    name, " is ", tensor.scalar_type(), " ", tensor.sizes(), ", expected contiguous uint8 [", num_bytes, "]");
  TORCH_CHECK_VALUE(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kPayloadAlignment == 0, operation, ": ", name,
                    " begins at ", tensor.const_data_ptr(), ", expected a multiple of ", kPayloadAlignment);
}

void check_table(const char* operation, const char* name, const at::Tensor& tensor, at::ScalarType dtype, int64_t numel,
                 c10::Device device) {
  TORCH_CHECK_VALUE(
      tensor.scalar_type() == dtype && tensor.is_contiguous() && tensor.numel() == numel && tensor.device() == device, operation,
      ": ", name, " is ", tensor.scalar_type(), " ", tensor.sizes(), " on ", tensor.device(), ", expected contiguous ", dtype,
      " [", numel, "] on ", device);
}

std::vector<void*> gradient_pointers(const char* operation, const LayoutHandle& handle, const OptionalTensors& gradients,
                                     c10::Device device) {
  const int64_t num_segments = handle.layout().num_segments;
  TORCH_CHECK_VALUE(static_cast<int64_t>(gradients.size()) == num_segments, operation, ": ", gradients.size(),
                    " gradients, expected ", num_segments);
  std::vector<void*> pointers(num_segments);
  for (int64_t i = 0; i < num_segments; ++i) {
    if (!gradients[i]) continue;
    const at::Tensor& gradient = *gradients[i];
    TORCH_CHECK_VALUE(dtype_code(gradient.scalar_type()) == handle.dtype(i) && gradient.numel() == handle.numel(i) &&
                          gradient.device() == device && (gradient.numel() == 0 || gradient.is_non_overlapping_and_dense()),
                      operation, ": gradients[", i, "] is ", gradient.scalar_type(), " ", gradient.sizes(), " strides ",
                      gradient.strides(), " on ", gradient.device(), ", expected ", handle.numel(i),
                      " dense elements of dtype code ", handle.dtype(i), " on ", device);
    // A null pointer would say that the rank did not use the parameter; empty tensors have one.
    static char empty = 0;
    pointers[i] = gradient.numel() == 0 ? &empty : gradient.mutable_data_ptr();
  }
  return pointers;
}

// Runs the kernel over all tiles, on torch's threads.
template <typename Kernel>
void for_tiles(int64_t num_tiles, const Kernel& kernel) {
  at::parallel_for(0, num_tiles, kTilesPerTask, kernel);
}

/// What EncodeOptions points to, kept while a kernel is enqueued.
struct Encoding {
  std::vector<float*> residuals;
  EncodeOptions options;
};

// held_of: the elements of a segment that its residual holds.
template <class Held>
Encoding parse_encoding(const char* operation, const LayoutHandle& handle, const Held& held_of, int64_t num_tiles,
                        c10::Device device, const std::optional<OptionalTensors>& residuals,
                        const std::optional<uint64_t>& random_key, const std::optional<at::Tensor>& error_sums) {
  Encoding encoding;
  if (residuals) {
    const Layout& layout = handle.layout();
    TORCH_CHECK_VALUE(static_cast<int64_t>(residuals->size()) == layout.num_segments, operation, ": residuals has ",
                      residuals->size(), " entries, expected ", layout.num_segments);
    for (size_t i = 0; i < residuals->size(); ++i) {
      encoding.residuals.push_back(nullptr);
      if (!(*residuals)[i]) continue;
      const at::Tensor& residual = *(*residuals)[i];
      const Run held = held_of(layout.segments[i]);
      check_table(operation, "a residual", residual, at::kFloat, held.numel, device);
      if (held.numel == 0) continue;
      // As the address of element 0, though only the elements held are there.
      const auto address = reinterpret_cast<uintptr_t>(residual.mutable_data_ptr()) - held.element * sizeof(float);
      encoding.residuals.back() = reinterpret_cast<float*>(address);
    }
    encoding.options.residuals = encoding.residuals.data();
  }
  encoding.options.stochastic = random_key.has_value();
  encoding.options.random_key = random_key.value_or(0);
  if (error_sums) {
    check_table(operation, "error_sums", *error_sums, at::kDouble, num_tiles * kErrorSums, device);
    encoding.options.error_sums = static_cast<double*>(error_sums->mutable_data_ptr());
  }
  return encoding;
}

void pack_tensors(LayoutHandle& handle, const OptionalTensors& gradients, const at::Tensor& payload, double scale,
                  const std::optional<at::Tensor>& counters, const std::optional<OptionalTensors>& residuals,
                  const std::optional<uint64_t>& random_key, const std::optional<at::Tensor>& error_sums,
                  const std::optional<std::string>& cpu_level) {
  const c10::Device device = payload.device();
  check_bytes("pack", "payload", payload, handle.layout().payload_bytes());
  if (counters) check_table("pack", "counters", *counters, at::kLong, 2, device);
  const std::vector<void*> pointers = gradient_pointers("pack", handle, gradients, device);
  const cpu::Level level = parse_level(cpu_level);
  auto* out = static_cast<uint8_t*>(payload.mutable_data_ptr());
  auto* counts = counters ? static_cast<int64_t*>(counters->mutable_data_ptr()) : nullptr;
  const auto num_tiles = static_cast<int64_t>(handle.layout().tiles.size());
  const auto all = [](const Segment& segment) { return Run{0, segment.numel}; };
  const Encoding encoding = parse_encoding("pack", handle, all, num_tiles, device, residuals, random_key, error_sums);
  const py::gil_scoped_release no_gil;
  const c10::Stream stream = current_stream(device);
  const DeviceLayout& layout = handle.on(stream);
  if (!device.is_cpu()) return pack(layout, pointers.data(), out, static_cast<float>(scale), counts, stream, encoding.options);
  const PackArgs args{layout.view(), pointers.data(), out, static_cast<float>(scale), counts, encoding.options};
  for_tiles(args.layout.num_tiles, [&](int64_t first, int64_t last) { cpu::pack(args, first, last, level); });
}

void reduce_tensors(LayoutHandle& handle, int64_t chunk, const std::vector<at::Tensor>& payloads, const at::Tensor& out,
                    double scale, const std::optional<OptionalTensors>& residuals, const std::optional<uint64_t>& random_key,
                    const std::optional<at::Tensor>& error_sums, LayoutHandle* sent,
                    const std::optional<std::string>& cpu_level) {
  const c10::Device device = out.device();
  const Layout& sizes = handle.layout();
  const int64_t count = sent == nullptr ? 1 : sizes.chunks_per_shard();
  TORCH_CHECK_VALUE(chunk >= 0 && chunk < sizes.num_chunks && chunk % count == 0, "reduce: chunk is ", chunk, ", expected 0 to ",
                    sizes.num_chunks - 1, count == 1 ? "" : ", the first of a shard");
  TORCH_CHECK_VALUE(!payloads.empty(), "reduce: no payloads, expected one per rank");
  check_bytes("reduce", "out", out, count * sizes.chunk_bytes);
  std::vector<const uint8_t*> pointers;
  for (const at::Tensor& payload : payloads) {
    check_bytes("reduce", "payloads", payload, count * (sent == nullptr ? sizes : sent->layout()).chunk_bytes);
    TORCH_CHECK_VALUE(payload.device() == device, "reduce: a payload is on ", payload.device(), ", expected ", device);
    pointers.push_back(static_cast<const uint8_t*>(payload.const_data_ptr()));
  }
  const cpu::Level level = parse_level(cpu_level);
  auto* bytes = static_cast<uint8_t*>(out.mutable_data_ptr());
  const auto num_payloads = static_cast<int64_t>(pointers.size());
  const int64_t num_tiles = sizes.chunk_first_tile[chunk + count] - sizes.chunk_first_tile[chunk];
  const auto held_of = [&](const Segment& segment) {
    return sent == nullptr ? share_of(segment, chunk, sizes.num_chunks, sizes.num_shards)
                           : shard_of(segment, chunk / count, sizes.num_shards);
  };
  const Encoding encoding = parse_encoding("reduce", handle, held_of, num_tiles, device, residuals, random_key, error_sums);
  const py::gil_scoped_release no_gil;
  const c10::Stream stream = current_stream(device);
  const DeviceLayout& layout = handle.on(stream);
  const auto factor = static_cast<float>(scale);
  if (!device.is_cpu()) {
    if (sent == nullptr) return reduce(layout, chunk, pointers.data(), num_payloads, bytes, factor, stream, encoding.options);
    return reduce_shard(layout, sent->on(stream), chunk / count, pointers.data(), num_payloads, bytes, factor, stream,
                        encoding.options);
  }
  const ReduceArgs args =
      sent == nullptr
          ? ReduceArgs{layout.view_of_chunks(chunk, 1), pointers.data(), num_payloads, bytes, factor, encoding.options}
          : reduce_shard_args(layout, sent->on(stream), chunk / count, pointers.data(), num_payloads, bytes, factor,
                              encoding.options);
  for_tiles(args.layout.num_tiles, [&](int64_t first, int64_t last) { cpu::reduce(args, first, last, level); });
}

void unpack_tensors(LayoutHandle& handle, const at::Tensor& payload, const OptionalTensors& gradients, const at::Tensor& partials,
                    const at::Tensor& found_nonfinite, bool finalize, const std::optional<at::Tensor>& sum_of_squares,
                    const std::optional<std::string>& cpu_level) {
  const c10::Device device = payload.device();
  check_bytes("unpack", "payload", payload, handle.layout().payload_bytes());
  check_table("unpack", "partials", partials, at::kDouble, handle.layout().num_partials, device);
  check_table("unpack", "found_nonfinite", found_nonfinite, at::kInt, 1, device);
  TORCH_CHECK_VALUE(!finalize || sum_of_squares, "unpack: sum_of_squares is None, expected a tensor with finalize=True");
  if (finalize) {
    check_table("unpack", "sum_of_squares", *sum_of_squares, at::kDouble, handle.layout().num_segments, device);
  }
  const std::vector<void*> pointers = gradient_pointers("unpack", handle, gradients, device);
  const cpu::Level level = parse_level(cpu_level);
  auto* sums = finalize ? static_cast<double*>(sum_of_squares->mutable_data_ptr()) : nullptr;
  const auto* bytes = static_cast<const uint8_t*>(payload.const_data_ptr());
  auto* partial = static_cast<double*>(partials.mutable_data_ptr());
  auto* found = static_cast<int32_t*>(found_nonfinite.mutable_data_ptr());
  const py::gil_scoped_release no_gil;
  const c10::Stream stream = current_stream(device);
  const DeviceLayout& layout = handle.on(stream);
  if (!device.is_cpu()) return unpack(layout, bytes, pointers.data(), partial, found, sums, nullptr, stream);
  const UnpackArgs args{layout.view(), bytes,  pointers.data(), partial, found, finalize ? layout.segments() : nullptr,
                        sums,          nullptr};
  for_tiles(args.layout.num_tiles, [&](int64_t first, int64_t last) { cpu::unpack(args, first, last, level); });
  if (finalize) cpu::sum_partials(args);
}

py::list shares_of(const LayoutHandle& handle) {
  py::list rows;
  for (const Share& s : handle.layout().shares) {
    rows.append(py::make_tuple(s.element, s.numel, s.codes_offset, s.scales_offset, s.first_partial, s.name_hash, s.segment,
                               s.chunk, s.block_size, static_cast<int>(s.kind), static_cast<int>(s.dtype),
                               static_cast<int>(s.flag_kind), static_cast<int>(s.scales_padding)));
  }
  return rows;
}

}  // namespace

void bind_ops(py::module_& module) {
  py::class_<LayoutHandle>(module, "Layout")
      .def("uncompressed", &LayoutHandle::in_fp32, "The same slice with its elements as fp32.")
      .def_property_readonly("payload_bytes", [](const LayoutHandle& h) { return h.layout().payload_bytes(); })
      .def_property_readonly("chunk_bytes", [](const LayoutHandle& h) { return h.layout().chunk_bytes; })
      .def_property_readonly("num_segments", [](const LayoutHandle& h) { return h.layout().num_segments; })
      .def_property_readonly("num_chunks", [](const LayoutHandle& h) { return h.layout().num_chunks; })
      .def_property_readonly("num_partials", [](const LayoutHandle& h) { return h.layout().num_partials; })
      .def_property_readonly("num_tiles", [](const LayoutHandle& h) { return h.layout().tiles.size(); })
      .def_property_readonly("chunk_first_tile", [](const LayoutHandle& h) { return h.layout().chunk_first_tile; })
      .def("shares", &shares_of)
      .def("tiles",
           [](const LayoutHandle& h) {
             std::vector<std::pair<int32_t, int32_t>> rows;
             for (const Tile& tile : h.layout().tiles) rows.emplace_back(tile.share, tile.index);
             return rows;
           })
      .def("partials", [](const LayoutHandle& h) {
        std::vector<std::pair<int64_t, int64_t>> rows;
        for (const SegmentPartials& p : h.layout().partials) rows.emplace_back(p.begin, p.end);
        return rows;
      });
  module.def(
      "layout",
      [](const std::vector<int64_t>& numels, const std::vector<int>& dtypes, const std::vector<int>& codecs,
         const std::vector<uint64_t>& hashes, int64_t num_chunks, int64_t slice_idx, int64_t num_slices,
         const std::optional<std::vector<int64_t>>& block_sizes, int64_t num_shards) {
        return std::make_unique<LayoutHandle>(numels, dtypes, codecs, hashes, num_chunks, slice_idx, num_slices, block_sizes,
                                              num_shards);
      },
      py::arg("numels"), py::arg("dtypes"), py::arg("codecs"), py::arg("hashes"), py::arg("num_chunks"), py::arg("slice_idx") = 0,
      py::arg("num_slices") = 1, py::arg("block_sizes") = py::none(), py::arg("num_shards") = 1);
  module.def("hash64", [](const std::string& name) { return hash64(name); });
  module.def("has_kernels", [](const std::string& device_type) { return has_kernels(c10::Device(device_type).type()); });
  // For extensions that bring a type of device of their own; see kernel_table.h.
  module.def("kernel_table", [](const std::string& device_type) {
    const KernelTable* table = kernels_of(c10::Device(device_type).type());
    TORCH_CHECK_VALUE(table != nullptr, "kernel_table: this build has no kernels for ", device_type);
    return py::capsule(table, kKernelTableName);
  });
  module.def("register_kernels", [](const std::string& device_type, const py::capsule& table) {
    TORCH_CHECK_VALUE(table.name() != nullptr && std::string(table.name()) == kKernelTableName,
                      "register_kernels: expected a capsule named ", kKernelTableName);
    register_kernels(c10::Device(device_type).type(), table.get_pointer<const KernelTable>());
  });
  module.def("empty_payload", [](int64_t bytes) { return empty_payload(bytes, c10::Device(c10::DeviceType::CPU)); });
  module.def("cpu_levels", [] {
    std::vector<std::string> names;
    for (const cpu::Level level : cpu::available_levels()) names.emplace_back(name_of(level));
    return names;
  });
  module.def("pack", &pack_tensors, py::arg("layout"), py::arg("gradients"), py::arg("payload"), py::arg("scale"),
             py::arg("counters") = py::none(), py::arg("residuals") = py::none(), py::arg("random_key") = py::none(),
             py::arg("error_sums") = py::none(), py::kw_only(), py::arg("cpu_level") = py::none());
  module.def("reduce", &reduce_tensors, py::arg("layout"), py::arg("chunk"), py::arg("payloads"), py::arg("out"),
             py::arg("scale"), py::arg("residuals") = py::none(), py::arg("random_key") = py::none(),
             py::arg("error_sums") = py::none(), py::kw_only(), py::arg("sent") = py::none(), py::arg("cpu_level") = py::none());
  module.def("unpack", &unpack_tensors, py::arg("layout"), py::arg("payload"), py::arg("gradients"), py::arg("partials"),
             py::arg("found_nonfinite"), py::arg("finalize"), py::arg("sum_of_squares") = py::none(), py::kw_only(),
             py::arg("cpu_level") = py::none());
}

}  // namespace gsync
