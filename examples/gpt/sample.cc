#include "sample.h"

#include <algorithm>
#include <limits>

#include <ATen/CPUGeneratorImpl.h>

namespace gpt {
namespace {

/// Draws a byte from logits [vocab].
int64_t draw(at::Tensor logits, const Options& options, at::Generator& generator) {
  logits = logits.to(torch::kFloat);
  if (options.temperature == 0) return logits.argmax().item<int64_t>();
  if (options.top_k > 0 && options.top_k < logits.numel()) {
    const auto lowest_kept = std::get<0>(logits.topk(options.top_k)).min();
    logits = logits.masked_fill(logits < lowest_kept, -std::numeric_limits<float>::infinity());
  }
  const auto probabilities = (logits / options.temperature).softmax(0);
  return at::multinomial(probabilities, 1, /*replacement=*/false, generator).item<int64_t>();
}

}  // namespace

std::string sample(const Model& model, const Options& options) {
  torch::NoGradGuard no_grad;
  auto generator = at::detail::createCPUGenerator(options.seed);
  std::string text = options.prompt.empty() ? "\n" : options.prompt;
  for (int64_t i = 0; i < options.sample_bytes; ++i) {
    const auto seen = std::min<int64_t>(static_cast<int64_t>(text.size()), options.model.context);
    auto* end = reinterpret_cast<uint8_t*>(text.data() + text.size());
    const auto tokens = torch::from_blob(end - seen, {1, seen}, torch::kByte).to(torch::kLong);
    text += static_cast<char>(draw(model(tokens)[0][seen - 1], options, generator));
  }
  return text;
}

std::string printable(const std::string& text) {
  std::string out = text;
  std::replace_if(
      out.begin(), out.end(), [](unsigned char c) { return (c < ' ' && c != '\n' && c != '\t') || c >= 0x7f; }, '.');
  return out;
}

}  // namespace gpt
