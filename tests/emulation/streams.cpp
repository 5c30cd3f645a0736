#include "streams.h"

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <random>
#include <set>
#include <thread>

namespace emulation {
namespace {

struct Task {
  std::function<void()> run;
  bool is_work;
};

// All that threads share is under one lock: there is little to do, and the order of what happens is then one.
struct Shared {
  std::mutex mutex;
  std::condition_variable changed;
  bool is_shut_down = false;
  bool is_lost = false;
  std::string error;
  Counters counters;
  Fault allocation_fault;
  Fault launch_fault;
  std::set<std::string> sites;
  std::set<std::string> left_out;
};

Shared& shared() {
  static auto* instance = new Shared;  // threads may outlive static objects
  return *instance;
}

class StreamThread;
thread_local StreamThread* this_thread = nullptr;  // of the thread of a stream

class StreamThread {
 public:
  StreamThread(int64_t id, c10::DeviceIndex device) : id_(id), device_(device), thread_([this] { run(); }) {}
  ~StreamThread() { thread_.join(); }

  c10::Stream stream() const { return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDeviceType, device_), id_); }
  void enqueue(Task task) {
    std::lock_guard<std::mutex> lock(shared().mutex);
    tasks_.push_back(std::move(task));
    shared().changed.notify_all();
  }
  c10::DeviceIndex device() const { return device_; }
  // Under the lock:
  bool is_idle() const { return tasks_.empty() && !is_busy_; }
  bool is_settled() const {
    if (is_busy_) return waits_for_ != nullptr && !waits_for_->passed;
    return tasks_.empty() || is_held_;
  }
  void hold(bool is_held) { is_held_ = is_held; }
  void set_waits_for(const Mark* mark) { waits_for_ = mark; }
  void set_delay(int64_t min_us, int64_t max_us, uint64_t seed) {
    min_us_ = min_us;
    max_us_ = std::max(min_us, max_us);
    random_.seed(seed + static_cast<uint64_t>(id_));
  }

 private:
  void run() {
    pthread_setname_np(pthread_self(), "emu_stream");
    this_thread = this;
    Shared& all = shared();
    std::unique_lock<std::mutex> lock(all.mutex);
    while (true) {
      all.changed.wait(lock, [&] { return all.is_shut_down || (!tasks_.empty() && !is_held_); });
      if (all.is_shut_down) return;
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      is_busy_ = true;
      int64_t delay = 0;
      if (task.is_work && max_us_ > 0) delay = std::uniform_int_distribution<int64_t>(min_us_, max_us_)(random_);
      lock.unlock();
      if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
      std::string error;
      try {
        task.run();
      } catch (const std::exception& e) {
        error = e.what();
      }
      task = {};
      lock.lock();
      if (!error.empty() && all.error.empty()) all.error = error;
      is_busy_ = false;
      all.changed.notify_all();
    }
  }

  int64_t id_;
  c10::DeviceIndex device_;
  std::deque<Task> tasks_;
  bool is_busy_ = false;
  bool is_held_ = false;
  const Mark* waits_for_ = nullptr;  // of the event that a busy stream waits for
  int64_t min_us_ = 0;
  int64_t max_us_ = 0;
  std::mt19937_64 random_;
  std::thread thread_;
};

class Streams {
 public:
  Streams() {
    for (int device = 0; device < kDevices; ++device) add(static_cast<c10::DeviceIndex>(device));
    std::atexit(&shut_down);  // after Python, whose exit closes the engines
  }
  StreamThread& add(c10::DeviceIndex device) {
    std::lock_guard<std::mutex> lock(mutex_);
    streams_.push_back(std::make_unique<StreamThread>(static_cast<int64_t>(streams_.size()), device));
    return *streams_.back();
  }
  StreamThread& at(int64_t id) {
    std::lock_guard<std::mutex> lock(mutex_);
    return *streams_.at(static_cast<size_t>(id));
  }
  int64_t count() {
    std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<int64_t>(streams_.size());
  }
  void clear() { streams_.clear(); }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<StreamThread>> streams_;
};

Streams& streams() {
  static auto* instance = new Streams;
  return *instance;
}

thread_local c10::DeviceIndex device_of_thread = 0;
thread_local std::array<int64_t, kDevices> stream_of_thread{0, 1, 2, 3};

}  // namespace

void count(int64_t Counters::* counter) {
  std::lock_guard<std::mutex> lock(shared().mutex);
  ++(shared().counters.*counter);
}

Counters take_counters() {
  std::lock_guard<std::mutex> lock(shared().mutex);
  return std::exchange(shared().counters, {});
}

c10::Stream default_stream(c10::DeviceIndex device) { return streams().at(device).stream(); }
c10::Stream new_stream(c10::DeviceIndex device) { return streams().add(device).stream(); }
c10::Stream current_stream(c10::DeviceIndex device) {
  return streams().at(stream_of_thread[static_cast<size_t>(device < 0 ? device_of_thread : device)]).stream();
}
c10::Stream exchange_stream(c10::Stream stream) {
  const c10::Stream before = current_stream(stream.device_index());
  stream_of_thread[static_cast<size_t>(stream.device_index())] = stream.id();
  return before;
}
c10::DeviceIndex current_device() { return device_of_thread; }
void set_device(c10::DeviceIndex device) {
  if (device >= 0) device_of_thread = device;
}

void enqueue(c10::Stream stream, std::function<void()> task, bool is_work) {
  streams().at(stream.id()).enqueue({std::move(task), is_work});
}
void* native_handle(c10::Stream stream) { return &streams().at(stream.id()); }
c10::Stream stream_of(void* native_handle) { return static_cast<StreamThread*>(native_handle)->stream(); }

