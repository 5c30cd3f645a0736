// What a bucket is made of, and how it is cut: worked out once for each set of parameters that DDP puts into a bucket.
//
//   part   segments of a bucket that travel in the same messages: all of them, or under all_reduce those of one codec
//   slice  at most slice_bytes of a part
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/intrusive_ptr.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "exchange.h"
#include "ops_binding.h"

namespace gsync {

/// A bucket as DDP hands it over.
struct Bucket {
  int64_t index = 0;
  bool is_last = false;
  at::Tensor buffer;                   // flat, or the sparse gradient itself
  std::vector<at::Tensor> parameters;  // in the order of the buffer
};

struct Part {
  std::vector<int64_t> offsets;    // bytes from the start of the buffer to each segment
  std::vector<int64_t> norm_idx;   // of each segment's parameter, in the order of names
  std::vector<std::unique_ptr<DeviceLayout>> slices;
  at::Tensor partials;             // fp64 on the device: sums of squares, one per tile
  at::Tensor sum_of_squares;       // fp64 on the device: one per segment
  at::Tensor norm_idx_on_device;   // made when first asked for
  bool is_fp16 = false;            // its vanished values are counted
  bool in_place = false;           // the buffer is the payload; see in_place_layout()
};

struct BucketPlan {
  std::vector<Part> parts;
  int64_t gradient_bytes = 0;
  int64_t wire_bytes = 0;
  int64_t last_step = 0;
};

/// The parameters of the model, by identity, and the plans made from them.
class Parameters {
 public:
  /// Args:
  ///   exchange: outlives this
  ///   slice_bytes: of gradients
  Parameters(const Exchange& exchange, c10::Device device, int64_t slice_bytes)
      : exchange_(exchange), device_(device), slice_bytes_(slice_bytes) {}

  /// One name and codec ("fp32", "fp16", "bf16") for each parameter. Holds the parameters weakly; forgets all plans.
  void set(const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
           const std::vector<std::string>& codecs);
  int64_t size() const { return static_cast<int64_t>(table_.size()); }

  /// The plan for a dense bucket, from the cache when the same parameters came before.
  /// Throws c10::ValueError for a parameter that set() did not get, an unsupported dtype, or a buffer of another length than
  /// its parameters.
  std::shared_ptr<BucketPlan> plan(const Bucket& bucket, int64_t step);
  /// Where the sums of a sparse bucket go: one part, without slices. Throws as plan() does.
  std::shared_ptr<BucketPlan> sparse_plan(const Bucket& bucket) const;
  /// Forgets plans that the last two steps did not use: those of DDP's buckets before it rebuilt them.
  void forget_unused_plans(int64_t step);

 private:
  struct Entry {
    // Keeps the object's address from being used again, not its memory.
    c10::weak_intrusive_ptr<c10::TensorImpl> parameter;
    uint64_t name_hash;
    Kind codec;
    int64_t norm_idx;
  };
  struct Key {
    std::vector<const c10::TensorImpl*> parameters;
    at::ScalarType dtype;
    bool operator==(const Key& other) const { return dtype == other.dtype && parameters == other.parameters; }
  };
  struct KeyHash {
    size_t operator()(const Key& key) const;
  };

  std::shared_ptr<BucketPlan> make_plan(const Bucket& bucket) const;

  const Exchange& exchange_;
  c10::Device device_;
  int64_t slice_bytes_;
  std::unordered_map<const c10::TensorImpl*, Entry> table_;
  std::unordered_map<Key, std::shared_ptr<BucketPlan>, KeyHash> plans_;
};

}  // namespace gsync
