#include "payload_memory.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

namespace gsync {

at::Tensor empty_payload(int64_t bytes, c10::Device device) {
  constexpr int64_t kHugePage = int64_t{2} << 20;
  const auto options = at::TensorOptions().dtype(at::kByte).device(device);
  if (!device.is_cpu() || bytes < kHugePage) return at::empty({bytes}, options);
  // From the system, not from malloc, whose memory may have been touched before and then keeps its small pages. One huge page more
  // than needed, to begin on the boundary of one.
  const int64_t mapped = (bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage;
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK_WITH(OutOfMemoryError, memory != MAP_FAILED, "gsync: no memory for a payload of ", bytes, " bytes");
#ifdef MADV_HUGEPAGE
  // Refused by a kernel without huge pages: then these are ordinary pages.
  static_cast<void>(madvise(memory, mapped, MADV_HUGEPAGE));
#endif
  const auto address = reinterpret_cast<uintptr_t>(memory);
  auto* begin = static_cast<uint8_t*>(memory) + (kHugePage - address % kHugePage) % kHugePage;
  return at::from_blob(begin, {bytes}, [memory, mapped](void* /*begin*/) { munmap(memory, mapped); }, options);
}

}  // namespace gsync
