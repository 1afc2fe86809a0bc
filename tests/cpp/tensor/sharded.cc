#include "sharded.h"

#include "support/ranks.h"

namespace fsdp::testing {

Sharded::Sharded(const std::vector<std::vector<int64_t>>& sizes, at::ScalarType dtype)
    : module(std::make_shared<torch::nn::Module>()) {
  int64_t count = 0;
  for (const auto& size : sizes) {
    int64_t numel = 1;
    for (auto n : size) numel *= n;
    // Signs and sizes that differ everywhere, nothing drawn: all ranks make the same.
    auto value = at::frac((torch::arange(numel, at::kDouble) + static_cast<double>(count)) * 0.6180339887);
    count += numel;
    value = value.mul(4).sub(2).view(size).to(dtype);
    plain.push_back(value.clone());
    sharded.push_back(module->register_parameter("p" + std::to_string(sharded.size()), value));
  }
  fully_shard(module);
}

at::Tensor whole(const at::Tensor& tensor) { return is_dtensor(tensor) ? dtensor(tensor).full_tensor() : tensor; }

void on_ranks(const std::function<void(int ranks)>& body) {
  for (int ranks : {1, 2, 3, 5}) {
    SCOPED_TRACE(std::to_string(ranks) + " ranks");
    run_ranks(ranks, [&](int) { body(ranks); });
  }
}

void expect_refused(const std::function<void()>& body, const std::vector<std::string>& words) {
  try {
    body();
    ADD_FAILURE() << "not refused: " << words[0];
  } catch (const NotSupported& error) {
    for (const auto& word : words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << "no '" << word << "' in: " << error.what();
    }
  }
}

}  // namespace fsdp::testing
