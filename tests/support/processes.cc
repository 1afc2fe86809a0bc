#include "processes.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <thread>

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <gtest/gtest.h>

namespace fsdp::testing {
namespace {

using Clock = std::chrono::steady_clock;

constexpr const char* kBodyVariable = "FSDP_TEST_BODY";
constexpr const char* kArgumentsVariable = "FSDP_TEST_ARGUMENTS";
constexpr char kArgumentsSeparator = '\x1f';

std::map<std::string, std::function<void()>>& bodies() {
  static std::map<std::string, std::function<void()>> registered;
  return registered;
}

int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  const bool bound = ::bind(socket, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                     ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  ::close(socket);
  if (!bound) {
    throw std::runtime_error("run_processes: no free port on the loopback");
  }
  return ntohs(address.sin_port);
}

/// The exit code a shell would give.
int exit_code(int status) { return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); }

/// A started rank and what it has written so far.
class Child {
 public:
  explicit Child(const std::map<std::string, std::string>& environment) : started_(Clock::now()) {
    std::vector<std::string> pairs;
    for (const auto& [name, value] : environment) {
      pairs.push_back(name + "=" + value);
    }
    std::vector<char*> pointers;
    for (auto& pair : pairs) {
      pointers.push_back(pair.data());
    }
    pointers.push_back(nullptr);
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) {
      throw std::runtime_error("run_processes: no pipe");
    }
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, ends[1], STDOUT_FILENO);
    ::posix_spawn_file_actions_adddup2(&actions, ends[1], STDERR_FILENO);
    char program[] = "/proc/self/exe";
    char* arguments[] = {program, nullptr};
    const int error = ::posix_spawn(&pid_, program, &actions, nullptr, arguments, pointers.data());
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(ends[1]);
    output_ = ends[0];
    ::fcntl(output_, F_SETFL, O_NONBLOCK);
    if (error != 0) {
      ::close(output_);
      throw std::runtime_error(std::string("run_processes: cannot start a rank: ") + std::strerror(error));
    }
  }
  ~Child() {
    if (running_) {
      kill();
      ::waitpid(pid_, nullptr, 0);
    }
    ::close(output_);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  void kill() { ::kill(pid_, SIGKILL); }
  int output() const { return output_; }

  /// Takes what there is of output and of an end. False once the rank has ended.
  bool poll() {
    int status = 0;
    const bool ended = running_ && ::waitpid(pid_, &status, WNOHANG) == pid_;
    char buffer[4096];
    for (ssize_t count; (count = ::read(output_, buffer, sizeof(buffer))) > 0;) {
      result_.output.append(buffer, count);
    }
    if (ended) {
      running_ = false;
      result_.exit_code = exit_code(status);
      result_.lifetime = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - started_);
    }
    return running_;
  }
  const ProcessResult& result() const { return result_; }

 private:
  Clock::time_point started_;
  pid_t pid_ = 0;
  int output_ = -1;
  bool running_ = true;
  ProcessResult result_;
};

std::map<std::string, std::string> inherited_environment() {
  std::map<std::string, std::string> environment;
  for (char** entry = environ; *entry; ++entry) {
    const char* equals = std::strchr(*entry, '=');
    if (equals) {
      environment.emplace(std::string(*entry, static_cast<size_t>(equals - *entry)), equals + 1);
    }
  }
  return environment;
}

std::string join(const std::vector<std::string>& parts) {
  std::string text;
  for (const auto& part : parts) {
    text += part + kArgumentsSeparator;
  }
  return text;
}

}  // namespace

ProcessBody::ProcessBody(const std::string& name, std::function<void()> body) {
  if (!bodies().emplace(name, std::move(body)).second) {
    std::cerr << "two process bodies are called " << name << std::endl;
    std::abort();
  }
}

const std::vector<std::string>& process_arguments() {
  static const auto arguments = [] {
    std::vector<std::string> parts;
    const char* text = std::getenv(kArgumentsVariable);
    for (std::string rest = text ? text : ""; !rest.empty();) {
      const auto end = rest.find(kArgumentsSeparator);
      parts.push_back(rest.substr(0, end));
      rest.erase(0, end + 1);
    }
    return parts;
  }();
  return arguments;
}

std::vector<ProcessResult> run_processes(int ranks, const std::string& body, const ProcessOptions& options) {
  auto environment = inherited_environment();
  // ctest's sharding and gtest's own reports are for the parent.
  for (const auto* name : {"GTEST_OUTPUT", "GTEST_TOTAL_SHARDS", "GTEST_SHARD_INDEX", "XML_OUTPUT_FILE"}) {
    environment.erase(name);
  }
  environment[kBodyVariable] = body;
  environment[kArgumentsVariable] = join(options.arguments);
  environment["WORLD_SIZE"] = environment["LOCAL_WORLD_SIZE"] = std::to_string(ranks);
  environment["MASTER_ADDR"] = "127.0.0.1";
  environment["MASTER_PORT"] = std::to_string(free_port());
  environment["OMP_NUM_THREADS"] = "1";
  environment["GLOO_SOCKET_IFNAME"] = "lo";

  std::vector<std::unique_ptr<Child>> children;
  for (int rank = 0; rank < ranks; ++rank) {
    environment["RANK"] = environment["LOCAL_RANK"] = std::to_string(rank);
    auto own = environment;
    for (const auto& [name, value] : options.environment) {
      own[name] = value;
    }
    children.push_back(std::make_unique<Child>(own));
  }

  const auto deadline = Clock::now() + options.timeout;
  bool killed = false;
  for (bool running = true; running;) {
    std::vector<pollfd> outputs;
    running = false;
    for (const auto& child : children) {
      if (child->poll()) {
        running = true;
        outputs.push_back({child->output(), POLLIN, 0});
      }
    }
    if (running && !killed && Clock::now() > deadline) {
      killed = true;
      for (const auto& child : children) {
        if (child->poll()) {
          child->kill();
        }
      }
    }
    if (running) {
      // A rank that closed its output but lives would make poll return at once: hence the pause as well.
      ::poll(outputs.data(), outputs.size(), 50);
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
  }

  std::vector<ProcessResult> results;
  for (int rank = 0; rank < ranks; ++rank) {
    results.push_back(children[rank]->result());
    const auto& expected = options.expected_to_fail;
    if (results.back().exit_code != 0 && std::find(expected.begin(), expected.end(), rank) == expected.end()) {
      ADD_FAILURE() << "rank " << rank << " of '" << body << "' ended with code " << results.back().exit_code
                    << (killed ? " (ranks were killed at the timeout)" : "") << "; its output:\n"
                    << results.back().output;
    }
  }
  EXPECT_FALSE(killed) << "'" << body << "' did not end within " << options.timeout.count() << " s";
  return results;
}

bool run_body_if_rank(int& exit_code) {
  const char* name = std::getenv(kBodyVariable);
  if (!name) {
    return false;
  }
  exit_code = 1;
  const auto found = bodies().find(name);
  if (found == bodies().end()) {
    std::cerr << "no process body is called " << name << std::endl;
    return true;
  }
  try {
    found->second();
    exit_code = ::testing::Test::HasFailure() ? 1 : 0;
  } catch (const std::exception& error) {
    std::cerr << "the body threw: " << error.what() << std::endl;
  }
  return true;
}

}  // namespace fsdp::testing
