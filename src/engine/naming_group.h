#pragma once
#include <string>

#include <fsdp/error.h>

namespace fsdp::engine {

/// Runs fn(), and lets what fails in it say too what group's collective was waited for.
template <class Fn>
void naming_group(const std::string& group, const char* collective, Fn&& fn) {
  const auto waited = [&](const std::exception& error) {
    return std::string(error.what()) + " (while waiting for the " + collective + " of group '" + group + "')";
  };
  try {
    fn();
  } catch (const TimeoutError& error) {
    throw TimeoutError(waited(error));
  } catch (const CommError& error) {
    throw CommError(waited(error));
  }
}

}  // namespace fsdp::engine
