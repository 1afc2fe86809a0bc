#pragma once
#include <cstdint>
#include <string>

namespace fsdp::checkpoint {

/// A file of a checkpoint: positioned reads or appended writes. Every failure is a CheckpointError that names the
/// path and the system's reason.
class File {
 public:
  static File open(const std::string& path);
  /// Makes a new file; one that exists already is an error.
  static File create(const std::string& path);
  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();

  const std::string& path() const { return path_; }
  /// Bytes in the file when it was opened, or written to it so far.
  uint64_t size() const { return size_; }

  /// Fills `out` with the bytes [offset, offset + count). An error if the file has fewer.
  void read_at(uint64_t offset, void* out, size_t count) const;
  void append(const void* data, size_t count);
  /// Waits until the bytes are on the disk, then closes: a disk that is full may say so only here.
  void finish();

 private:
  File(std::string path, int fd, uint64_t size) : path_(std::move(path)), fd_(fd), size_(size) {}

  std::string path_;
  int fd_;
  uint64_t size_;
};

/// The whole of a small file. An error if it is larger than `limit` bytes.
std::string read_text(const std::string& path, uint64_t limit);
/// Waits until the names in `folder` are on the disk.
void sync_folder(const std::string& folder);
/// "cannot <what> '<path>': <reason of errno>", as a CheckpointError.
[[noreturn]] void throw_errno(const std::string& what, const std::string& path);

}  // namespace fsdp::checkpoint
