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

#include "transport.h"

namespace gsync {

class Watchdog {
 public:
  /// Called once, from the watchdog's thread, with the number of the bucket at fault (-1: none is under way) and the cause.
  using OnFailure = std::function<void(int64_t bucket, const std::string& cause)>;

  Watchdog(std::shared_ptr<Transport> transport, c10::Device device, std::chrono::milliseconds timeout, OnFailure on_failure);
  ~Watchdog() { close(); }

  /// Watches what `stream` has been given so far, on behalf of a bucket; its gradients are ready when `producer` is.
  void watch(int64_t bucket, const c10::Stream& producer, const c10::Stream& stream);
  /// Ends the thread. May be called again, not from on_failure.
  void close() noexcept;

 private:
  struct Entry {
    int64_t bucket;
    std::unique_ptr<c10::Event> ready;
    std::unique_ptr<c10::Event> done;
  };
  std::unique_ptr<c10::Event> new_event();
  void run();
  /// The cause of a failure, or empty.
  std::string look(int64_t& bucket);

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
