#include "pipeline.h"

#include <ATen/ops/_values.h>
#include <ATen/ops/div.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/fill.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "common/philox.h"

namespace gsync {
namespace {

using Clock = std::chrono::steady_clock;

class SliceFlow final : public Flow {
 public:
  SliceFlow(const Pipeline& pipeline, std::shared_ptr<BucketJob> job, int64_t number, Part& part, size_t slice,
            SliceBuffers& buffers)
      : Flow(pipeline, std::move(job), number),
        part_(part),
        slice_(slice),
        layouts_(part.slices[slice]),
        buffers_(buffers),
        is_first_of_part_(slice == 0),
        is_last_of_part_(slice + 1 == part.slices.size()) {}

  void start(c10::Stream stream) override {
    std::vector<const void*> sent;
    find_gradients(sent);

    // 1. pack
    begin(Phase::kPack);
    part_.exchange->reserve(layouts_, buffers_);
    // What travels uncompressed at first is encoded on its way.
    pack(layouts_.packed(), sent.data(), payload(), pipeline_.scale, part_.is_fp16 ? pipeline_.counters : nullptr, stream,
         part_.exchange->packs_uncompressed() ? EncodeOptions{} : encoding(Stage::kPack));
    end(Phase::kPack);

    // 2. exchange
    begin(Phase::kExchange);
    issue(stream);
  }

  bool advance(c10::Stream stream) override {
    if (collective_) {
      collective_->finish();
      ++stage_;
      issue(stream);
      if (collective_) return false;
    }
    end(Phase::kExchange);

    // 3. unpack. On one rank the gradients are what they should be, only measured.
    begin(Phase::kUnpack);
    if (job_->bucket.gradients && !job_->bucket.gradients->is_complete) read_flags();
    if (!part_.exchange->encodes()) gradients_.assign(gradients_.size(), nullptr);
    auto* sums = is_last_of_part_ ? static_cast<double*>(part_.sum_of_squares.mutable_data_ptr()) : nullptr;
    unpack(*layouts_.wire, payload(), gradients_.data(), static_cast<double*>(part_.partials.mutable_data_ptr()),
           job_->found_nonfinite, sums, pipeline_.failed, stream);
    end(Phase::kUnpack);
    return true;
  }

 private:
  uint8_t* payload() const { return static_cast<uint8_t*>(buffers_.payload.mutable_data_ptr()); }

  // Where each segment is packed from, and, in gradients_, unpacked to.
  void find_gradients(std::vector<const void*>& sent) {
    const size_t count = part_.parameter_idx.size();
    gradients_.resize(count);
    sent.resize(count);
    const GradientList* list = job_->bucket.gradients.get();
    auto* base = list == nullptr ? static_cast<uint8_t*>(job_->bucket.buffer.mutable_data_ptr()) : nullptr;
    for (size_t i = 0; i < count; ++i) {
      if (list == nullptr) {
        gradients_[i] = base + part_.offsets[i];
        sent[i] = job_->is_used[part_.parameter_idx[i]] ? gradients_[i] : nullptr;
        continue;
      }
      const at::Tensor& source = list->sources[part_.parameter_idx[i]];
      const at::Tensor& target = list->targets[part_.parameter_idx[i]];
      sent[i] = source.defined() ? source.const_data_ptr() : nullptr;
      gradients_[i] = target.defined() ? target.mutable_data_ptr() : nullptr;
    }
  }

  // Which parameters were used by another rank only: those get memory for their mean. The flags are the same in every chunk.
  void read_flags() {
    GradientList& list = *job_->bucket.gradients;
    const int32_t flag_bytes = layouts_.wire->layout().flag_bytes;
    const auto count = static_cast<int64_t>(part_.parameter_idx.size());
    if (!pipeline_.device.is_cpu()) {
      if (!is_first_of_part_) return;
      const auto pinned = at::TensorOptions().dtype(at::kByte).device(at::kCPU).pinned_memory(pipeline_.device.is_cuda());
      at::Tensor bytes = at::empty({count * flag_bytes}, pinned);
      bytes.copy_(buffers_.payload.narrow(0, 0, count * flag_bytes), /*non_blocking=*/true);
      list.flags.push_back({part_.parameter_idx, std::move(bytes)});
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      if (list.sources[part_.parameter_idx[i]].defined()) continue;
      const uint8_t* flag = payload() + i * flag_bytes;
      at::Tensor& target = list.targets[part_.parameter_idx[i]];
      if (!target.defined() && std::any_of(flag, flag + flag_bytes, [](uint8_t byte) { return byte != 0; }))
        target = empty_gradient(job_->bucket.parameters[part_.parameter_idx[i]]);
      gradients_[i] = target.defined() ? target.mutable_data_ptr() : nullptr;
    }
  }

