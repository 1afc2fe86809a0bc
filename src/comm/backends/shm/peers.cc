#include "comm/backends/shm/peers.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <exception>
#include <fstream>
#include <new>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>
#include <utility>

#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <c10/util/StringUtil.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace fsdp::comm::shm {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kSpin = std::chrono::microseconds(20);
// How long a sleep lasts before the peer's life is looked at.
constexpr auto kNap = std::chrono::milliseconds(20);
constexpr const char *kFine = "fine", *kDirect = "direct";

/// What a rank tells the others about its segment.
struct Card {
  std::string host;  // equal for processes that can see each other's /proc
  int pid = 0, fd = -1;
  uint64_t bytes = 0, nonce = 0;
  uint64_t board = 0;  // its address in the process

  std::string text() const { return c10::str(host, " ", pid, " ", fd, " ", bytes, " ", nonce, " ", board); }
  static Card parse(const std::string& text) {
    Card card;
    std::istringstream(text) >> card.host >> card.pid >> card.fd >> card.bytes >> card.nonce >> card.board;
    return card;
  }
};

int open_pidfd(int pid) { return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)); }

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

}  // namespace

std::string this_host() {
  std::string boot = "?";
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  char space[64] = {};
  const auto length = ::readlink("/proc/self/ns/pid", space, sizeof(space) - 1);
  return boot + "/" + std::string(space, length > 0 ? static_cast<size_t>(length) : 0);
}

std::vector<std::string> exchange_words(const Rendezvous& rendezvous, const std::string& topic,
                                        const std::string& mine) {
  auto& store = *rendezvous.store;
  const auto key = [&](int rank) { return c10::str("shm/", topic, "/", rank); };
  store.set(key(rendezvous.rank), mine);
  std::vector<std::string> keys, words;
  for (int rank = 0; rank < rendezvous.size; ++rank) keys.push_back(key(rank));
  store.wait(keys, rendezvous.timeout);
  for (const auto& word : store.multiGet(keys)) words.emplace_back(word.begin(), word.end());
  return words;
}

Peers::Process::Process(Process&& other) noexcept : pid(other.pid), fd(std::exchange(other.fd, -1)) {}
Peers::Process& Peers::Process::operator=(Process&& other) noexcept {
  pid = other.pid;
  std::swap(fd, other.fd);
  return *this;
}
Peers::Process::~Process() {
  if (fd >= 0) ::close(fd);
}

Peers::~Peers() { leave(); }

void Peers::leave() {
  if (!segments_.empty() && segments_[static_cast<size_t>(rank_)].data() && ::getpid() == owner_) board(rank_).leave();
}

