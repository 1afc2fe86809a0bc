#include "comm/segment.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace fsdp::comm {
namespace {

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

int open_peers(int pid, int fd, int mode) {
  const auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int opened = ::open(path.c_str(), mode | O_CLOEXEC);
  if (opened < 0) fail(path.c_str());
  return opened;
}

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
  const int opened = open_peers(pid, fd, O_RDWR);
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

Segment Segment::look_at(int pid, int fd, uint64_t bytes) {
  const int opened = open_peers(pid, fd, O_RDONLY);
  Segment segment;
  void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, opened, 0);
  const int error = errno;
  ::close(opened);
  errno = error;
  if (at == MAP_FAILED) fail("a private mmap of a memfd");
  segment.data_ = static_cast<char*>(at);
  segment.bytes_ = bytes;
  return segment;
}

void Segment::seal() {
  if (const int fd = std::exchange(fd_, -1); fd >= 0) ::close(fd);
}

void Segment::drop_own_writes() {
  // A page that was copied is anonymous memory: it is there, and is no page of the file any more.
  constexpr uint64_t kPresent = 1ull << 63, kSwapped = 1ull << 62, kOfFile = 1ull << 61;
  constexpr size_t kAtOnce = 4096;
  static const auto page = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  const int map = ::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  const uint64_t first = reinterpret_cast<uintptr_t>(data_) / page, count = (bytes_ + page - 1) / page;
  std::array<uint64_t, kAtOnce> entries;
  for (uint64_t begin = 0; begin < count; begin += kAtOnce) {
    const uint64_t n = std::min<uint64_t>(kAtOnce, count - begin);
    const auto wanted = static_cast<ssize_t>(n * sizeof(uint64_t));
    const bool known = map >= 0 && ::pread(map, entries.data(), static_cast<size_t>(wanted),
                                           static_cast<off_t>((first + begin) * sizeof(uint64_t))) == wanted;
    for (uint64_t i = 0; i < n; ++i) {
      const bool own = !known || ((entries[i] & (kPresent | kSwapped)) != 0 && (entries[i] & kOfFile) == 0);
      if (own) ::madvise(data_ + (begin + i) * page, page, MADV_DONTNEED);
    }
  }
  if (map >= 0) ::close(map);
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

}  // namespace fsdp::comm