  void issue(c10::Stream stream) {
    const Encodings encodings{encoding(Stage::kPack), encoding(Stage::kReduce)};
    collective_ = part_.exchange->issue(stage_, layouts_, buffers_, stream, encodings);
    issued_ = Clock::now();
  }

  // How this slice is encoded: at first, or after the sum.
  EncodeOptions encoding(Stage stage) const {
    EncodeOptions encode;
    if (!part_.exchange->encodes()) return encode;
    const bool packs = stage == Stage::kPack;
    const auto& residuals = packs ? part_.sender_residuals : part_.reducer_residuals;
    const auto& errors = packs ? part_.pack_errors : part_.reduce_errors;
    if (!residuals.empty()) encode.residuals = residuals.data();
    const bool measures = !errors.empty() && job_->step % pipeline_.measure_every == 0;
    if (measures) encode.error_sums = static_cast<double*>(errors[slice_].mutable_data_ptr());
    encode.stochastic = pipeline_.stochastic;
    encode.random_key =
        philox_key(job_->seed, static_cast<uint64_t>(job_->step), stage, packs ? static_cast<uint32_t>(pipeline_.rank) : 0);
    return encode;
  }

  Part& part_;
  size_t slice_;
  const SliceLayout& layouts_;
  SliceBuffers& buffers_;
  bool is_first_of_part_;
  bool is_last_of_part_;
  std::vector<void*> gradients_;
};

// fp32 gradients under an all_reduce in fp32, on the host: the buffer itself is what travels. Two copies less than SliceFlow.
class InPlaceFlow final : public Flow {
 public:
  InPlaceFlow(const Pipeline& pipeline, std::shared_ptr<BucketJob> job, int64_t number, Part& part, size_t slice)
      : Flow(pipeline, std::move(job), number),
        part_(part),
        layout_(*part.slices[slice].wire),
        is_last_of_part_(slice + 1 == part.slices.size()) {
    const Layout& layout = layout_.layout();
    const int64_t begin = layout.tiles.empty() ? 0 : layout.shares[layout.tiles.front().share].codes_offset;
    constexpr auto kBytes = static_cast<int64_t>(sizeof(float));
    const at::Tensor& buffer = job_->bucket.buffer;
    gradients_ =
        (buffer.is_complex() ? at::view_as_real(buffer).view(-1) : buffer).narrow(0, begin / kBytes, layout.chunk_bytes / kBytes);
  }

  void start(c10::Stream /*stream*/) override {
    begin(Phase::kPack);
    if (pipeline_.scale != 1.0f) gradients_.mul_(pipeline_.scale);
    end(Phase::kPack);

    begin(Phase::kExchange);
    if (pipeline_.transport) collective_ = pipeline_.transport->all_reduce(gradients_);
    issued_ = Clock::now();
  }

  bool advance(c10::Stream stream) override {
    if (collective_) collective_->finish();
    ++stage_;
    end(Phase::kExchange);

    begin(Phase::kUnpack);
    const std::vector<void*> only_measured(part_.offsets.size(), nullptr);
    const auto* buffer = static_cast<const uint8_t*>(job_->bucket.buffer.const_data_ptr());
    auto* sums = is_last_of_part_ ? static_cast<double*>(part_.sum_of_squares.mutable_data_ptr()) : nullptr;
    unpack(layout_, buffer, only_measured.data(), static_cast<double*>(part_.partials.mutable_data_ptr()), job_->found_nonfinite,
           sums, pipeline_.failed, stream);
    // One form of NaN, whatever the library's sum made of it.
    if (job_->host_nonfinite != 0) gradients_.masked_fill_(at::isnan(gradients_), std::numeric_limits<float>::quiet_NaN());
    end(Phase::kUnpack);
    return true;
  }

