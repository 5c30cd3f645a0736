// How the ranks of the stand-in for NCCL move data: through memory that they share, in pieces, meeting before and after each.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "nccl_api.h"
#include "streams.h"

namespace emulation {

using gsync::nccl::DataType;

inline constexpr int kMaxRanks = kDevices;
inline constexpr size_t kSlotBytes = 1 << 16;  // larger operations go in pieces

// What the ranks share.
struct Board {
  std::atomic<int> attached;
  std::atomic<uint64_t> arrived[kMaxRanks];
  uint8_t slots[kMaxRanks][kMaxRanks][kSlotBytes];  // [from][to]
};

struct Communicator {
  std::string name;  // of the board
  Board* board = nullptr;
  int rank = 0;
  int known_as = 0;  // the rank in the communicator that this one was split from
  int size = 0;
  int splits = 0;
  int polls_left = 0;  // answers "in progress" so often before a call has succeeded
  std::atomic<bool> is_busy{false};
  std::atomic<bool> is_aborted{false};
  std::atomic<int> async_error{gsync::nccl::kSuccess};
  std::string last_error;
  uint64_t phase = 0;  // touched by the stream only
  std::minstd_rand random;

  ~Communicator() {
    if (board == nullptr) return;
    if (board->attached.load() < size) shm_unlink(name.c_str());  // a rank has not come
    munmap(board, sizeof(Board));
  }
};

struct Piece {  // of a group
  bool is_send;
  uint8_t* buffer;
  size_t bytes;
  int peer;
};

inline bool gave_up(const Communicator& comm) { return comm.is_aborted.load() || is_shut_down(); }

// Waits for all ranks; false when the communicator was aborted meanwhile.
inline bool meet(Communicator& comm) {
  ++comm.phase;
  comm.board->arrived[comm.rank].store(comm.phase);
  for (int rank = 0; rank < comm.size; ++rank) {
    while (comm.board->arrived[rank].load() < comm.phase) {
      if (gave_up(comm)) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  return !gave_up(comm);
}

inline void exchange_pieces(Communicator& comm, const std::vector<Piece>& pieces, size_t bytes) {
  for (size_t done = 0; done < bytes; done += kSlotBytes) {
    const size_t now = std::min(kSlotBytes, bytes - done);
    for (const Piece& piece : pieces) {
      if (piece.is_send) std::memcpy(comm.board->slots[comm.rank][piece.peer], piece.buffer + done, now);
    }
    if (!meet(comm)) return;
    for (const Piece& piece : pieces) {
      if (!piece.is_send) std::memcpy(piece.buffer + done, comm.board->slots[piece.peer][comm.rank], now);
    }
    if (!meet(comm)) return;
  }
}

template <typename T>
void sum_slots(Communicator& comm, uint8_t* receive, size_t bytes) {
  for (size_t i = 0; i < bytes / sizeof(T); ++i) {
    T sum = reinterpret_cast<const T*>(comm.board->slots[0][0])[i];
    for (int rank = 1; rank < comm.size; ++rank) {
      sum =
          static_cast<T>(static_cast<float>(sum) + static_cast<float>(reinterpret_cast<const T*>(comm.board->slots[rank][0])[i]));
    }
    reinterpret_cast<T*>(receive)[i] = sum;
  }
}

inline void sum_all(Communicator& comm, const uint8_t* send, uint8_t* receive, size_t bytes, DataType type) {
  for (size_t done = 0; done < bytes; done += kSlotBytes) {
    const size_t now = std::min(kSlotBytes, bytes - done);
    std::memcpy(comm.board->slots[comm.rank][0], send + done, now);
    if (!meet(comm)) return;
    if (type == gsync::nccl::kFloat32) sum_slots<float>(comm, receive + done, now);
    if (type == gsync::nccl::kFloat16) sum_slots<c10::Half>(comm, receive + done, now);
    if (type == gsync::nccl::kBfloat16) sum_slots<c10::BFloat16>(comm, receive + done, now);
    if (!meet(comm)) return;
  }
}

}  // namespace emulation
