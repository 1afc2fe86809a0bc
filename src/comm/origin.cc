#include "comm/origin.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <fsdp/error.h>
#include <torch/csrc/distributed/c10d/exception.h>

namespace fsdp::comm {
namespace {

// Gloo and the stores report a timeout only in their words.
bool says_timeout(const std::string& what) {
  return what.find("imed out") != std::string::npos || what.find("imeout") != std::string::npos;
}

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

[[noreturn]] void fail(const Origin& origin, const char* operation, const std::string& what, bool timeout) {
  const auto who =
      c10::str(origin.engine, " channel '", origin.name, "', rank ", origin.rank, " of ", origin.size, ": ", operation);
  if (timeout) {
    throw TimeoutError(c10::str(who, " did not finish within ", origin.timeout.count(), " ms (", first_line(what),
                                "). See whether a rank is stuck, gone, or busy with something else, or raise "
                                "InitOptions::timeout."));
  }
  throw CommError(c10::str(who, " failed: ", first_line(what),
                           ". If a peer ended, its own output has the cause; every rank must issue the same "
                           "collectives in the same order."));
}

}  // namespace

void rethrow_as_comm_error(const Origin& origin, const char* operation) {
  try {
    throw;
  } catch (const Error&) {
    throw;
  } catch (const c10d::TimeoutError& error) {
    fail(origin, operation, error.what_without_backtrace(), true);
  } catch (const c10::Error& error) {
    const std::string what = error.what_without_backtrace();
    fail(origin, operation, what, says_timeout(what));
  } catch (const std::exception& error) {
    fail(origin, operation, error.what(), says_timeout(error.what()));
  }
}

}  // namespace fsdp::comm