 private:
  Part& part_;
  const DeviceLayout& layout_;
  bool is_last_of_part_;
  at::Tensor gradients_;  // this slice's stretch of the buffer
};

// A sparse gradient is summed as it is: rows that no rank touched stay away, and no value is rounded.
class SparseFlow final : public Flow {
 public:
  SparseFlow(const Pipeline& pipeline, std::shared_ptr<BucketJob> job) : Flow(pipeline, std::move(job), 0) {}

  void start(c10::Stream /*stream*/) override {
    const c10::AutoGradMode no_grad(false);
    at::Tensor& gradient = job_->bucket.buffer;
    // Divided as stock DDP does it, so that the bits agree for every world size.
    if (pipeline_.scale != 1.0f) gradient.div_(std::nearbyint(1.0 / pipeline_.scale));
    begin(Phase::kExchange);
    if (pipeline_.transport) collective_ = pipeline_.transport->all_reduce_sparse(gradient);
    issued_ = Clock::now();
  }

  bool advance(c10::Stream /*stream*/) override {
    if (collective_) collective_->finish();
    end(Phase::kExchange);

    // Rows that came more than once count as their sum.
    at::Tensor values = job_->bucket.buffer.coalesce()._values();
    if (values.is_complex()) values = at::view_as_real(values);
    job_->sums->parts.front().sum_of_squares.copy_(values.to(at::kDouble).square().sum());
    at::from_blob(job_->found_nonfinite, {1}, values.options().dtype(at::kInt))
        .bitwise_or_(at::isfinite(values).all().logical_not());
    return true;
  }
};

}  // namespace

int64_t num_flows(const BucketJob& job) {
  if (!job.plan) return 1;
  int64_t count = 0;
  for (const Part& part : job.plan->parts) count += static_cast<int64_t>(part.slices.size());
  return count;
}

Flow::Flow(const Pipeline& pipeline, std::shared_ptr<BucketJob> job, int64_t number)
    : pipeline_(pipeline), job_(std::move(job)), of_(job_->span()) {
  of_.slice = static_cast<int32_t>(number);
}

void Flow::begin(Phase phase) {
  const char* name = phase == Phase::kPack ? "gsync::pack" : phase == Phase::kExchange ? "gsync::exchange" : "gsync::unpack";
  // While one slice is exchanged the next is packed.
  range_.emplace(name, /*overlaps=*/phase == Phase::kExchange);
  pipeline_.clock->begin(phase, of_);
}

void Flow::end(Phase phase) {
  pipeline_.clock->end(phase, of_);
  range_.reset();
}

std::unique_ptr<Flow> make_flow(const Pipeline& pipeline, std::shared_ptr<BucketJob> job, int64_t number, SliceBuffers& buffers) {
  if (!job->plan) return std::make_unique<SparseFlow>(pipeline, std::move(job));
  int64_t slice = number;
  for (Part& part : job->plan->parts) {
    const auto slices = static_cast<int64_t>(part.slices.size());
    const auto idx = static_cast<size_t>(slice);
    if (slice < slices && part.in_place) return std::make_unique<InPlaceFlow>(pipeline, std::move(job), number, part, idx);
    if (slice < slices) return std::make_unique<SliceFlow>(pipeline, std::move(job), number, part, idx, buffers);
    slice -= slices;
  }
  return nullptr;
}

void poison(const Bucket& bucket) {
  const c10::AutoGradMode no_grad(false);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto fill = [nan](at::Tensor gradient) {
    if (!gradient.defined() || gradient.numel() == 0) return;
    if (gradient.is_sparse()) gradient = gradient._values();
    gradient.fill_(nan);
  };
  fill(bucket.buffer);
  for (const at::Tensor& parameter : bucket.parameters) fill(parameter.mutable_grad());
}

}  // namespace gsync
