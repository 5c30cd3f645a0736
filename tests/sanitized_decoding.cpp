// Decodes payloads of random bytes with the CPU's kernels, under AddressSanitizer and UBSan: tests/test_decoding.py builds and runs it.
//
//     sanitized_decoding SEED ROUNDS
//
// Every array has exactly the length that the layout asks for, so that one byte read or written beside it ends the program.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/layout.h"
#include "cpu/kernels.h"

namespace {

using gsync::Dtype;
using gsync::Kind;
using Random = std::mt19937_64;

constexpr Kind kCodecs[] = {Kind::kFp32, Kind::kFp16, Kind::kBf16, Kind::kFp8E4m3, Kind::kFp8E5m2, Kind::kInt8, Kind::kInt4};
constexpr Dtype kDtypes[] = {Dtype::kFp32, Dtype::kFp16, Dtype::kBf16, Dtype::kFp64};
constexpr int64_t kNumels[] = {0, 1, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1000, 4095, 4096, 4097, 9001};
constexpr int64_t kBlocks[] = {0, 32, 64, 256, 1024, 4096};

int64_t below(Random& random, int64_t count) { return static_cast<int64_t>(random() % static_cast<uint64_t>(count)); }

int64_t bytes_of(Dtype dtype) { return dtype == Dtype::kFp64 ? 8 : dtype == Dtype::kFp32 ? 4 : 2; }

bool has_scales(Kind codec) { return codec != Kind::kFp32 && codec != Kind::kFp16 && codec != Kind::kBf16; }

std::vector<uint8_t> random_bytes(Random& random, int64_t count) {
  std::vector<uint8_t> bytes(static_cast<size_t>(count));
  // Now and then all bytes are one: the extremes of every format are among these.
  const bool is_flat = below(random, 4) == 0;
  const auto flat = static_cast<uint8_t>(random());
  for (uint8_t& byte : bytes) byte = is_flat ? flat : static_cast<uint8_t>(random());
  return bytes;
}

void run(Random& random, gsync::cpu::Level level) {
  std::vector<gsync::Segment> segments;
  const bool one_codec = below(random, 2) == 0;
  const Kind common = kCodecs[below(random, std::size(kCodecs))];
  for (int64_t i = below(random, 5); i >= 0; --i) {
    const Kind codec = one_codec ? common : kCodecs[below(random, std::size(kCodecs))];
    const int64_t block = has_scales(codec) ? kBlocks[below(random, std::size(kBlocks))] : 0;
    segments.push_back(
        {kNumels[below(random, std::size(kNumels))], kDtypes[below(random, std::size(kDtypes))], codec, random(), block});
  }
  const int64_t num_chunks = 1 + below(random, 4);
  const int64_t num_slices = 1 + below(random, 3);
  const gsync::Layout layout = gsync::build_layout(segments, num_chunks, below(random, num_slices), num_slices);

  // unpack
  const std::vector<uint8_t> payload = random_bytes(random, layout.payload_bytes());
  std::vector<std::unique_ptr<uint8_t[]>> memory;
  std::vector<void*> gradients;
  for (const gsync::Segment& segment : segments) {
    memory.push_back(std::make_unique<uint8_t[]>(static_cast<size_t>(segment.numel * bytes_of(segment.dtype))));
    gradients.push_back(below(random, 8) == 0 ? nullptr : memory.back().get());
  }
  std::vector<double> partials(static_cast<size_t>(layout.num_partials), 0.0);
  std::vector<double> sums(segments.size(), 0.0);
  int32_t found_nonfinite = 0;
  gsync::UnpackArgs unpack{};
  unpack.layout = layout.view();
  unpack.payload = payload.data();
  unpack.gradients = gradients.data();
  unpack.partials = partials.data();
  unpack.found_nonfinite = &found_nonfinite;
  unpack.segments = layout.partials.data();
  unpack.sum_of_squares = sums.data();
  gsync::cpu::unpack(unpack, 0, unpack.layout.num_tiles, level);
  gsync::cpu::sum_partials(unpack);
  for (const double sum : sums) {
    if (!(sum >= 0.0) && found_nonfinite == 0) throw std::logic_error("a sum of squares is no number, and nothing was found");
    if (std::isinf(sum) && found_nonfinite == 0) throw std::logic_error("a sum of squares is infinite, and nothing was found");
  }

  // reduce
  const int64_t chunk = below(random, num_chunks);
  std::vector<std::vector<uint8_t>> chunks;
  std::vector<const uint8_t*> addresses;
  for (int64_t i = below(random, 4); i >= 0; --i) chunks.push_back(random_bytes(random, layout.chunk_bytes));
  for (const auto& bytes : chunks) addresses.push_back(bytes.data());
  std::vector<uint8_t> out(static_cast<size_t>(layout.chunk_bytes), 0xEE);
  gsync::ReduceArgs reduce{};
  reduce.layout = layout.view_of_chunks(chunk, 1);
  reduce.payloads = addresses.data();
  reduce.num_payloads = static_cast<int64_t>(addresses.size());
  reduce.out = out.data();
  reduce.scale = 1.0f;
  gsync::cpu::reduce(reduce, 0, reduce.layout.num_tiles, level);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "overrun") {  // planted, to see that it would be reported
    const std::vector<uint8_t> bytes(16);
    const volatile uint8_t* const beyond = bytes.data() + 16;
    return *beyond;
  }
  Random random(argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 0);
  const long rounds = argc > 2 ? std::strtol(argv[2], nullptr, 10) : 1;
  for (long i = 0; i < rounds; ++i) {
    for (const gsync::cpu::Level level : gsync::cpu::available_levels()) run(random, level);
  }
  std::printf("%ld rounds\n", rounds);
  return 0;
}
