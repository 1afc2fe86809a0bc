#pragma once
#include <chrono>
#include <exception>
#include <string>
#include <utility>

namespace fsdp::comm {

/// Who is speaking, for error messages. Shared by a channel and its pending collectives.
struct Origin {
  std::string engine;
  std::string name;
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};
};

/// Inside a catch block: throws what is being handled as TimeoutError or CommError that names the channel, the rank,
/// the operation and what to do. Errors that are already libfsdp's pass unchanged.
[[noreturn]] void rethrow_as_comm_error(const Origin& origin, const char* operation);

/// Calls `body`; its errors come out as libfsdp's.
template <class Body>
auto translating_errors(const Origin& origin, const char* operation, Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (...) {
    rethrow_as_comm_error(origin, operation);
  }
}

}  // namespace fsdp::comm