std::optional<Peers> Peers::meet(const Rendezvous& rendezvous, std::string& reason) {
  Peers peers;
  peers.rank_ = rendezvous.rank;
  peers.segments_.resize(static_cast<size_t>(rendezvous.size));
  peers.processes_.resize(static_cast<size_t>(rendezvous.size));
  peers.owner_ = ::getpid();
  Card mine{this_host(), peers.owner_};
  std::string problem;
  // Whatever goes wrong here is for the others to know too: the verdict below is taken by all.
  try {
    auto& own = peers.segments_[static_cast<size_t>(rendezvous.rank)];
    own = Segment::create(physical_memory());
    auto* board = new (own.data()) Board;
    std::random_device random;
    board->nonce = (static_cast<uint64_t>(random()) << 32) | random();
    mine.fd = own.fd();
    mine.bytes = own.bytes();
    mine.nonce = board->nonce;
    mine.board = reinterpret_cast<uintptr_t>(board);
  } catch (const std::exception& error) {
    problem = error.what();
  }
  bool direct = true;
  const auto cards = exchange_words(rendezvous, "card", mine.text());
  for (int rank = 0; rank < rendezvous.size && problem.empty(); ++rank) {
    if (rank == rendezvous.rank) continue;
    const auto card = Card::parse(cards[static_cast<size_t>(rank)]);
    if (card.host != mine.host) {
      problem = c10::str("rank ", rank, " is on another host");
      break;
    }
    if (card.fd < 0) break;  // its own verdict says why
    try {
      peers.segments_[static_cast<size_t>(rank)] = Segment::open(card.pid, card.fd, card.bytes, kBoardBytes);
      const auto& board = peers.board(rank);
      if (board.magic != Board::kMagic || board.nonce != card.nonce) {
        problem = c10::str("process ", card.pid, " here is not rank ", rank);
      }
    } catch (const std::exception& error) {
      problem = error.what();
    }
    auto& process = peers.processes_[static_cast<size_t>(rank)];
    process.pid = card.pid;
    if (card.pid != mine.pid) process.fd = open_pidfd(card.pid);
    uint64_t nonce = 0;
    const auto at = card.board + offsetof(Board, nonce);
    direct = direct && peers.read(rank, at, {{&nonce, sizeof(nonce)}}) && nonce == card.nonce;
  }
  if (problem.empty()) problem = direct ? kDirect : kFine;
  const auto verdicts = exchange_words(rendezvous, "verdict", problem);
  peers.direct_ = std::count(verdicts.begin(), verdicts.end(), kDirect) == rendezvous.size;
  for (int rank = 0; rank < rendezvous.size; ++rank) {
    const auto& verdict = verdicts[static_cast<size_t>(rank)];
    if (verdict == kFine || verdict == kDirect) continue;
    reason = c10::str("rank ", rank, ": ", verdict);
    return std::nullopt;
  }
  return peers;
}

bool Peers::read(int peer, uint64_t address, const std::vector<Piece>& pieces) const {
  constexpr size_t kAtOnce = 64;
  constexpr int64_t kLongest = 1 << 30;  // the kernel copies no more than 2 GB a call
  std::array<iovec, kAtOnce> local;
  int64_t begin = 0;  // in the next piece
  for (auto next = pieces.begin(); next != pieces.end();) {
    size_t count = 0;
    int64_t bytes = 0;
    while (count < kAtOnce && next != pieces.end() && bytes < kLongest) {
      const auto n = std::min(next->bytes - begin, kLongest - bytes);
      local[count++] = {static_cast<char*>(next->to) + begin, static_cast<size_t>(n)};
      bytes += n;
      begin += n;
      if (begin < next->bytes) continue;
      ++next;
      begin = 0;
    }
    const iovec remote{reinterpret_cast<void*>(address), static_cast<size_t>(bytes)};
    if (::process_vm_readv(processes_[static_cast<size_t>(peer)].pid, local.data(), count, &remote, 1, 0) != bytes) {
      return false;
    }
    address += static_cast<uint64_t>(bytes);
  }
  return true;
}

bool Peers::has_ended(int peer) const {
  const auto& process = processes_[static_cast<size_t>(peer)];
  if (process.fd >= 0) {
    pollfd poll{process.fd, POLLIN, 0};
    return ::poll(&poll, 1, 0) > 0;
  }
  return ::kill(process.pid, 0) != 0 && errno == ESRCH;
}

bool Peers::wait_for_post(int peer, uint32_t number, Clock::time_point deadline) const {
  auto& board = this->board(peer);
  if (board.has_posted(number)) return true;
  for (const auto until = std::min(Clock::now() + kSpin, deadline); Clock::now() < until; relax()) {
    if (board.has_posted(number)) return true;
  }
  while (true) {
    // Looked at before the post: what was posted before the end counts.
    const bool gone = board.left.load(std::memory_order_acquire) != 0 || has_ended(peer);
    if (board.has_posted(number)) return true;
    if (gone) {
      throw std::runtime_error(c10::str("rank ", peer, " (process ", processes_[static_cast<size_t>(peer)].pid,
                                        has_ended(peer) ? ") has ended" : ") has left the channel"));
    }
    const auto now = Clock::now();
    if (now >= deadline) return false;
    board.sleep(number, std::min<std::chrono::nanoseconds>(deadline - now, kNap));
  }
}

}  // namespace fsdp::comm::shm
