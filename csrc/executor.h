// When each step of a slice is taken, and by whom.
//
//   WorkerExecutor  host, Gloo: one thread of its own. Up to two slices under way, also of different buckets: while one is
//                   being exchanged the next is packed. Every collective is issued in the order of the slices on its lane.
//   CallerExecutor  host, other libraries: everything in the thread that hands the bucket over.
//   StreamExecutor  device: everything is enqueued by that thread on one stream; nothing waits on the host.
//
// Buckets are taken in the order in which they are handed over, and end in that order.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "pipeline.h"

namespace gsync {

/// What an executor tells its engine, from whatever thread it works in.
class ExecutorEvents {
 public:
  virtual ~ExecutorEvents() = default;
  /// All slices are done (device: enqueued).
  virtual void bucket_done(BucketJob& job) = 0;
  /// Something went wrong, in a bucket or outside of any (null).
  virtual void failed_in(const BucketJob* job, const std::exception_ptr& cause) = 0;
  /// Gives buckets up, after failed_in() or when the engine is stopped for another reason: all of them at once, since backward
  /// goes on with the first error it sees and must then find NaN in every gradient that was not synchronised.
  virtual void give_up(const std::vector<std::shared_ptr<BucketJob>>& jobs) = 0;
  /// Whether the engine has failed or is closing: nothing more is issued then.
  virtual bool stopped() const = 0;
};

class Executor {
 public:
  virtual ~Executor() = default;
  /// Takes a bucket over. Never throws.
  virtual void submit(std::shared_ptr<BucketJob> job) = 0;
  /// Look at stopped() again.
  virtual void wake() noexcept = 0;
  /// Ends the executor's thread, if any, after failing what is under way. May be called again.
  virtual void close() noexcept = 0;
  /// Bytes of payload buffers held.
  virtual int64_t buffer_bytes() const = 0;
};

class CallerExecutor final : public Executor {
 public:
  CallerExecutor(const Pipeline& pipeline, ExecutorEvents& events) : pipeline_(pipeline), events_(events) {}
  void submit(std::shared_ptr<BucketJob> job) override;
  void wake() noexcept override {}
  void close() noexcept override {}
  int64_t buffer_bytes() const override { return buffer_bytes_.load(); }

 private:
  const Pipeline& pipeline_;
  ExecutorEvents& events_;
  SliceBuffers buffers_;  // touched by whoever hands over; others are told
  std::atomic<int64_t> buffer_bytes_{0};
};

class StreamExecutor final : public Executor {
 public:
  StreamExecutor(const Pipeline& pipeline, ExecutorEvents& events, c10::Stream stream)
      : pipeline_(pipeline), events_(events), stream_(stream), producer_done_(stream.device_type()) {}
  void submit(std::shared_ptr<BucketJob> job) override;
  void wake() noexcept override {}
  void close() noexcept override {}
  int64_t buffer_bytes() const override { return buffer_bytes_.load(); }

 private:
  const Pipeline& pipeline_;
  ExecutorEvents& events_;
  c10::Stream stream_;
  c10::Event producer_done_;
  SliceBuffers buffers_;  // touched by whoever hands over; others are told
  std::atomic<int64_t> buffer_bytes_{0};
};

class WorkerExecutor final : public Executor {
 public:
  /// Args: timeout: how long a collective may take beyond which the transport is not trusted to notice by itself
  WorkerExecutor(const Pipeline& pipeline, ExecutorEvents& events, std::chrono::milliseconds timeout);
  ~WorkerExecutor() override { close(); }
  void submit(std::shared_ptr<BucketJob> job) override;
  void wake() noexcept override { signal_->set(); }
  void close() noexcept override;
  int64_t buffer_bytes() const override { return buffer_bytes_.load(); }

 private:
  // Shared with the callbacks of collectives, which may outlive the executor.
  class Signal {
   public:
    void set() noexcept;
    /// Waits until set() was called since the last wait, or `deadline`.
    void wait_until(std::chrono::steady_clock::time_point deadline);
    std::mutex mutex;

   private:
    std::condition_variable changed_;
    bool is_set_ = false;
  };
  struct SliceUnderWay {
    std::unique_ptr<Flow> flow;
    SliceBuffers* buffers;
  };

  void run();
  bool take_submitted();
  bool start_next();
  bool advance_one();
  void end_finished_buckets();
  void give_all_up();
  std::chrono::steady_clock::time_point deadline() const;

  const Pipeline& pipeline_;
  ExecutorEvents& events_;
  std::chrono::milliseconds timeout_;
  std::shared_ptr<Signal> signal_ = std::make_shared<Signal>();
  std::vector<std::shared_ptr<BucketJob>> submitted_;  // guarded by signal_->mutex
  bool closing_ = false;                              // guarded by signal_->mutex
  bool refuses_ = false;                              // guarded by signal_->mutex: nothing is synchronised any more

  // Touched by the worker only.
  std::deque<std::shared_ptr<BucketJob>> jobs_;  // in order; the first may be partly done
  size_t next_job_ = 0;                          // the next slice to start: its bucket, counted in jobs_,
  int64_t next_flow_ = 0;                        // and its number there
  std::vector<std::unique_ptr<SliceBuffers>> buffers_;
  std::vector<SliceBuffers*> free_buffers_;
  std::deque<SliceUnderWay> under_way_;  // oldest first
  std::atomic<int64_t> buffer_bytes_{0};
  std::thread thread_;
};

}  // namespace gsync
