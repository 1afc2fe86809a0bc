#include "cases.h"

#include <chrono>

namespace fsdp::testing {

torch::nn::Linear ones_linear(int64_t in, int64_t out) {
  torch::nn::Linear linear(torch::nn::LinearOptions(in, out).bias(false));
  torch::nn::init::ones_(linear->weight);
  return linear;
}

at::Tensor whole(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  return is_dtensor(tensor) ? dtensor(tensor).full_tensor() : tensor.detach().clone();
}

Values parameters_and_gradients(const torch::nn::Module& module) {
  Values values = module.parameters();
  for (const auto& parameter : module.parameters()) values.push_back(parameter.grad());
  return values;
}

void expect_equal(const Values& actual, const Values& expected, const std::string& where, double tolerance) {
  ASSERT_EQ(actual.size(), expected.size()) << where;
  for (size_t i = 0; i < actual.size(); ++i) {
    const auto which = where + ", value " + std::to_string(i);
    ASSERT_EQ(actual[i].defined(), expected[i].defined()) << which;
    if (!actual[i].defined()) continue;
    ASSERT_EQ(actual[i].sizes(), expected[i].sizes()) << which;
    ASSERT_EQ(actual[i].scalar_type(), expected[i].scalar_type()) << which;
    EXPECT_TRUE(at::allclose(actual[i], expected[i], tolerance, tolerance)) << which << ": got\n"
                                                                            << actual[i] << "\nexpected\n"
                                                                            << expected[i];
  }
}

std::vector<std::string> errors_of(int ranks, const std::function<void(int rank)>& body,
                                   std::chrono::milliseconds timeout) {
  std::vector<std::string> errors(static_cast<size_t>(ranks));
  const auto begin = std::chrono::steady_clock::now();
  run_ranks(
      ranks, [&](int rank) { errors[static_cast<size_t>(rank)] = error_of([&] { body(rank); }); }, timeout);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, timeout) << "a rank waited until its timeout";
  return errors;
}

void expect_every_rank_says(const std::vector<std::string>& errors, const std::vector<std::string>& words) {
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    for (const auto& word : words) {
      EXPECT_NE(errors[rank].find(word), std::string::npos)
          << "rank " << rank << " should say '" << word
          << "', says: " << (errors[rank].empty() ? "nothing" : errors[rank]);
    }
  }
}

std::string error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

StackImpl::StackImpl(int64_t count, int64_t width) {
  blocks = register_module("blocks", torch::nn::ModuleList());
  for (int64_t i = 0; i < count; ++i) blocks->push_back(torch::nn::Linear(width, width));
  head = register_module("head", torch::nn::Linear(width, 2));
}

at::Tensor StackImpl::forward(at::Tensor x) {
  auto order = route;
  if (order.empty()) {
    for (size_t i = 0; i < blocks->size(); ++i) order.push_back(i);
  }
  for (const size_t i : order) {
    if (before_block) before_block(i);
    x = torch::tanh(blocks->ptr<torch::nn::LinearImpl>(i)->forward(x));
  }
  return head(x);
}

FSDPModule<Stack> shard_blocks(Stack& net, const DeviceMesh& mesh) {
  for (const auto& block : *net->blocks) fully_shard(block, {.mesh = mesh});
  return fully_shard(net, {.mesh = mesh});
}

}  // namespace fsdp::testing
