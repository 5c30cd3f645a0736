#include "bucket_plan.h"

#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <string>
#include <utility>

namespace gsync {
namespace {

Kind codec_of(const std::string& name) {
  if (name == "fp32") return Kind::kFp32;
  if (name == "fp16") return Kind::kFp16;
  if (name == "bf16") return Kind::kBf16;
  if (name == "fp8_e4m3") return Kind::kFp8E4m3;
  if (name == "fp8_e5m2") return Kind::kFp8E5m2;
  if (name == "int8") return Kind::kInt8;
  if (name == "int4") return Kind::kInt4;
  TORCH_CHECK_VALUE(false, "Engine.set_parameters: codec must be fp32, fp16, bf16, fp8_e4m3, fp8_e5m2, int8 or int4, got ", name);
}

// How a kernel sees the elements of a buffer; a complex element is two real ones.
struct ElementType {
  Dtype dtype;
  int64_t bytes;
  int64_t per_element;
};

ElementType element_type(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return {Dtype::kFp32, 4, 1};
    case at::kHalf: return {Dtype::kFp16, 2, 1};
    case at::kBFloat16: return {Dtype::kBf16, 2, 1};
    case at::kDouble: return {Dtype::kFp64, 8, 1};
    case at::kComplexFloat: return {Dtype::kFp32, 4, 2};
    case at::kComplexDouble: return {Dtype::kFp64, 8, 2};
    case at::kComplexHalf: return {Dtype::kFp16, 2, 2};
    default:
      TORCH_CHECK_VALUE(false, "Engine.submit: gradients must be fp32, fp16, bf16, fp64 or complex, got ", c10::toString(type));
  }
}

at::TensorOptions doubles_on(c10::Device device) { return at::TensorOptions().dtype(at::kDouble).device(device); }

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The layout of a slice whose payload is the bucket's own buffer: what travels is the gradients as they lie there, so there are
// neither flags nor padding, and nothing is copied. `offsets`: bytes from the start of the buffer to each segment.
Layout in_place_layout(Layout layout, const std::vector<int64_t>& offsets) {
  layout.chunk_bytes = 0;
  for (Share& share : layout.shares) {
    if (share.segment < 0) continue;
    share.codes_offset = offsets[share.segment] + share.element * static_cast<int64_t>(sizeof(float));
    layout.chunk_bytes += share.numel * static_cast<int64_t>(sizeof(float));
  }
  std::erase_if(layout.tiles, [&](const Tile& tile) { return layout.shares[tile.share].segment < 0; });
  layout.chunk_first_tile = {0, static_cast<int64_t>(layout.tiles.size())};
  return layout;
}

// Waits for the copy. Undefined on the CPU.
at::Tensor on_device(const std::vector<int64_t>& values, c10::Device device) {
  if (device.is_cpu()) return {};
  at::Tensor copy = at::empty({static_cast<int64_t>(values.size())}, at::TensorOptions().dtype(at::kLong).device(device));
  auto* data = const_cast<int64_t*>(values.data());
  return copy.copy_(at::from_blob(data, copy.sizes(), at::TensorOptions().dtype(at::kLong)));
}

}  // namespace

Parameters::Parameters(Exchanges& exchanges, std::string exchange, c10::Device device, PlanOptions options)
    : exchanges_(exchanges), exchange_(std::move(exchange)), device_(device), options_(options) {
  if (options_.measure_error) retired_errors_ = at::zeros({2, kErrorSums}, doubles_on(device_));
}

size_t Parameters::KeyHash::operator()(const Key& key) const {
  size_t hash = c10::hash_combine(static_cast<size_t>(key.dtype), key.has_started ? 1 : 0);
  for (const c10::TensorImpl* parameter : key.parameters) hash = c10::hash_combine(hash, reinterpret_cast<size_t>(parameter));
  return hash;
}

