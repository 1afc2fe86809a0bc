#include "module/extension.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <fsdp/error.h>

#include "base/memory.h"
#include "engine/user_code.h"

namespace fsdp::module {
namespace {

/// `rows`, followed by zeros along `dim` up to `longest` of them.
at::Tensor padded(const at::Tensor& rows, int64_t dim, int64_t longest) {
  const int64_t count = rows.size(dim);
  if (count == longest) return rows.contiguous();
  auto sizes = rows.sizes().vec();
  sizes[static_cast<size_t>(dim)] = longest;
  auto out = at::zeros(sizes, rows.options());
  out.narrow(dim, 0, count).copy_(rows);
  return out;
}

std::vector<at::Tensor> sent_for(TensorExtension& user, const at::Tensor& rows) {
  auto sent = user.pre_all_gather(rows);
  for (const auto& tensor : sent) {
    if (!tensor.defined()) {
      throw InvalidArgument("libfsdp: pre_all_gather of a TensorExtension gave an undefined tensor");
    }
  }
  if (sent.empty()) throw InvalidArgument("libfsdp: pre_all_gather of a TensorExtension gave no tensor to send");
  return sent;
}

}  // namespace

std::vector<at::Tensor> first_sent(TensorExtension& user, const at::Tensor& tensor, int64_t dim,
                                   const DeviceMesh& mesh) {
  const engine::UserCode as_user;
  const int64_t axis = mesh.ndim() - 1, world = mesh.shape().back();
  const int64_t count = tensor.dim() == 0 ? 1 : tensor.size(dim);
  const auto mine = shard::rows_of_rank(count, world, mesh.coordinate(axis));
  const auto rows = engine::narrow_rows(tensor.detach(), dim, mine);
  return sent_for(user, padded(rows, dim, shard::rows_of_rank(count, world, 0).size()));
}

RowsExtension::RowsExtension(engine::ShardedParam& param, int64_t world, std::shared_ptr<TensorExtension> user)
    : param_(param), world_(world), longest_(param.rows_of(world, 0).size()), user_(std::move(user)) {}

std::vector<at::Tensor> RowsExtension::send() {
  const engine::UserCode as_user;
  try {
    auto sent = sent_for(*user_, padded(param_.shard().detach(), param_.dim(), longest_));
    sent_sizes_.clear();
    for (const auto& tensor : sent) sent_sizes_.push_back(tensor.sizes().vec());
    return sent;
  } catch (c10::Error& error) {
    error.add_context("in pre_all_gather of parameter '" + param_.name() + "'");
    throw;
  }
}

void RowsExtension::receive(const std::vector<at::Tensor>& received) {
  const engine::UserCode as_user;
  const auto& leaf = param_.leaf();
  base::set_storage_size(leaf, leaf.numel() * leaf.element_size());
  // The leaf's bytes without its key: the user's operators must not ask for a gather.
  const auto whole = at::empty({0}, leaf.options().requires_grad(false)).set_(leaf.storage(), 0, leaf.sizes());
  try {
    for (int64_t rank = 0; rank < world_; ++rank) {
      const auto range = param_.rows_of(world_, rank);
      if (range.size() == 0) continue;
      std::vector<at::Tensor> sent;
      for (size_t k = 0; k < received.size(); ++k) {
        const int64_t each = received[k].size(0) / world_;
        sent.push_back(received[k].narrow(0, rank * each, each).view(sent_sizes_[k]));
      }
      const auto rows = param_.part_of(whole, range);
      const bool short_of_some = range.size() < longest_;
      const auto to = short_of_some ? at::empty(param_.part_sizes(longest_), rows.options()) : rows;
      user_->post_all_gather(sent, to);
      if (short_of_some) rows.copy_(to.narrow(param_.dim(), 0, range.size()));
    }
  } catch (c10::Error& error) {
    error.add_context("in post_all_gather of parameter '" + param_.name() + "'");
    throw;
  }
}

void RowsExtension::release() noexcept { base::set_storage_size(param_.leaf(), 0); }

}  // namespace fsdp::module
