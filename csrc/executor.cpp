#include "executor.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "common/float_control.h"

namespace gsync {
namespace {

using Clock = std::chrono::steady_clock;

// One is exchanged while the other is packed or unpacked. A third would wait behind them and only hold memory.
constexpr size_t kSlicesUnderWay = 2;
// What a transport gets beyond its time-out to report it in its own words.
constexpr std::chrono::milliseconds kGrace{1000};

const c10::Stream kNoStream(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CPU));

// Lets the profiler of the thread that handed a bucket over see what the worker does for it. Wants no gradients, as that thread did
// when the state was taken.
std::optional<at::ThreadLocalStateGuard> as_seen_by_caller(const BucketJob& job) {
  if (!job.profiled) return std::nullopt;
  return std::optional<at::ThreadLocalStateGuard>(std::in_place, *job.profiled);
}

// One slice after the other, each from pack to unpack.
void run_in_order(const Pipeline& pipeline, const std::shared_ptr<BucketJob>& job, SliceBuffers& buffers, c10::Stream stream) {
  const int64_t count = num_flows(*job);
  for (int64_t number = 0; number < count; ++number) {
    const auto flow = make_flow(pipeline, job, number, buffers);
    flow->start(stream);
    while (!flow->advance(stream)) {}
  }
}

}  // namespace

void CallerExecutor::submit(std::shared_ptr<BucketJob> job) {
  try {
    pipeline_.clock->ready(job->span(), job->bucket.is_last, kNoStream);
    run_in_order(pipeline_, job, buffers_, kNoStream);
    buffer_bytes_.store(buffers_.bytes());
    pipeline_.clock->done(job->span(), job->bucket.is_last);
  } catch (...) {
    events_.failed_in(job.get(), std::current_exception());
    events_.give_up({job});
    return;
  }
  events_.bucket_done(*job);
}

void StreamExecutor::submit(std::shared_ptr<BucketJob> job) {
  try {
    const c10::DeviceGuard device_guard(stream_.device());
    const c10::Stream producer = c10::impl::VirtualGuardImpl(stream_.device_type()).getStream(stream_.device());
    job->producer = producer;
    // Before what the stream waits for: the end of this span must not pass before its beginning.
    pipeline_.clock->ready(job->span(), job->bucket.is_last, producer);
    producer_done_.record(producer);
    producer_done_.block(stream_);
    const c10::StreamGuard stream_guard(stream_);
    run_in_order(pipeline_, job, buffers_, stream_);
    buffer_bytes_.store(buffers_.bytes());
    pipeline_.clock->done(job->span(), job->bucket.is_last);
    events_.bucket_done(*job);
  } catch (...) {
    events_.failed_in(job.get(), std::current_exception());
    events_.give_up({job});
  }
}

void WorkerExecutor::Signal::set() noexcept {
  {
    std::lock_guard<std::mutex> lock(mutex);
    is_set_ = true;
  }
  changed_.notify_one();
}

void WorkerExecutor::Signal::wait_until(Clock::time_point deadline) {
  std::unique_lock<std::mutex> lock(mutex);
  if (deadline == Clock::time_point::max()) {
    changed_.wait(lock, [this] { return is_set_; });
  } else {
    changed_.wait_until(lock, deadline, [this] { return is_set_; });
  }
  is_set_ = false;
}

WorkerExecutor::WorkerExecutor(const Pipeline& pipeline, ExecutorEvents& events, std::chrono::milliseconds timeout)
    : pipeline_(pipeline), events_(events), timeout_(timeout) {
  // With one communicator for everything, a second slice would make the order of collectives depend on timing.
  const bool overlaps = !pipeline.transport || pipeline.transport->num_lanes() > 1 || pipeline.exchange->num_chunks() == 1;
  for (size_t i = 0; i < (overlaps ? kSlicesUnderWay : 1); ++i) {
    buffers_.push_back(std::make_unique<SliceBuffers>());
    free_buffers_.push_back(buffers_.back().get());
  }
  if (pipeline.transport) pipeline.transport->set_wake([signal = signal_] { signal->set(); });
  thread_ = std::thread([this] { run(); });
}

void WorkerExecutor::submit(std::shared_ptr<BucketJob> job) {
  bool refused = false;
  pipeline_.clock->ready(job->span(), job->bucket.is_last, kNoStream);
  {
    std::lock_guard<std::mutex> lock(signal_->mutex);
    refused = refuses_;
    if (!refused) submitted_.push_back(job);
  }
  if (refused) return events_.give_up({job});
  signal_->set();
}

void WorkerExecutor::close() noexcept {
  {
    std::lock_guard<std::mutex> lock(signal_->mutex);
    closing_ = true;
  }
  signal_->set();
  if (thread_.joinable()) thread_.join();
}