bool is_idle(c10::Stream stream) {
  StreamThread& thread = streams().at(stream.id());
  std::lock_guard<std::mutex> lock(shared().mutex);
  return thread.is_idle();
}

void synchronize(c10::Stream stream) {
  count(&Counters::host_waits);
  StreamThread& thread = streams().at(stream.id());
  std::unique_lock<std::mutex> lock(shared().mutex);
  shared().changed.wait(lock, [&] { return shared().is_shut_down || thread.is_idle(); });
}

std::string take_error() {
  std::lock_guard<std::mutex> lock(shared().mutex);
  return std::exchange(shared().error, {});
}

void set_delay(int64_t stream, int64_t min_us, int64_t max_us, uint64_t seed) {
  for (int64_t id = 0; id < streams().count(); ++id) {
    if (stream >= 0 && id != stream) continue;
    StreamThread& thread = streams().at(id);
    std::lock_guard<std::mutex> lock(shared().mutex);
    thread.set_delay(min_us, max_us, seed);
  }
}

void hold(int64_t stream, bool is_held) {
  StreamThread& thread = streams().at(stream);
  std::lock_guard<std::mutex> lock(shared().mutex);
  thread.hold(is_held);
  shared().changed.notify_all();
}

int64_t newest_stream(c10::DeviceIndex device) {
  int64_t id = streams().count() - 1;
  while (streams().at(id).device() != device) --id;
  return id;
}

void settle(int64_t max_ms) {
  std::vector<StreamThread*> threads;
  for (int64_t id = 0; id < streams().count(); ++id) threads.push_back(&streams().at(id));
  std::unique_lock<std::mutex> lock(shared().mutex);
  shared().changed.wait_for(lock, std::chrono::milliseconds(max_ms), [&] {
    return std::all_of(threads.begin(), threads.end(), [](const StreamThread* thread) { return thread->is_settled(); });
  });
}

void shut_down() {
  {
    std::lock_guard<std::mutex> lock(shared().mutex);
    shared().is_shut_down = true;
  }
  shared().changed.notify_all();
  streams().clear();
}

bool is_shut_down() {
  std::lock_guard<std::mutex> lock(shared().mutex);
  return shared().is_shut_down;
}

void record(std::shared_ptr<Mark>& mark, c10::Stream stream) {
  count(&Counters::event_records);
  mark = std::make_shared<Mark>();  // who waits for an earlier recording goes on waiting for that one
  enqueue(
      stream,
      [mark] {
        std::lock_guard<std::mutex> lock(shared().mutex);
        mark->passed = true;
        mark->when = std::chrono::steady_clock::now();
        shared().changed.notify_all();
      },
      /*is_work=*/false);
}

void block(std::shared_ptr<Mark> mark, c10::Stream stream) {
  count(&Counters::event_waits);
  if (is_left_out()) return;
  enqueue(
      stream,
      [mark = std::move(mark)] {
        std::unique_lock<std::mutex> lock(shared().mutex);
        this_thread->set_waits_for(mark.get());
        shared().changed.notify_all();
        shared().changed.wait(lock, [&] { return shared().is_shut_down || mark->passed; });
        this_thread->set_waits_for(nullptr);
      },
      /*is_work=*/false);
}

bool has_passed(const std::shared_ptr<Mark>& mark) {
  std::lock_guard<std::mutex> lock(shared().mutex);
  return mark->passed;
}

void wait_on_host(const std::shared_ptr<Mark>& mark) {
  if (is_left_out()) return;
  std::unique_lock<std::mutex> lock(shared().mutex);
  if (!mark->passed) ++shared().counters.host_waits;
  shared().changed.wait(lock, [&] { return shared().is_shut_down || mark->passed; });
}

bool Fault::strikes() {
  std::lock_guard<std::mutex> lock(shared().mutex);
  return left_ >= 0 && left_-- == 0;
}

void lose(bool is_lost) {
  std::lock_guard<std::mutex> lock(shared().mutex);
  shared().is_lost = is_lost;
}

void check_device() {
  std::lock_guard<std::mutex> lock(shared().mutex);
  TORCH_CHECK(!shared().is_lost, "the emulated device is lost");
}

Fault& allocation_fault() { return shared().allocation_fault; }
Fault& launch_fault() { return shared().launch_fault; }

bool is_left_out() {
  // Frames of this library come first. A site is the innermost call in gsync's library, with the one around it, since the first
  // may be a function of c10::Event that the compiler has not inlined.
  std::array<void*, 12> frames{};
  const int depth = backtrace(frames.data(), static_cast<int>(frames.size()));
  std::string site;
  for (int i = 1, found = 0; i < depth && found < 2; ++i) {
    Dl_info info{};
    if (dladdr(frames[i], &info) == 0 || info.dli_fname == nullptr) break;
    const bool is_gsync = std::strstr(info.dli_fname, "gsync/_C.") != nullptr;
    if (!is_gsync && std::strstr(info.dli_fname, "gsync_emulation") != nullptr && found == 0) continue;
    if (!is_gsync) break;
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%s%zx", found == 0 ? "" : "<",
                  static_cast<size_t>(static_cast<char*>(frames[i]) - static_cast<char*>(info.dli_fbase)));
    site += text.data();
    ++found;
  }
  if (site.empty()) return false;
  std::lock_guard<std::mutex> lock(shared().mutex);
  shared().sites.insert(site);
  return shared().left_out.count(site) > 0;
}

void leave_out(std::vector<std::string> sites) {
  std::lock_guard<std::mutex> lock(shared().mutex);
  shared().left_out = {sites.begin(), sites.end()};
}

std::vector<std::string> take_sites() {
  std::lock_guard<std::mutex> lock(shared().mutex);
  const std::set<std::string> sites = std::exchange(shared().sites, {});
  return {sites.begin(), sites.end()};
}

}  // namespace emulation