void Parameters::set(const ParameterTable& given) {
  const size_t count = given.parameters.size();
  const auto fits = [count](size_t size) { return size == 0 || size == count; };
  TORCH_CHECK_VALUE(given.names.size() == count && given.codecs.size() == count && fits(given.block_sizes.size()) &&
                        fits(given.residuals.size()) && fits(given.exchanges.size()),
                    "Engine.set_parameters: expected as many names, codecs, block sizes, residuals and exchanges as parameters, ",
                    "got ", count, " parameters, ", given.names.size(), " names, ", given.codecs.size(), " codecs, ",
                    given.block_sizes.size(), " block sizes, ", given.residuals.size(), " residuals, ", given.exchanges.size(),
                    " exchanges");
  const std::vector<std::string>& names = given.names;
  std::vector<size_t> by_name(count);
  std::iota(by_name.begin(), by_name.end(), size_t{0});
  std::sort(by_name.begin(), by_name.end(), [&](size_t a, size_t b) { return names[a] < names[b]; });

  std::unordered_map<const c10::TensorImpl*, Entry> table;
  for (size_t idx = 0; idx < count; ++idx) {
    const size_t i = by_name[idx];
    TORCH_CHECK_VALUE(idx == 0 || names[by_name[idx - 1]] != names[i], "Engine.set_parameters: two parameters are named ",
                      names[i]);
    const Exchange& exchange = exchanges_.get(given.exchanges.empty() ? exchange_ : given.exchanges[i]);
    Entry entry{c10::weak_intrusive_ptr<c10::TensorImpl>(given.parameters[i].getIntrusivePtr()),
                hash64(names[i]),
                codec_of(given.codecs[i]),
                &exchange,
                given.block_sizes.empty() ? 0 : given.block_sizes[i],
                static_cast<int64_t>(idx),
                given.residuals.empty() ? Residual{} : given.residuals[i].value_or(Residual{})};
    TORCH_CHECK_VALUE(is_elementwise(entry.codec) || !exchange.encodes() || !exchange.one_codec(),
                      "Engine.set_parameters: codec ", given.codecs[i], " of parameter ", names[i],
                      " needs scatter_gather: libraries cannot sum it");
    TORCH_CHECK_VALUE(entry.codec != Kind::kFp16 || !exchange.packs_uncompressed(),
                      "Engine.set_parameters: codec fp16 of parameter ", names[i],
                      " does not go with hierarchical, which does not count what vanishes; expected bf16");
    const bool is_new = table.emplace(given.parameters[i].unsafeGetTensorImpl(), std::move(entry)).second;
    TORCH_CHECK_VALUE(is_new, "Engine.set_parameters: parameter ", names[i], " came twice");
  }
  table_ = std::move(table);
  for (const auto& [key, plan] : plans_) retire(*plan);
  plans_.clear();
}

std::shared_ptr<BucketPlan> Parameters::plan(const Bucket& bucket, int64_t step) {
  const bool has_started = step >= options_.start_step;
  Key key{{}, bucket.dtype(), bucket.gradients == nullptr, has_started};
  key.parameters.reserve(bucket.parameters.size());
  for (const at::Tensor& parameter : bucket.parameters) key.parameters.push_back(parameter.unsafeGetTensorImpl());
  auto found = plans_.find(key);
  if (found == plans_.end()) found = plans_.emplace(std::move(key), make_plan(bucket, has_started)).first;
  found->second->last_step = step;
  return found->second;
}

std::shared_ptr<BucketPlan> Parameters::sparse_plan(const Bucket& bucket) const {
  auto plan = std::make_shared<BucketPlan>();
  Part& part = plan->parts.emplace_back();
  for (const at::Tensor& parameter : bucket.parameters) {
    const auto entry = table_.find(parameter.unsafeGetTensorImpl());
    TORCH_CHECK_VALUE(entry != table_.end(), "Engine.submit: bucket ", bucket.index, " holds a parameter of shape ",
                      parameter.sizes(), " that set_parameters did not get");
    part.norm_idx.push_back(entry->second.norm_idx);
  }
  part.norm_idx_on_device = on_device(part.norm_idx, device_);
  part.sum_of_squares = at::zeros({static_cast<int64_t>(part.norm_idx.size())}, doubles_on(device_));
  return plan;
}

void Parameters::forget_unused_plans(int64_t step) {
  for (auto it = plans_.begin(); it != plans_.end();) {
    const bool is_unused = it->second->last_step + 1 < step;
    if (is_unused) retire(*it->second);
    it = is_unused ? plans_.erase(it) : std::next(it);
  }
}

// ---- what encoding lost ----

