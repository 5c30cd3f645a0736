#include "peer_lane.h"

#include <c10/util/Exception.h>
#include <c10/util/thread_name.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

#include "errors.h"

namespace gsync {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kAborted = "the process group was aborted";

// What the worker holds; it owns no part of Gloo, so that connections close as soon as the waiter lets go.
class PeerExchange final : public Collective {
 public:
  bool done() const override {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_;
  }
  void finish() override {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return done_; });
    if (error_) std::rethrow_exception(error_);
  }
  void end(std::exception_ptr error) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      error_ = std::move(error);
      done_ = true;
    }
    changed_.notify_all();
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::exception_ptr error_;
  bool done_ = false;
};

struct Operation {
  c10::intrusive_ptr<c10d::Work> work;
  int peer;  // as errors call it
  bool receives;
};

struct UnderWay {
  std::shared_ptr<PeerExchange> exchange;
  std::vector<Operation> operations;  // they keep their tensors alive
  Clock::time_point deadline;
  PeerLane::Wake wake;

  void end(std::exception_ptr error) {
    operations.clear();
    exchange->end(std::move(error));
    if (wake && *wake) (*wake)();
  }
};

}  // namespace

struct PeerLane::Waiter {
  std::chrono::milliseconds timeout{};
  std::mutex mutex;  // guards what follows; what the front of the queue points to is the thread's
  std::condition_variable changed;
  std::deque<std::shared_ptr<UnderWay>> queue;  // oldest first
  bool has_thread = false;
  bool aborted = false;

  void run();
  bool is_aborted() {
    std::lock_guard<std::mutex> lock(mutex);
    return aborted;
  }
  void wait_for(const Operation& operation, Clock::time_point deadline);
};

void PeerLane::Waiter::wait_for(const Operation& operation, Clock::time_point deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
  const std::string what = (operation.receives ? "receiving from rank " : "sending to rank ") + std::to_string(operation.peer);
  bool completed = false;
  try {
    completed = operation.work->wait(std::max(left, std::chrono::milliseconds(1)));  // 0 would mean without limit
  } catch (...) {
    if (is_aborted()) throw std::runtime_error(kAborted);
    if (Clock::now() >= deadline) {
      throw std::runtime_error("timed out after " + std::to_string(timeout.count()) + " ms " + what);
    }
    throw std::runtime_error(what + ": " + cause_of(std::current_exception()));
  }
  if (!completed) throw std::runtime_error(kAborted);
}

void PeerLane::Waiter::run() {
  c10::setThreadName("gsync-wait");
  while (true) {
    std::shared_ptr<UnderWay> oldest;
    {
      std::unique_lock<std::mutex> lock(mutex);
      changed.wait(lock, [this] { return aborted || !queue.empty(); });
      if (queue.empty()) return;
      oldest = queue.front();
    }
    std::exception_ptr error;
    for (const Operation& operation : oldest->operations) {
      try {
        if (is_aborted()) throw std::runtime_error(kAborted);
        wait_for(operation, oldest->deadline);
      } catch (...) {
        error = std::current_exception();
        break;
      }
    }
    {
      std::lock_guard<std::mutex> lock(mutex);
      queue.pop_front();
    }
    oldest->end(std::move(error));
  }
}

PeerLane::PeerLane(int rank, int size, int tag, std::chrono::milliseconds timeout, std::vector<int> known_as)
    : rank_(rank),
      size_(size),
      tag_(tag),
      timeout_(timeout),
      known_as_(std::move(known_as)),
      waiter_(std::make_shared<Waiter>()) {
  waiter_->timeout = timeout;
}

std::shared_ptr<Collective> PeerLane::exchange(c10d::Backend& backend, std::vector<at::Tensor> incoming,
                                               std::vector<at::Tensor> outgoing, Wake wake) {
  auto under_way = std::make_shared<UnderWay>();
  under_way->exchange = std::make_shared<PeerExchange>();
  under_way->deadline = Clock::now() + timeout_;
  under_way->wake = std::move(wake);
  std::vector<Operation>& operations = under_way->operations;
  operations.reserve(2 * static_cast<size_t>(size_ - 1));
  // Staggered, so that the ranks do not all turn to the same one.
  for (int i = 1; i < size_; ++i) {
    const int peer = (rank_ + size_ - i) % size_;
    std::vector<at::Tensor> tensors{incoming[peer]};
    if (tensors[0].numel() > 0) operations.push_back({backend.recv(tensors, peer, tag_), known_as_[peer], true});
  }
  for (int i = 1; i < size_; ++i) {
    const int peer = (rank_ + i) % size_;
    std::vector<at::Tensor> tensors{outgoing[peer]};
    if (tensors[0].numel() > 0) operations.push_back({backend.send(tensors, peer, tag_), known_as_[peer], false});
  }
  if (incoming[rank_].nbytes() > 0) {
    std::memcpy(incoming[rank_].mutable_data_ptr(), outgoing[rank_].const_data_ptr(), incoming[rank_].nbytes());
  }
  {
    std::lock_guard<std::mutex> lock(waiter_->mutex);
    TORCH_CHECK(!waiter_->aborted, kAborted);
    if (!waiter_->has_thread) {
      // Detached: it owns all it touches, so the process may end while it waits.
      std::thread([waiter = waiter_] { waiter->run(); }).detach();
      waiter_->has_thread = true;
    }
    waiter_->queue.push_back(under_way);
  }
  waiter_->changed.notify_one();
  return under_way->exchange;
}

void PeerLane::abort() noexcept {
  std::lock_guard<std::mutex> lock(waiter_->mutex);
  if (waiter_->aborted) return;
  waiter_->aborted = true;
  for (const auto& under_way : waiter_->queue) {
    for (const Operation& operation : under_way->operations) {
      try {
        operation.work->abort();
      } catch (...) {  // it has ended
      }
    }
  }
  waiter_->changed.notify_one();
}

}  // namespace gsync
