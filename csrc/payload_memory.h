// Where payloads live.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace gsync {

/// uint8 [bytes], not initialised. On the CPU large ones lie on huge pages where the system gives them (Linux: transparent huge
/// pages "madvise" or "always"): with 4 KiB pages, packing and unpacking 25 MiB take 1.3 to 1.6 times as long, most of that in
/// page walks, and the sockets' copies gain likewise.
at::Tensor empty_payload(int64_t bytes, c10::Device device);

}  // namespace gsync