void Parameters::add_residual(Part& part, const Segment& segment, const Residual& residual) const {
  part.residuals.push_back(residual);
  part.sender_residuals.push_back(nullptr);
  part.reducer_residuals.push_back(nullptr);
  if (!residual.sender.defined()) return;
  const Exchange& exchange = *part.exchange;
  const int64_t num_shards = exchange.num_shards();
  const Run sent = num_shards > 1 ? shard_of(segment, exchange.my_shard(), num_shards) : Run{0, segment.numel};
  const Run held = share_of(segment, exchange.my_chunk(), exchange.num_chunks(), num_shards);
  // As the address of element 0, though only the elements of `run` are there.
  const auto address = [this](const at::Tensor& memory, Run run) -> float* {
    TORCH_CHECK_VALUE(memory.defined() && memory.scalar_type() == at::kFloat && memory.is_contiguous() &&
                          memory.numel() == run.numel && memory.device() == device_,
                      "Engine.set_parameters: expected a residual of ", run.numel, " contiguous fp32 elements on ", device_);
    if (run.numel == 0) return nullptr;
    return reinterpret_cast<float*>(reinterpret_cast<uintptr_t>(memory.mutable_data_ptr()) - run.element * sizeof(float));
  };
  part.sender_residuals.back() = address(residual.sender, sent);
  part.reducer_residuals.back() = address(residual.reducer, held);
}

void Parameters::add_error_tables(Part& part, const Layout& layout) const {
  const auto zeros = [this](int64_t tiles) { return at::zeros({tiles, kErrorSums}, doubles_on(device_)); };
  const auto& first_tile = layout.chunk_first_tile;
  const auto tiles_of = [&](int64_t chunk, int64_t count) { return first_tile[chunk + count] - first_tile[chunk]; };
  const int64_t per_shard = layout.chunks_per_shard();
  part.pack_errors.push_back(zeros(tiles_of(part.exchange->my_shard() * per_shard, per_shard)));
  if (part.exchange->num_chunks() == 1) return;
  part.reduce_errors.push_back(zeros(tiles_of(part.exchange->my_chunk(), 1)));
}

void Parameters::retire(const BucketPlan& plan) {
  for (const Part& part : plan.parts) {
    for (const at::Tensor& table : part.pack_errors) retired_errors_.select(0, 0).add_(table.sum(0));
    for (const at::Tensor& table : part.reduce_errors) retired_errors_.select(0, 1).add_(table.sum(0));
  }
}

at::Tensor Parameters::error_sums() const {
  if (!retired_errors_.defined()) return {};
  at::Tensor total = retired_errors_.clone();
  for (const auto& [key, plan] : plans_) {
    for (const Part& part : plan->parts) {
      for (const at::Tensor& table : part.pack_errors) total.select(0, 0).add_(table.sum(0));
      for (const at::Tensor& table : part.reduce_errors) total.select(0, 1).add_(table.sum(0));
    }
  }
  return total;
}

void Parameters::reset_error_sums() {
  if (!retired_errors_.defined()) return;
  retired_errors_.zero_();
  for (const auto& [key, plan] : plans_) {
    for (Part& part : plan->parts) {
      for (at::Tensor& table : part.pack_errors) table.zero_();
      for (at::Tensor& table : part.reduce_errors) table.zero_();
    }
  }
}

void Parameters::follow_loss_scale(const at::Tensor& scale, at::Tensor& unit) {
  std::vector<at::Tensor> residuals;
  for (const auto& [key, entry] : table_) {
    if (!entry.residual.sender.defined()) continue;
    residuals.push_back(entry.residual.sender);
    residuals.push_back(entry.residual.reducer);
  }
  if (residuals.empty()) return;
  if (device_.is_cpu()) {
    const float now = *static_cast<const float*>(scale.const_data_ptr());
    float& before = *static_cast<float*>(unit.mutable_data_ptr());
    if (now == before || !(now > 0) || !std::isfinite(now)) return;
    for (at::Tensor& residual : residuals) residual.mul_(now / before);
    before = now;
    return;
  }
  const at::Tensor is_scale = scale.gt(0).logical_and_(scale.isfinite());
  const at::Tensor now = at::where(is_scale, scale, unit);
  at::_foreach_mul_(residuals, now.div(unit).select(0, 0));
  unit.copy_(now);
}

// ---- one bucket ----

