// Included before each source of gsync in the build for ThreadSanitizer: every std::lock_guard knows its place, and one place
// can be left without its lock, to see whether that is reported.
#pragma once

#include <mutex>
#include <source_location>

namespace gsync_tests {

/// Whether `place` is the one to leave out. Orders nothing between threads.
bool leaves_out(const std::source_location& place) noexcept;

}  // namespace gsync_tests

namespace std {  // where the sources look for the name

template <class Mutex>
class lock_guard_with_place {
 public:
  explicit lock_guard_with_place(Mutex& mutex, const source_location place = source_location::current())
      : mutex_(gsync_tests::leaves_out(place) ? nullptr : &mutex) {
    if (mutex_ != nullptr) mutex_->lock();
  }
  ~lock_guard_with_place() {
    if (mutex_ != nullptr) mutex_->unlock();
  }
  lock_guard_with_place(const lock_guard_with_place&) = delete;
  lock_guard_with_place& operator=(const lock_guard_with_place&) = delete;

 private:
  Mutex* mutex_;
};

}  // namespace std

#define lock_guard lock_guard_with_place
