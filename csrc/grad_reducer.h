// Synchronises gradients without DDP: hooks on the parameters' gradient accumulators, own buckets, gradients where they are.
//
//     AccumulateGrad of a parameter
//       │ hook                              in the autograd engine's thread, without Python's lock
//       ▼
//     GradReducer::ready                    1. the first one of a backward pass opens a step
//       │ last gradient of the bucket due   2. the bucket is handed to the engine (engine.h)
//       ▼
//     end of the backward pass              3. autograd's final callback: buckets that no hook completed are handed over too,
//                                              then the step is waited for, and errors are thrown
//
// Buckets are always handed over in one order, the same on every rank. During the first step nothing is handed over before the
// end: it is there to learn in which order gradients become ready, and which parameters get more than one.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "engine.h"

namespace gsync {

struct ReducerBucket {
  std::vector<int64_t> parameters;  // by index; one dtype and device
  bool is_sparse = false;           // one parameter, whose gradients are sparse
  bool is_late = false;             // handed over at the end only: a parameter in it gets several gradients in a backward pass
};

/// What the reducer asks of its owner, seldom.
class ReducerOwner {
 public:
  virtual ~ReducerOwner() = default;
  /// A step begins and there is no engine, or a parameter without a bucket is to be trained: set_engine() and set_buckets() are to
  /// be called. Throws to refuse the step.
  virtual void prepare() = 0;
  /// The first step has ended. `order`: the parameters as they became ready; `repeated`: those that did so more than once.
  virtual void learned(const std::vector<int64_t>& order, const std::vector<int64_t>& repeated) = 0;
  /// A bucket is about to be handed over, and: all gradients of a step are in place. The latter may throw. For debugging.
  virtual void sending(int64_t bucket) = 0;
  virtual void synchronised() = 0;
};

class GradReducer final : public std::enable_shared_from_this<GradReducer> {
 public:
  /// Call install() next. Keeps the parameters; `owner` outlives it, or close() is called.
  GradReducer(std::vector<at::Tensor> parameters, std::vector<std::string> names, std::unique_ptr<ReducerOwner> owner);
  ~GradReducer();
  GradReducer(const GradReducer&) = delete;
  GradReducer& operator=(const GradReducer&) = delete;

  /// Hooks every parameter, frozen ones too, so that one that is trained later does not go unnoticed.
  void install();
  /// Null: prepare() is called at the next step.
  void set_engine(std::shared_ptr<Engine> engine);
  /// Args: learning: the next step is the first of these buckets; learned() follows it
  void set_buckets(std::vector<ReducerBucket> buckets, bool learning);
  /// False: gradients stay this rank's own.
  void set_enabled(bool enabled) { enabled_.store(enabled); }
  bool enabled() const { return enabled_.load(); }

  /// Inside of an outer backward pass: the step is to end with that one, not with one nested in it (reentrant checkpointing).
  void note_backward();
  /// Throws what went wrong: an engine that has failed, a backward pass that did not come to its end.
  void check();
  /// Index of a parameter whose gradients this rank has accumulated without synchronising them since, or -1.
  int64_t unsynchronised() const { return unsynchronised_.load(); }
  /// Index of a parameter that lost its hook, as when it was moved to another device or dtype, or -1.
  int64_t unhooked() const;
  /// Synchronises what this rank has accumulated since, or where it has not synchronised anything since the last wait(), takes part
  /// with nothing. Throws what went wrong.
  void wait();

  /// Removes the hooks. May be called again.
  void close() noexcept;

 private:
  class Hook;
  // A backward pass under way. Alive as long as autograd keeps its final callback: not when it ended by an exception.
  struct Task {
    int id;
  };
  struct InFlight {
    int64_t bucket;
    std::shared_ptr<GradientList> list;
    at::Tensor sparse;
    c10::intrusive_ptr<c10::ivalue::Future> future;
  };

  void ready(int64_t idx, const at::Tensor& incoming);
  void note_task();
  void task_ended(int id);
  void begin();
  void mark(int64_t idx);
  void hand_over(int64_t bucket);
  Bucket make_bucket(int64_t bucket, InFlight& flight);
  void finish();
  void write_back(InFlight& flight);
  void own_memory(int64_t idx, const at::Tensor& incoming);
  void check_gradient(int64_t idx, const at::Tensor& gradient) const;
  /// Fills the gradients of the buckets from `first` on with NaN.
  void lose_from(int64_t first) noexcept;
  /// Throws after failing the step, here and on the other ranks.
  [[noreturn]] void fail(const std::string& cause);
  void raise_if_dead();

  using Accumulator = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  const std::vector<at::Tensor> parameters_;
  const std::vector<std::string> names_;
  std::unique_ptr<ReducerOwner> owner_;
  std::atomic<bool> enabled_{true};
  std::atomic<int64_t> unsynchronised_{-1};
  std::atomic<bool> closed_{false};

  std::recursive_mutex mutex_;  // guards what follows; the owner calls back while it is held
  std::vector<std::pair<Accumulator, uintptr_t>> hooks_;
  std::shared_ptr<Engine> engine_;
  std::vector<ReducerBucket> buckets_;
  std::vector<int64_t> bucket_of_;  // of each parameter; -1: none, it was frozen
  std::vector<std::weak_ptr<Task>> tasks_;
  int last_task_ = -1;
  bool learning_ = true;
  bool waited_for_ = true;  // whether wait() has come since the last step

  // Of the step under way.
  bool is_open_ = false;
  int64_t next_ = 0;  // the bucket that is due
  std::vector<int64_t> pending_;  // of each bucket: gradients that are still to come
  std::vector<int32_t> times_;  // of each parameter: gradients that came
  std::vector<int64_t> order_;  // as they became ready, while learning
  std::vector<InFlight> in_flight_;
};

}  // namespace gsync
