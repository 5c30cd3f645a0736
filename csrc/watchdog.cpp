#include "watchdog.h"

#include <c10/core/DeviceGuard.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <utility>

#include "errors.h"

namespace gsync {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kInterval{100};

}  // namespace

Watchdog::Watchdog(std::shared_ptr<Transport> transport, c10::Device device, std::chrono::milliseconds timeout,
                   OnFailure on_failure)
    : transport_(std::move(transport)),
      device_(device),
      timeout_(timeout),
      on_failure_(std::move(on_failure)),
      oldest_since_(Clock::now()) {
  thread_ = std::thread([this] { run(); });
}

std::unique_ptr<c10::Event> Watchdog::new_event() {
  if (free_.empty()) return std::make_unique<c10::Event>(device_.type());
  auto event = std::move(free_.back());
  free_.pop_back();
  return event;
}

void Watchdog::watch(Bucket bucket, int64_t step, const c10::Stream& producer, const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  Entry entry{std::move(bucket), step, new_event(), new_event()};
  entry.ready->record(producer);
  entry.done->record(stream);
  if (entries_.empty()) oldest_since_ = Clock::now();
  entries_.push_back(std::move(entry));
}

void Watchdog::close() noexcept {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closing_ = true;
  }
  closing_changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Watchdog::run() {
  c10::setThreadName("gsync_watchdog");
  std::unique_lock<std::mutex> lock(mutex_);
  while (!closing_changed_.wait_for(lock, kInterval, [this] { return closing_; })) {
    const std::string cause = look();
    if (cause.empty()) continue;
    const int64_t bucket = entries_.empty() ? -1 : entries_.front().bucket.index;
    const int64_t step = entries_.empty() ? -1 : entries_.front().step;
    lock.unlock();
    on_failure_(bucket, step, cause);
    return;
  }
}

void Watchdog::look_at_entries() {
  while (!entries_.empty() && entries_.front().done->query()) {
    free_.push_back(std::move(entries_.front().ready));
    free_.push_back(std::move(entries_.front().done));
    entries_.pop_front();
    oldest_since_ = Clock::now();
  }
  if (!entries_.empty() && !entries_.front().ready->query()) oldest_since_ = Clock::now();  // backward has not come that far
}

std::vector<Bucket> Watchdog::under_way() {
  std::lock_guard<std::mutex> lock(mutex_);
  look_at_entries();
  std::vector<Bucket> buckets;
  for (const Entry& entry : entries_) buckets.push_back(entry.bucket);
  return buckets;
}

bool Watchdog::drain(std::chrono::milliseconds limit) noexcept {
  try {
    const c10::DeviceGuard guard(device_);
    const auto since = Clock::now();
    while (true) {
      {
        std::lock_guard<std::mutex> lock(mutex_);
        look_at_entries();
        if (entries_.empty()) return true;
        if (Clock::now() - std::max(since, oldest_since_) > limit) return false;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  } catch (...) {
    return false;
  }
}

std::string Watchdog::look() {
  try {
    const c10::DeviceGuard guard(device_);
    look_at_entries();
    if (transport_) {
      std::string error = transport_->async_error();
      if (!error.empty()) return error;
    }
    if (!entries_.empty() && Clock::now() - oldest_since_ > timeout_) {
      return "timed out after " + std::to_string(static_cast<double>(timeout_.count()) / 1000.0) + " s on the device";
    }
    return {};
  } catch (...) {
    return cause_of(std::current_exception());  // the device itself is lost
  }
}

}  // namespace gsync
