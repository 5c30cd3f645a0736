// Looks after work that a device does on its own: every 100 ms it asks whether the oldest bucket has ended, and the transport
// whether it is well. A bucket is late when it has been the oldest, with its gradients ready, for longer than the time-out.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "bucket_plan.h"
#include "transport.h"

namespace gsync {

class Watchdog {
 public:
  /// Called once, from the watchdog's thread, with the bucket at fault and its step (-1: none is under way) and the cause.
  using OnFailure = std::function<void(int64_t bucket, int64_t step, const std::string& cause)>;

  Watchdog(std::shared_ptr<Transport> transport, c10::Device device, std::chrono::milliseconds timeout, OnFailure on_failure);
  ~Watchdog() { close(); }

  /// Watches what `stream` has been given so far, on behalf of a bucket; its gradients are ready when `producer` is. The bucket is
  /// kept until then, and 100 ms longer at most.
  void watch(Bucket bucket, int64_t step, const c10::Stream& producer, const c10::Stream& stream);
  /// The buckets that have not ended.
  std::vector<Bucket> under_way();
  /// Waits until all that is watched has ended; false when the oldest bucket, with its gradients ready, has not ended within
  /// `limit`, or when the device is lost.
  bool drain(std::chrono::milliseconds limit) noexcept;
  /// Ends the thread. May be called again, not from on_failure.
  void close() noexcept;

 private:
  struct Entry {
    Bucket bucket;
    int64_t step;
    std::unique_ptr<c10::Event> ready;
    std::unique_ptr<c10::Event> done;
  };
  std::unique_ptr<c10::Event> new_event();
  void run();
  /// Forgets what has ended; sets oldest_since_.
  void look_at_entries();
  /// The cause of a failure, or empty.
  std::string look();

  std::shared_ptr<Transport> transport_;
  c10::Device device_;
  std::chrono::milliseconds timeout_;
  OnFailure on_failure_;
  std::mutex mutex_;
  std::condition_variable closing_changed_;
  bool closing_ = false;
  std::deque<Entry> entries_;
  std::vector<std::unique_ptr<c10::Event>> free_;
  std::chrono::steady_clock::time_point oldest_since_;
  std::thread thread_;
};

}  // namespace gsync
