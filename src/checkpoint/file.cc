#include "checkpoint/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

#include <fsdp/error.h>

namespace fsdp::checkpoint {
namespace {

constexpr size_t kLargestCall = size_t{1} << 30;  // Linux moves at most 2 GiB a call

}  // namespace

void throw_errno(const std::string& what, const std::string& path) {
  const std::string reason = std::generic_category().message(errno);
  throw CheckpointError("cannot " + what + " '" + path + "': " + reason);
}

File File::open(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    throw_errno("open", path);
  }
  File file(path, fd, 0);
  struct stat info {};
  if (::fstat(fd, &info) != 0) {
    throw_errno("look at", path);
  }
  if (!S_ISREG(info.st_mode)) {
    throw CheckpointError("'" + path + "' is not a regular file");
  }
  file.size_ = static_cast<uint64_t>(info.st_size);
  return file;
}

File File::create(const std::string& path) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (fd < 0) {
    throw_errno("create", path);
  }
  return File(path, fd, 0);
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), size_(other.size_) {}

File::~File() {
  if (fd_ >= 0) {
    ::close(fd_);
  }
}

void File::read_at(uint64_t offset, void* out, size_t count) const {
  if (offset > size_ || count > size_ - offset) {
    throw CheckpointError("'" + path_ + "' has " + std::to_string(size_) + " bytes; expected " + std::to_string(count) +
                          " more from byte " + std::to_string(offset));
  }
  auto* to = static_cast<char*>(out);
  while (count > 0) {
    const ssize_t n = ::pread(fd_, to, std::min(count, kLargestCall), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) {
      continue;
    }
    if (n < 0) {
      throw_errno("read", path_);
    }
    if (n == 0) {
      throw CheckpointError("'" + path_ + "' became shorter while it was read (end at byte " + std::to_string(offset) +
                            ")");
    }
    to += n;
    offset += static_cast<uint64_t>(n);
    count -= static_cast<size_t>(n);
  }
}

void File::append(const void* data, size_t count) {
  const auto* from = static_cast<const char*>(data);
  while (count > 0) {
    const ssize_t n = ::write(fd_, from, std::min(count, kLargestCall));
    if (n < 0 && errno == EINTR) {
      continue;
    }
    if (n < 0) {
      throw_errno("write", path_);
    }
    from += n;
    size_ += static_cast<uint64_t>(n);
    count -= static_cast<size_t>(n);
  }
}

void File::finish() {
  if (::fsync(fd_) != 0) {
    throw_errno("sync", path_);
  }
  if (::close(std::exchange(fd_, -1)) != 0) {
    throw_errno("close", path_);
  }
}

std::string read_text(const std::string& path, uint64_t limit) {
  const File file = File::open(path);
  if (file.size() > limit) {
    throw CheckpointError("'" + path + "' has " + std::to_string(file.size()) + " bytes; at most " +
                          std::to_string(limit) + " were expected");
  }
  std::string text(file.size(), '\0');
  file.read_at(0, text.data(), text.size());
  return text;
}

void sync_folder(const std::string& folder) {
  const int fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) {
    throw_errno("open folder", folder);
  }
  const int rc = ::fsync(fd);
  const int reason = errno;
  ::close(fd);
  // Some network file systems cannot sync a folder; they order renames themselves.
  if (rc != 0 && reason != EINVAL && reason != ENOTSUP) {
    errno = reason;
    throw_errno("sync folder", folder);
  }
}

}  // namespace fsdp::checkpoint
