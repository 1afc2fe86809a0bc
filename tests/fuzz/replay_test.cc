// Replays the fuzzers' corpus, and inputs made from it by a fixed series of changes.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "targets.h"

namespace {

namespace fs = std::filesystem;
using Target = void (*)(const uint8_t*, size_t);

std::vector<std::string> corpus(const std::string& folder) {
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(fs::path(FSDP_CORPUS) / folder)) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  std::vector<std::string> inputs;
  for (const auto& path : paths) {
    std::ifstream in(path, std::ios::binary);
    inputs.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  return inputs;
}

void feed(Target target, const std::string& input) {
  target(reinterpret_cast<const uint8_t*>(input.data()), input.size());
}

class Mutator {
 public:
  explicit Mutator(const std::vector<std::string>& inputs) : inputs_(inputs) {}

  std::string next() {
    std::string text = pick();
    for (size_t i = 0, n = 1 + below(4); i < n; ++i) {
      change(text);
    }
    return text;
  }

 private:
  size_t below(size_t n) { return n == 0 ? 0 : random_() % n; }
  const std::string& pick() { return inputs_[below(inputs_.size())]; }

  void change(std::string& text) {
    static const std::vector<std::string> kTokens = {"{",
                                                     "}",
                                                     "[",
                                                     "]",
                                                     "\"",
                                                     ":",
                                                     ",",
                                                     "0",
                                                     "-1",
                                                     "1.5",
                                                     "null",
                                                     "true",
                                                     "\xff",
                                                     "\\u0000",
                                                     "9223372036854775807",
                                                     "18446744073709551616"};
    const size_t at = below(text.size() + 1);
    switch (below(5)) {
      case 0:
        text.insert(at, kTokens[below(kTokens.size())]);
        break;
      case 1:
        text.erase(at, below(8));
        break;
      case 2:
        if (!text.empty()) {
          text[below(text.size())] ^= static_cast<char>(1u << below(8));
        }
        break;
      case 3:
        text.resize(at);
        break;
      default: {
        const std::string& other = pick();
        text.insert(at, other.substr(below(other.size()), below(40)));
      }
    }
  }

  const std::vector<std::string>& inputs_;
  std::mt19937_64 random_{20240229};
};

void replay(Target target, const std::string& folder) {
  const auto inputs = corpus(folder);
  ASSERT_GE(inputs.size(), 10u);
  for (const auto& input : inputs) {
    feed(target, input);
  }
  Mutator mutator(inputs);
  for (int i = 0; i < 5000; ++i) {
    feed(target, mutator.next());
  }
}

TEST(FuzzReplay, Header) { replay(fsdp::fuzz::header, "header"); }
TEST(FuzzReplay, Index) { replay(fsdp::fuzz::index, "index"); }

}  // namespace
