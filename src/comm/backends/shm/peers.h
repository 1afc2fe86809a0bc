#pragma once
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "comm/backends/shm/board.h"
#include "comm/channel.h"
#include "comm/segment.h"

namespace fsdp::comm::shm {

/// A word that is equal for processes that share a host's memory and can see each other's /proc.
std::string this_host();

/// Puts this rank's word about `topic` into the store and gives everybody's. Collective.
std::vector<std::string> exchange_words(const Rendezvous& rendezvous, const std::string& topic,
                                        const std::string& mine);

/// Every rank's segment, mapped here: this rank's own for writing, the peers' for reading but for their boards.
class Peers {
 public:
  /// Bytes of a segment that its board takes.
  static constexpr uint64_t kBoardBytes = (sizeof(Board) + 4095) / 4096 * 4096;

  /// Collective among the members of `rendezvous`, through its store. Empty, on every rank alike, where they do not all
  /// share one host's memory; `reason` then says why.
  static std::optional<Peers> meet(const Rendezvous& rendezvous, std::string& reason);

  Peers(Peers&&) noexcept = default;
  Peers& operator=(Peers&&) noexcept = default;
  ~Peers();
  /// Tells the others that this rank posts nothing any more. Does nothing in a process that was forked from the rank's.
  void leave();

  int rank() const { return rank_; }
  int size() const { return static_cast<int>(segments_.size()); }
  Board& board(int rank) const { return *reinterpret_cast<Board*>(segments_[rank].data()); }
  const char* data(int rank) const { return segments_[rank].data(); }
  char* own_data() const { return segments_[rank_].data(); }
  uint64_t own_bytes() const { return segments_[rank_].bytes(); }

  /// Whether every rank may read every other's memory (process_vm_readv), not only its segment. The same on all ranks.
  bool direct() const { return direct_; }
  bool has_ended(int peer) const;
  /// Copies `peer`'s memory from `address` on to `pieces`, one after another. False: it has ended, or does not have
  /// that memory (any more).
  bool read(int peer, uint64_t address, const std::vector<Piece>& pieces) const;

  /// Blocks until `peer` posted `number`, or until `deadline`: false then. Throws CommError (by way of std::exception)
  /// once the peer has ended, or closed its channel, without posting it.
  bool wait_for_post(int peer, uint32_t number, std::chrono::steady_clock::time_point deadline) const;

 private:
  Peers() = default;

  int rank_ = 0;
  bool direct_ = false;
  int owner_ = 0;  // this rank's process
  std::vector<Segment> segments_;
  struct Process {
    int pid = 0;
    int fd = -1;  // a pidfd; -1 where the kernel has none
    Process() = default;
    Process(Process&& other) noexcept;
    Process& operator=(Process&& other) noexcept;
    ~Process();
  };
  std::vector<Process> processes_;
};

}  // namespace fsdp::comm::shm
