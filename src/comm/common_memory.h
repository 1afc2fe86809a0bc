#pragma once
#include <cstdint>
#include <memory>

#include "comm/channel.h"
#include "comm/segment.h"

namespace fsdp::comm {

/// Bytes that the ranks of a channel have in common: one copy on their host. Zero at first. Nothing here keeps writers
/// and readers apart; that is for whoever knows when ranks write.
class CommonMemory {
 public:
  /// Collective. NotSupported on every rank if they cannot map each other's memory; CommError as any collective.
  static std::shared_ptr<CommonMemory> make(Channel& channel, int64_t nbytes);

  /// What is written here, all ranks see.
  char* shared() const { return shared_.data(); }
  /// The same bytes to read. What is written here, this rank alone sees.
  char* own() const { return own_.data(); }
  /// own() shows what is shared again, everywhere.
  void drop_own_writes() { own_.drop_own_writes(); }

 private:
  Segment shared_, own_;
};

}  // namespace fsdp::comm
