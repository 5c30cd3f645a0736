// What a bucket is made of, and how it is cut: worked out once for each set of parameters that DDP puts into a bucket.
//
//   part   segments of a bucket that travel in the same messages: all of one exchange, or under all_reduce those of one codec
//   slice  at most slice_bytes of a part
//
// What encoding a parameter lost belongs to the parameter: a plan only points to it, so that DDP may rebuild its buckets.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "exchange.h"
#include "gradient_list.h"
#include "ops_binding.h"

namespace gsync {

/// A bucket as DDP or the reducer hands it over.
struct Bucket {
  int64_t index = 0;
  bool is_last = false;
  at::Tensor buffer;                   // flat, or the sparse gradient itself; undefined: see gradients
  std::vector<at::Tensor> parameters;  // in the order of the buffer
  std::shared_ptr<GradientList> gradients;  // where autograd left them, one for each parameter; null: in the buffer

  bool is_sparse() const { return buffer.defined() && buffer.is_sparse(); }
  at::ScalarType dtype() const { return (gradients ? parameters.front() : buffer).scalar_type(); }
  c10::Device device() const { return (gradients ? parameters.front() : buffer).device(); }
};

/// What encoding lost, of one parameter: fp32, on the device. Undefined where it is not kept.
struct Residual {
  at::Tensor sender;   // of what this rank encodes first: [numel], or the elements of its shard (shard_of)
  at::Tensor reducer;  // of the elements that this rank reduces (share_of)
};

struct Part {
  const Exchange* exchange = nullptr;
  std::vector<int64_t> offsets;    // bytes from the start of the buffer to each segment
  std::vector<int64_t> parameter_idx;  // of each segment, in the bucket
  std::vector<int64_t> norm_idx;   // of each segment's parameter, in the order of names
  std::vector<SliceLayout> slices;
  at::Tensor partials;             // fp64 on the device: sums of squares, one per tile
  at::Tensor sum_of_squares;       // fp64 on the device: one per segment
  at::Tensor norm_idx_on_device;   // undefined on the CPU
  // As EncodeOptions takes them; empty: none are kept.
  std::vector<float*> sender_residuals;
  std::vector<float*> reducer_residuals;
  std::vector<Residual> residuals;       // their memory
  // fp64 [tiles, kErrorSums] on the device, of each slice; empty: not measured.
  std::vector<at::Tensor> pack_errors;
  std::vector<at::Tensor> reduce_errors;
  bool is_fp16 = false;            // its vanished values are counted
  bool in_place = false;           // the buffer is the payload; see in_place_layout()
};

struct BucketPlan {
  std::vector<Part> parts;
  int64_t gradient_bytes = 0;
  int64_t wire_bytes = 0;
  int64_t last_step = 0;
};

struct PlanOptions {
  int64_t slice_bytes = 25 << 20;  // of gradients
  int64_t start_step = 0;  // block codecs, and residuals, are used from this step on; bf16 until then
  bool measure_error = false;  // whether there are steps that do
};

/// What the model's parameters are called and how they travel; one entry for each parameter.
struct ParameterTable {
  std::vector<at::Tensor> parameters;
  std::vector<std::string> names;
  std::vector<std::string> codecs;
  std::vector<int64_t> block_sizes;                 // 0: the codec's own; empty: 0 for all
  std::vector<std::optional<Residual>> residuals;   // empty: none for all
  std::vector<std::string> exchanges;               // empty: the default for all
};

/// The parameters of the model, by identity, and the plans made from them.
class Parameters {
 public:
  /// Args: exchanges: outlives this; exchange: of parameters that are told no other
  Parameters(Exchanges& exchanges, std::string exchange, c10::Device device, PlanOptions options);

  /// Holds the parameters weakly, residuals strongly; forgets all plans.
  /// Throws c10::ValueError for columns of different lengths, an unknown codec or exchange, a name or parameter that comes twice.
  void set(const ParameterTable& table);
  int64_t size() const { return static_cast<int64_t>(table_.size()); }

  /// The plan for a dense bucket, from the cache when the same parameters came before.
  /// Throws c10::ValueError for a parameter that set() did not get, an unsupported dtype, or a buffer of another length than
  /// its parameters.
  std::shared_ptr<BucketPlan> plan(const Bucket& bucket, int64_t step);
  /// Where the sums of a sparse bucket go: one part, without slices. Throws as plan() does.
  std::shared_ptr<BucketPlan> sparse_plan(const Bucket& bucket) const;
  /// Forgets plans that the last two steps did not use: those of DDP's buckets before it rebuilt them.
  void forget_unused_plans(int64_t step);

  /// fp64 [2, kErrorSums] on the device: what pack and reduce measured since the last reset. Undefined: nothing is measured.
  at::Tensor error_sums() const;
  void reset_error_sums();
  /// Multiplies all residuals by scale / unit and sets `unit` to `scale`, unless that is 0, Inf or NaN. Both are fp32 [1] on the
  /// device; nothing waits for it. Cost: on the host nothing where both are equal; on a device 8 bytes of traffic an element.
  void follow_loss_scale(const at::Tensor& scale, at::Tensor& unit);

 private:
  struct Entry {
    // Keeps the object's address from being used again, not its memory.
    c10::weak_intrusive_ptr<c10::TensorImpl> parameter;
    uint64_t name_hash;
    Kind codec;
    const Exchange* exchange;
    int64_t block_size;
    int64_t norm_idx;
    Residual residual;
  };
  struct Key {
    std::vector<const c10::TensorImpl*> parameters;
    at::ScalarType dtype;
    bool is_flat;
    bool has_started;  // whether start_step has come
    bool operator==(const Key& other) const = default;
  };
  struct KeyHash {
    size_t operator()(const Key& key) const;
  };

  std::shared_ptr<BucketPlan> make_plan(const Bucket& bucket, bool has_started) const;
  void add_residual(Part& part, const Segment& segment, const Residual& residual) const;
  void add_error_tables(Part& part, const Layout& layout) const;
  void retire(const BucketPlan& plan);

  Exchanges& exchanges_;
  std::string exchange_;
  c10::Device device_;
  PlanOptions options_;
  at::Tensor retired_errors_;  // as error_sums(), of plans that are forgotten
  std::unordered_map<const c10::TensorImpl*, Entry> table_;
  std::unordered_map<Key, std::shared_ptr<BucketPlan>, KeyHash> plans_;
};

}  // namespace gsync
