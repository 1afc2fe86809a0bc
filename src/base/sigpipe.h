#pragma once
#include <signal.h>

namespace fsdp::base {

/// While alive, and for good in every thread that is started meanwhile, a write to a connection that the peer closed
/// fails with EPIPE. Otherwise it ends the process (SIGPIPE), before anybody could say which rank is gone: sockets that
/// other libraries write to cannot be told to leave the signal out. Nothing changes for the process's other threads.
class BlockedSigpipe {
 public:
  BlockedSigpipe() {
    sigemptyset(&sigpipe_);
    sigaddset(&sigpipe_, SIGPIPE);
    sigset_t pending;
    sigpending(&pending);
    was_pending_ = sigismember(&pending, SIGPIPE) == 1;
    pthread_sigmask(SIG_BLOCK, &sigpipe_, &before_);
  }
  ~BlockedSigpipe() {
    // What arrived meanwhile would be delivered as soon as it is let through.
    const timespec at_once{0, 0};
    while (!was_pending_ && sigtimedwait(&sigpipe_, nullptr, &at_once) == SIGPIPE) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  BlockedSigpipe(const BlockedSigpipe&) = delete;
  BlockedSigpipe& operator=(const BlockedSigpipe&) = delete;

 private:
  sigset_t sigpipe_, before_;
  bool was_pending_;
};

}  // namespace fsdp::base
