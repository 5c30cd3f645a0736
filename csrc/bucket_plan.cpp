#include "bucket_plan.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/hash.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <utility>

namespace gsync {
namespace {

Kind codec_of(const std::string& name) {
  if (name == "fp32") return Kind::kFp32;
  if (name == "fp16") return Kind::kFp16;
  if (name == "bf16") return Kind::kBf16;
  TORCH_CHECK_VALUE(false, "Engine.set_parameters: codec must be fp32, fp16 or bf16, got ", name);
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

}  // namespace

size_t Parameters::KeyHash::operator()(const Key& key) const {
  size_t hash = static_cast<size_t>(key.dtype);
  for (const c10::TensorImpl* parameter : key.parameters) hash = c10::hash_combine(hash, reinterpret_cast<size_t>(parameter));
  return hash;
}

void Parameters::set(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
                     const std::vector<std::string>& codecs) {
  TORCH_CHECK_VALUE(names.size() == parameters.size() && codecs.size() == parameters.size(),
                    "Engine.set_parameters: expected as many names and codecs as parameters, got ", parameters.size(),
                    " parameters, ", names.size(), " names, ", codecs.size(), " codecs");
  std::vector<size_t> by_name(names.size());
  std::iota(by_name.begin(), by_name.end(), size_t{0});
  std::sort(by_name.begin(), by_name.end(), [&](size_t a, size_t b) { return names[a] < names[b]; });

  std::unordered_map<const c10::TensorImpl*, Entry> table;
  for (size_t idx = 0; idx < by_name.size(); ++idx) {
    const size_t i = by_name[idx];
    TORCH_CHECK_VALUE(idx == 0 || names[by_name[idx - 1]] != names[i], "Engine.set_parameters: two parameters are named ",
                      names[i]);
    Entry entry{c10::weak_intrusive_ptr<c10::TensorImpl>(parameters[i].getIntrusivePtr()), hash64(names[i]), codec_of(codecs[i]),
                static_cast<int64_t>(idx)};
    const bool is_new = table.emplace(parameters[i].unsafeGetTensorImpl(), std::move(entry)).second;
    TORCH_CHECK_VALUE(is_new, "Engine.set_parameters: parameter ", names[i], " came twice");
  }
  table_ = std::move(table);
  plans_.clear();
}

std::shared_ptr<BucketPlan> Parameters::plan(const Bucket& bucket, int64_t step) {
  Key key{{}, bucket.buffer.scalar_type()};
  key.parameters.reserve(bucket.parameters.size());
  for (const at::Tensor& parameter : bucket.parameters) key.parameters.push_back(parameter.unsafeGetTensorImpl());
  auto found = plans_.find(key);
  if (found == plans_.end()) found = plans_.emplace(std::move(key), make_plan(bucket)).first;
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
  const auto doubles = at::TensorOptions().dtype(at::kDouble).device(device_);
  part.sum_of_squares = at::zeros({static_cast<int64_t>(part.norm_idx.size())}, doubles);
  return plan;
}

void Parameters::forget_unused_plans(int64_t step) {
  for (auto it = plans_.begin(); it != plans_.end();) {
    it = it->second->last_step + 1 < step ? plans_.erase(it) : std::next(it);
  }
}

std::shared_ptr<BucketPlan> Parameters::make_plan(const Bucket& bucket) const {
  const ElementType type = element_type(bucket.buffer.scalar_type());
  auto plan = std::make_shared<BucketPlan>();

  // 1. The segments lie one after the other in the buffer. Each part takes its own.
  struct Draft {
    std::vector<Segment> segments;
    int64_t numel = 0;
    Part part;
  };
  std::map<int, Draft> drafts;  // by codec where a payload has one, else a single one
  int64_t numel = 0;
  for (const at::Tensor& parameter : bucket.parameters) {
    const auto entry = table_.find(parameter.unsafeGetTensorImpl());
    TORCH_CHECK_VALUE(entry != table_.end(), "Engine.submit: bucket ", bucket.index, " holds a parameter of shape ",
                      parameter.sizes(), " that set_parameters did not get");
    // DDP gives a complex parameter a buffer of real numbers, in pairs.
    const bool in_pairs = parameter.is_complex() && !bucket.buffer.is_complex();
    const int64_t segment_numel = parameter.numel() * (in_pairs ? 2 : type.per_element);
    const Kind codec = exchange_.encodes() ? entry->second.codec : Kind::kFp32;
    Draft& draft = drafts[exchange_.one_codec() ? static_cast<int>(codec) : 0];
    draft.segments.push_back({segment_numel, type.dtype, codec, entry->second.name_hash});
    draft.numel += segment_numel;
    draft.part.offsets.push_back(numel * type.bytes);
    draft.part.norm_idx.push_back(entry->second.norm_idx);
    draft.part.is_fp16 = draft.part.is_fp16 || codec == Kind::kFp16;
    numel += segment_numel;
  }
  TORCH_CHECK_VALUE(numel == bucket.buffer.numel() * type.per_element, "Engine.submit: bucket ", bucket.index, " has ",
                    bucket.buffer.numel() * type.per_element, " elements, its parameters ", numel);

  // 2. Cut each part into slices, all of them with the same tables of sums.
  const auto doubles = at::TensorOptions().dtype(at::kDouble).device(device_);
  for (auto& [codec, draft] : drafts) {
    Part& part = draft.part;
    part.in_place = device_.is_cpu() && drafts.size() == 1 && exchange_.num_chunks() == 1 && type.dtype == Dtype::kFp32 &&
                    draft.segments.front().codec == Kind::kFp32;
    const int64_t num_tiles = std::max<int64_t>(1, ceil_div(draft.numel, kTileElements));
    const int64_t num_slices = std::clamp<int64_t>(ceil_div(draft.numel * type.bytes, slice_bytes_), 1, num_tiles);
    for (int64_t slice = 0; slice < num_slices; ++slice) {
      auto layout = std::make_shared<Layout>(build_layout(draft.segments, exchange_.num_chunks(), slice, num_slices));
      if (part.in_place) *layout = in_place_layout(std::move(*layout), part.offsets);
      if (slice == 0) {
        part.partials = at::zeros({layout->num_partials}, doubles);
        part.sum_of_squares = at::zeros({layout->num_segments}, doubles);
      }
      plan->wire_bytes += exchange_.wire_bytes(*layout);
      part.slices.push_back(std::make_unique<DeviceLayout>(std::move(layout), device_));
    }
    if (draft.numel > 0) plan->parts.push_back(std::move(part));
  }
  plan->gradient_bytes = numel * type.bytes;
  return plan;
}

}  // namespace gsync
