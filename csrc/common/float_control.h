// The floating-point mode of the calling thread: flush-to-zero and the rounding mode belong to the thread, not to the code.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace gsync {

/// While it lives, the calling thread rounds to nearest even and keeps subnormal numbers; afterwards its old mode is back.
class FloatControl {
 public:
  FloatControl() : saved_(read()) { write(kDefault); }
  ~FloatControl() { write(saved_); }
  FloatControl(const FloatControl&) = delete;
  FloatControl& operator=(const FloatControl&) = delete;

 private:
#if defined(__x86_64__)
  using Word = uint32_t;
  static constexpr Word kDefault = 0x1f80;  // all exceptions masked
  static Word read() { return _mm_getcsr(); }
  static void write(Word word) { _mm_setcsr(word); }
#elif defined(__aarch64__)
  using Word = uint64_t;
  static constexpr Word kDefault = 0;
  static Word read() {
    Word word;
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(word));
    return word;
  }
  static void write(Word word) { __asm__ __volatile__("msr fpcr, %0" : : "r"(word) : "memory"); }
#else
  using Word = uint32_t;
  static constexpr Word kDefault = 0;
  static Word read() { return 0; }
  static void write(Word) {}
#endif
  Word saved_;
};

}  // namespace gsync
