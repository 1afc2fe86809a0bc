#include "checkpoint/folder.h"

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <vector>

#include <fsdp/error.h>

#include "checkpoint/file.h"
#include "checkpoint/index.h"

namespace fsdp::checkpoint {
namespace fs = std::filesystem;
namespace {

constexpr const char* kTmp = ".fsdp-tmp-";
constexpr const char* kOld = ".fsdp-old-";
constexpr unsigned kRenameExchange = 2;  // RENAME_EXCHANGE of linux/fs.h

// `path` without symbolic links and trailing slashes, so that its neighbours lie on its own file system.
std::string resolve(const std::string& path) {
  if (path.empty()) {
    throw CheckpointError("the checkpoint's path is empty; give the name of a folder");
  }
  std::error_code error;
  fs::path full = fs::weakly_canonical(fs::absolute(path), error);
  if (error) {
    throw CheckpointError("cannot resolve '" + path + "': " + error.message());
  }
  return full.has_filename() ? full.string() : full.parent_path().string();
}

std::string parent_of(const std::string& path) { return fs::path(path).parent_path().string(); }

bool complete(const std::string& folder) {
  std::error_code error;
  return fs::is_regular_file(fs::path(folder) / kIndexFile, error);
}

// Folders beside `path` with its name and this suffix.
std::vector<std::string> beside(const std::string& path, const std::string& suffix) {
  std::vector<std::string> found;
  const std::string prefix = fs::path(path).filename().string() + suffix;
  std::error_code error;
  for (fs::directory_iterator it(parent_of(path), error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename().string().starts_with(prefix)) {
      found.push_back(it->path().string());
    }
  }
  return found;
}

// What a save that could not exchange was killed over: the previous checkpoint, moved away.
std::string left_over(const std::string& path) {
  for (const auto& old : beside(path, kOld)) {
    if (complete(old)) {
      return old;
    }
  }
  return "";
}

void move(const std::string& from, const std::string& to) {
  if (std::rename(from.c_str(), to.c_str()) != 0) {
    throw_errno("rename '" + from + "' to", to);
  }
}

void remove(const std::string& folder) {
  // The index goes first, so that a half-deleted checkpoint never looks like a whole one.
  std::error_code error;
  fs::remove(fs::path(folder) / kIndexFile, error);
  fs::remove_all(folder, error);  // what stays is cleared by the next save
}

/// False if the file system cannot do it.
bool exchange_folders(const std::string& a, const std::string& b) {
  if (::syscall(SYS_renameat2, AT_FDCWD, a.c_str(), AT_FDCWD, b.c_str(), kRenameExchange) == 0) {
    return true;
  }
  if (errno == EINVAL || errno == ENOSYS || errno == ENOTSUP) {
    return false;
  }
  throw_errno("exchange '" + a + "' with", b);
}

void check_replaceable(const std::string& path) {
  std::error_code error;
  if (!fs::exists(path, error) || complete(path)) {
    return;
  }
  if (!fs::is_directory(path, error) || !fs::is_empty(path, error)) {
    throw CheckpointError("'" + path + "' exists and is not a checkpoint (no " + kIndexFile +
                          "); it is left as it is: give another path or remove it");
  }
}

std::string fresh_id() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::to_string(::getpid()) + "-" +
         std::to_string(std::chrono::duration_cast<std::chrono::nanoseconds>(now).count());
}

}  // namespace

Staging::Staging(const std::string& path) : path_(resolve(path)) {
  std::error_code error;
  fs::create_directories(parent_of(path_), error);
  if (error) {
    throw CheckpointError("cannot make the folder '" + parent_of(path_) + "': " + error.message());
  }
  if (const auto old = left_over(path_); !old.empty() && !fs::exists(path_, error)) {
    move(old, path_);
  }
  check_replaceable(path_);
  for (const char* suffix : {kTmp, kOld}) {
    for (const auto& stale : beside(path_, suffix)) {
      remove(stale);
    }
  }
  const std::string id = fresh_id();
  old_ = path_ + kOld + id;
  const std::string folder = path_ + kTmp + id;
  if (!fs::create_directory(folder, error)) {
    throw CheckpointError("cannot make the folder '" + folder + "': " + error.message());
  }
  folder_ = folder;
}

Staging::~Staging() {
  if (!folder_.empty()) {
    remove(folder_);
  }
}

void Staging::publish(const std::string& index_text, bool exchange) {
  File index = File::create(folder_ + "/" + kIndexFile);
  index.append(index_text.data(), index_text.size());
  index.finish();
  sync_folder(folder_);
  const std::string parent = parent_of(path_);
  if (!complete(path_)) {
    move(folder_, path_);  // onto nothing or onto an empty folder
    folder_.clear();
  } else if (exchange && exchange_folders(folder_, path_)) {
    sync_folder(parent);  // the new one is there to stay before the previous one goes
  } else {
    move(path_, old_);
    move(folder_, path_);
    folder_.clear();
    sync_folder(parent);
    remove(old_);
  }
  sync_folder(parent);
}

std::string find(const std::string& path) {
  std::string full = resolve(path);
  std::error_code error;
  if (complete(full)) {
    return full;
  }
  if (!fs::exists(full, error)) {
    if (auto old = left_over(full); !old.empty()) {
      return old;
    }
    throw CheckpointError("there is no checkpoint at '" + full + "'");
  }
  throw CheckpointError("'" + full + "' is not a whole checkpoint: it has no " + kIndexFile);
}

}  // namespace fsdp::checkpoint
