#pragma once
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace fsdp::mesh {
class World;
}

namespace fsdp::checkpoint {

/// The ranks of the world, exchanging small texts.
class Ranks {
 public:
  /// `what` begins every error: "save to 'folder'".
  explicit Ranks(std::string what);

  int rank() const;
  int size() const;

  /// Every rank's text. Collective.
  std::vector<std::string> gather(const std::string& mine) const;
  /// Rank 0's bytes of `tensor`, contiguous and in host memory, on every rank. Collective.
  void broadcast(const at::Tensor& tensor) const;
  /// Runs `work` here; if it throws on any rank, throws on every rank, the same error. Collective, so `work` must
  /// not communicate.
  void together(const std::function<void()>& work) const;

 private:
  std::string what_;
  std::shared_ptr<mesh::World> world_;
};

}  // namespace fsdp::checkpoint
