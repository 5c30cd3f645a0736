// Where payloads live.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <cstdint>

namespace gsync {

/// uint8 [bytes], not initialised. On the CPU large ones lie on huge pages where the system gives them (Linux: transparent huge
/// pages "madvise" or "always"): with 4 KiB pages a plain loop that packs 25 MiB to bf16 took 1.5 times as long, one that
/// unpacks it 1.25 times.
at::Tensor empty_payload(int64_t bytes, c10::Device device);

}  // namespace gsync
