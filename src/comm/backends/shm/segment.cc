#include "comm/backends/shm/segment.h"

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace fsdp::comm::shm {
namespace {

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

Segment Segment::create(uint64_t bytes) {
  Segment segment;
  segment.fd_ = ::memfd_create("libfsdp", MFD_CLOEXEC);
  if (segment.fd_ < 0) fail("memfd_create");
  if (::fchmod(segment.fd_, S_IRUSR | S_IWUSR) != 0) fail("fchmod of a memfd");
  if (::ftruncate(segment.fd_, static_cast<off_t>(bytes)) != 0) fail("ftruncate of a memfd");
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, segment.fd_, 0);
  if (at == MAP_FAILED) fail("mmap of a memfd");
  segment.data_ = static_cast<char*>(at);
  segment.bytes_ = bytes;
  ::madvise(at, bytes, MADV_HUGEPAGE);  // where the host allows it; a hint
  return segment;
}

Segment Segment::open(int pid, int fd, uint64_t bytes, uint64_t writable) {
  const auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int opened = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (opened < 0) fail(path.c_str());
  void* at = ::mmap(nullptr, bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, opened, 0);
  const bool mapped = at != MAP_FAILED && ::mprotect(at, writable, PROT_READ | PROT_WRITE) == 0;
  const int error = errno;
  ::close(opened);
  Segment segment;
  if (at != MAP_FAILED) {
    segment.data_ = static_cast<char*>(at);
    segment.bytes_ = bytes;
  }
  if (!mapped) {
    errno = error;
    fail("mmap of a peer's memfd");
  }
  return segment;
}

Segment::~Segment() {
  if (data_) ::munmap(data_, bytes_);
  if (fd_ >= 0) ::close(fd_);
}

Segment::Segment(Segment&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      bytes_(std::exchange(other.bytes_, 0)),
      fd_(std::exchange(other.fd_, -1)) {}

Segment& Segment::operator=(Segment&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  std::swap(fd_, other.fd_);
  return *this;
}

uint64_t physical_memory() {
  return static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace fsdp::comm::shm
