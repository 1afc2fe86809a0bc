#pragma once
#include <memory>
#include <vector>

#include <fsdp/device_mesh.h>
#include <fsdp/tensor_extension.h>

#include "engine/sharded_param.h"

namespace fsdp::module {

/// A user's extension of one parameter: gives it rows to send, and fills the leaf, which has bytes while the group is
/// whole, from what each rank sent.
class RowsExtension final : public engine::Extension {
 public:
  RowsExtension(engine::ShardedParam& param, int64_t world, std::shared_ptr<TensorExtension> user);
  std::vector<at::Tensor> send() override;
  void receive(const std::vector<at::Tensor>& received) override;
  void release() noexcept override;

 private:
  engine::ShardedParam& param_;  // owns this
  const int64_t world_, longest_;
  const std::shared_ptr<TensorExtension> user_;
  std::vector<std::vector<int64_t>> sent_sizes_;
};

/// What `user` sends for this rank's rows, along `dim`, of the whole `tensor`. InvalidArgument if it is nothing.
std::vector<at::Tensor> first_sent(TensorExtension& user, const at::Tensor& tensor, int64_t dim,
                                   const DeviceMesh& mesh);

}  // namespace fsdp::module