void WorkerExecutor::run() {
  c10::setThreadName("gsync");
  const FloatControl float_control;  // flush-to-zero would be inherited from the thread that made the engine
  const c10::AutoGradMode no_grad(false);
  while (true) {
    if (!take_submitted() || events_.stopped()) return give_all_up();
    // What has arrived goes first, since it may put the next collective on the wire; then a free buffer is filled.
    if (advance_one() || start_next()) continue;
    const auto until = deadline();
    if (Clock::now() >= until) {
      const double seconds = static_cast<double>(timeout_.count()) / 1000.0;
      events_.failed_in(under_way_.front().flow->job().get(),
                        std::make_exception_ptr(std::runtime_error("timed out after " + std::to_string(seconds) +
                                                                   " s in a collective over " + pipeline_.transport->name())));
      continue;
    }
    signal_->wait_until(until);
  }
}

bool WorkerExecutor::take_submitted() {
  std::lock_guard<std::mutex> lock(signal_->mutex);
  jobs_.insert(jobs_.end(), submitted_.begin(), submitted_.end());
  submitted_.clear();
  return !closing_;
}

bool WorkerExecutor::start_next() {
  if (free_buffers_.empty() || next_job_ == jobs_.size()) return false;
  const std::shared_ptr<BucketJob> job = jobs_[next_job_];
  try {
    const auto seen = as_seen_by_caller(*job);
    if (next_flow_ == 0) {
      job->slices_left = num_flows(*job);
      // Slices differ by a tile: whichever buffer a slice gets has to be large enough for all, or buffers would grow for many steps.
      if (job->plan) {
        for (const Part& part : job->plan->parts) {
          for (const SliceLayout& slice : part.slices) {
            for (SliceBuffers* buffers : free_buffers_) part.exchange->reserve(slice, *buffers);
          }
        }
      }
    }
    if (next_flow_ < num_flows(*job)) {
      SliceBuffers* buffers = free_buffers_.back();
      auto flow = make_flow(pipeline_, job, next_flow_, *buffers);
      flow->start(kNoStream);
      free_buffers_.pop_back();
      under_way_.push_back({std::move(flow), buffers});
      ++next_flow_;
    }
    if (next_flow_ >= num_flows(*job)) {
      ++next_job_;
      next_flow_ = 0;
    }
  } catch (...) {
    events_.failed_in(job.get(), std::current_exception());
    return true;
  }
  end_finished_buckets();
  return true;
}

bool WorkerExecutor::advance_one() {
  for (size_t i = 0; i < under_way_.size(); ++i) {
    Flow& flow = *under_way_[i].flow;
    // Strictly behind the slice before, so that each lane sees the collectives in the order of the slices.
    if (i > 0 && flow.stage() >= under_way_[i - 1].flow->stage()) return false;
    if (!flow.ready()) continue;
    const std::shared_ptr<BucketJob> job = flow.job();
    try {
      const auto seen = as_seen_by_caller(*job);
      if (flow.advance(kNoStream)) {
        --job->slices_left;
        free_buffers_.push_back(under_way_[i].buffers);
        under_way_.erase(under_way_.begin() + static_cast<std::ptrdiff_t>(i));
      }
    } catch (...) {
      events_.failed_in(job.get(), std::current_exception());
      return true;
    }
    end_finished_buckets();
    return true;
  }
  return false;
}

void WorkerExecutor::end_finished_buckets() {
  while (next_job_ > 0 && jobs_.front()->slices_left == 0) {
    const std::shared_ptr<BucketJob> job = std::move(jobs_.front());
    jobs_.pop_front();
    --next_job_;
    int64_t bytes = 0;
    for (const auto& buffers : buffers_) bytes += buffers->bytes();
    buffer_bytes_.store(bytes);
    pipeline_.clock->done(job->span(), job->bucket.is_last);
    events_.bucket_done(*job);
  }
}

void WorkerExecutor::give_all_up() {
  under_way_.clear();  // collectives that have not ended keep their buffers alive
  std::vector<std::shared_ptr<BucketJob>> jobs(jobs_.begin(), jobs_.end());
  jobs_.clear();
  {
    std::lock_guard<std::mutex> lock(signal_->mutex);
    refuses_ = true;
    jobs.insert(jobs.end(), submitted_.begin(), submitted_.end());
    submitted_.clear();
  }
  events_.give_up(jobs);
}

Clock::time_point WorkerExecutor::deadline() const {
  // The oldest slice has waited longest.
  if (under_way_.empty()) return Clock::time_point::max();
  return under_way_.front().flow->issued() + timeout_ + kGrace;
}

}  // namespace gsync
