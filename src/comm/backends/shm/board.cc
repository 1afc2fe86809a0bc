#include "comm/backends/shm/board.h"

#include <climits>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace fsdp::comm::shm {

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == sizeof(uint32_t),
              "the kernel waits on it as a plain word");

namespace {

void wake_all(std::atomic<uint32_t>& word) { ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

}  // namespace

void Board::post(uint32_t number) {
  // Sequentially consistent, as in sleep(): either the sleeper sees the new count or this sees the sleeper.
  posted.store(number + 1, std::memory_order_seq_cst);
  if (sleepers.load(std::memory_order_seq_cst) > 0) wake_all(posted);
}

void Board::leave() {
  left.store(1, std::memory_order_seq_cst);
  wake_all(posted);
}

void Board::sleep(uint32_t number, std::chrono::nanoseconds limit) {
  sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint32_t seen = posted.load(std::memory_order_seq_cst);
  if (!past(seen, number) && left.load(std::memory_order_seq_cst) == 0) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
    const timespec time{static_cast<time_t>(seconds.count()), static_cast<long>((limit - seconds).count())};
    ::syscall(SYS_futex, &posted, FUTEX_WAIT, seen, &time, nullptr, 0);
  }
  sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace fsdp::comm::shm
