#pragma once
#include <string>

/// How a checkpoint's folder comes to be whole or not at all.
///
/// Note [A kill at any moment]
/// Everything is written into `<path>.fsdp-tmp-<id>` beside the target, and synced. The index is written last there: a
/// folder with an index is complete. Then one rename puts it at `path`:
/// - nothing at `path`: rename.
/// - a checkpoint at `path`: the two are exchanged (renameat2 with RENAME_EXCHANGE), one step for the file system,
///   and the previous one is deleted under the temporary name.
/// - a file system that cannot exchange: the previous one is moved to `<path>.fsdp-old-<id>` first. A kill between the
/// two
///   renames leaves nothing at `path`; `find` then finds the previous one, and the next save moves it back first.
namespace fsdp::checkpoint {

/// A new checkpoint under way. One process of the job (rank 0) makes and publishes it; the others only write into
/// `folder`.
class Staging {
 public:
  /// Clears what killed saves left beside `path`, and makes an empty folder for the new checkpoint. CheckpointError
  /// if `path` is something other than a checkpoint or an empty folder: nothing of the user's is overwritten.
  explicit Staging(const std::string& path);
  /// Deletes the folder unless it was published.
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  const std::string& folder() const { return folder_; }
  /// Writes the index and puts the folder at `path`. `exchange`: whether to try to exchange (false in tests).
  void publish(const std::string& index_text, bool exchange = true);

 private:
  std::string path_;
  std::string folder_;
  std::string old_;  // where the previous one goes if it cannot be exchanged
};

/// The folder that holds the checkpoint of this name: `path`, or what a killed save left of it. CheckpointError if
/// there is none.
std::string find(const std::string& path);

}  // namespace fsdp::checkpoint