std::shared_ptr<BucketPlan> Parameters::make_plan(const Bucket& bucket, bool has_started) const {
  const ElementType type = element_type(bucket.dtype());
  auto plan = std::make_shared<BucketPlan>();

  // 1. The segments lie one after the other in the buffer. Each part takes its own.
  struct Draft {
    std::vector<Segment> segments;
    int64_t numel = 0;
    Part part;
  };
  // By exchange, and by codec where a payload has one. In the order of names, which is the same on every rank.
  std::map<std::pair<std::string, int>, Draft> drafts;
  int64_t numel = 0;
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    const at::Tensor& parameter = bucket.parameters[i];
    const auto entry = table_.find(parameter.unsafeGetTensorImpl());
    TORCH_CHECK_VALUE(entry != table_.end(), "Engine.submit: bucket ", bucket.index, " holds a parameter of shape ",
                      parameter.sizes(), " that set_parameters did not get");
    // DDP gives a complex parameter a buffer of real numbers, in pairs.
    const bool in_pairs = parameter.is_complex() && !at::isComplexType(bucket.dtype());
    const int64_t segment_numel = parameter.numel() * (in_pairs ? 2 : type.per_element);
    const Exchange& exchange = *entry->second.exchange;
    Kind codec = exchange.encodes() ? entry->second.codec : Kind::kFp32;
    if (!is_elementwise(codec) && !has_started) codec = Kind::kBf16;
    Draft& draft = drafts[{exchange.name(), exchange.one_codec() ? static_cast<int>(codec) : 0}];
    draft.part.exchange = &exchange;
    draft.segments.push_back(
        {segment_numel, type.dtype, codec, entry->second.name_hash, is_elementwise(codec) ? 0 : entry->second.block_size});
    draft.numel += segment_numel;
    if (has_started && exchange.encodes()) add_residual(draft.part, draft.segments.back(), entry->second.residual);
    draft.part.offsets.push_back(numel * type.bytes);
    draft.part.parameter_idx.push_back(static_cast<int64_t>(i));
    draft.part.norm_idx.push_back(entry->second.norm_idx);
    draft.part.is_fp16 = draft.part.is_fp16 || codec == Kind::kFp16;
    numel += segment_numel;
  }
  TORCH_CHECK_VALUE(bucket.gradients || numel == bucket.buffer.numel() * type.per_element, "Engine.submit: bucket ", bucket.index,
                    " has ", bucket.buffer.numel() * type.per_element, " elements, its parameters ", numel);

  // 2. Cut each part into slices, all of them with the same tables of sums.
  for (auto& [key, draft] : drafts) {
    Part& part = draft.part;
    const Exchange& exchange = *part.exchange;
    const auto is_kept = [](const Residual& residual) { return residual.sender.defined(); };
    if (std::none_of(part.residuals.begin(), part.residuals.end(), is_kept)) {
      part.sender_residuals.clear();
      part.reducer_residuals.clear();
    }
    part.in_place = !bucket.gradients && device_.is_cpu() && drafts.size() == 1 && exchange.num_chunks() == 1 &&
                    type.dtype == Dtype::kFp32 && draft.segments.front().codec == Kind::kFp32;
    const int64_t num_tiles = std::max<int64_t>(1, ceil_div(draft.numel, kTileElements));
    const int64_t num_slices = std::clamp<int64_t>(ceil_div(draft.numel * type.bytes, options_.slice_bytes), 1, num_tiles);
    for (int64_t slice = 0; slice < num_slices; ++slice) {
      auto layout =
          std::make_shared<Layout>(build_layout(draft.segments, exchange.num_chunks(), slice, num_slices, exchange.num_shards()));
      if (part.in_place) *layout = in_place_layout(std::move(*layout), part.offsets);
      if (slice == 0) {
        part.partials = at::zeros({layout->num_partials}, doubles_on(device_));
        part.sum_of_squares = at::zeros({layout->num_segments}, doubles_on(device_));
      }
      if (options_.measure_error && exchange.encodes() && !part.in_place) add_error_tables(part, *layout);
      SliceLayout& added = part.slices.emplace_back();
      if (exchange.packs_uncompressed()) {
        added.uncompressed = std::make_unique<DeviceLayout>(std::make_shared<const Layout>(uncompressed(*layout)), device_);
      }
      added.wire = std::make_unique<DeviceLayout>(std::move(layout), device_);
      plan->wire_bytes += exchange.wire_bytes(added);
    }
    part.norm_idx_on_device = on_device(part.norm_idx, device_);
    if (draft.numel > 0) plan->parts.push_back(std::move(part));
  }
  plan->gradient_bytes = numel * type.bytes;
  return plan;
}

}  // namespace gsync
