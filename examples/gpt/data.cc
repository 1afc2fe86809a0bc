#include "data.h"

#include <algorithm>
#include <fstream>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace gpt {
namespace fs = std::filesystem;
namespace {

/// One of kBlocks / kEvery of the text, in pieces from all over it, is kept for validation.
constexpr int64_t kBlocks = 200;
constexpr int64_t kEvery = 20;

bool skipped(const fs::path& name) {
  static const std::set<std::string> kFolders{"__pycache__", "site-packages", "dist-packages", "node_modules"};
  return name.string().starts_with('.') || kFolders.contains(name.string());
}

/// Regular files under `folder`, sorted. Links to folders are not followed, so there are no cycles.
std::vector<fs::path> list_files(const fs::path& folder) {
  std::vector<fs::path> files;
  auto it = fs::recursive_directory_iterator(folder, fs::directory_options::skip_permission_denied);
  for (; it != fs::recursive_directory_iterator(); ++it) {
    if (skipped(it->path().filename())) {
      it.disable_recursion_pending();
    } else if (std::error_code ignored; it->is_regular_file(ignored)) {
      files.push_back(it->path());
    }
  }
  std::sort(files.begin(), files.end());
  return files;
}

/// Appends up to `limit` bytes of the file; a file with a zero byte in its first 4096 bytes is not text.
bool append_file(const fs::path& path, int64_t limit, std::string& text) {
  std::ifstream in(path, std::ios::binary);
  char head[4096];
  in.read(head, static_cast<std::streamsize>(std::min<int64_t>(sizeof(head), limit)));
  const std::string_view start(head, static_cast<size_t>(in.gcount()));
  if (start.empty() || start.find('\0') != std::string_view::npos) return false;
  text += start;
  if (!in) return true;
  const auto rest = std::min<int64_t>(static_cast<int64_t>(fs::file_size(path)), limit) - in.gcount();
  const auto before = text.size();
  text.resize(before + static_cast<size_t>(std::max<int64_t>(rest, 0)));
  in.read(text.data() + before, static_cast<std::streamsize>(text.size() - before));
  text.resize(before + static_cast<size_t>(in.gcount()));
  return true;
}

uint32_t fnv1a(std::string_view text) {
  uint32_t hash = 2166136261u;
  for (unsigned char byte : text) hash = (hash ^ byte) * 16777619u;
  return hash;
}

/// splitmix64's mixing function.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

at::Tensor to_tensor(const std::string& bytes) {
  return torch::tensor(at::ArrayRef<uint8_t>(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()));
}

}  // namespace

Rows slice(Rows rows, int64_t rank, int64_t ranks) {
  return {rows.begin + rows.size() * rank / ranks, rows.begin + rows.size() * (rank + 1) / ranks};
}

Corpus::Corpus(const fs::path& path, int64_t context, int64_t max_bytes) : context_(context) {
  if (!fs::exists(path)) throw std::runtime_error("data: " + path.string() + " does not exist");
  const auto files = fs::is_directory(path) ? list_files(path) : std::vector<fs::path>{path};
  std::string text;
  for (const auto& file : files) {
    const auto room = max_bytes - static_cast<int64_t>(text.size());
    if (room <= 0) break;
    files_ += append_file(file, room, text);
  }
  const auto total = static_cast<int64_t>(text.size());
  const auto block = std::max(total / kBlocks, context + 1);
  if (total < kEvery * block) {
    throw std::runtime_error("data: " + path.string() + " has " + std::to_string(total) +
                             " bytes of text; a context of " + std::to_string(context) + " needs at least " +
                             std::to_string(kEvery * block) + ": give more text or a smaller --context");
  }
  fingerprint_ = fnv1a(text);

  std::string train, validation;
  for (int64_t i = 0; i * block < total; ++i) {
    (i % kEvery == kEvery - 1 ? validation : train)
        .append(text, static_cast<size_t>(i * block), static_cast<size_t>(block));
  }
  train_ = to_tensor(train);
  validation_ = to_tensor(validation);
}

template <class Offset>
Batch Corpus::windows(const at::Tensor& bytes, Rows rows, const Offset& offset) const {
  auto x = torch::empty({rows.size(), context_}, torch::kLong);
  auto y = torch::empty_like(x);
  const auto* from = bytes.const_data_ptr<uint8_t>();
  auto *x_out = x.mutable_data_ptr<int64_t>(), *y_out = y.mutable_data_ptr<int64_t>();
  const auto last_start = static_cast<uint64_t>(bytes.numel() - context_ - 1);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const auto* window = from + offset(row, last_start);
    x_out = std::copy(window, window + context_, x_out);
    y_out = std::copy(window + 1, window + context_ + 1, y_out);
  }
  return {x, y};
}

Batch Corpus::train_rows(uint64_t seed, int64_t step, Rows rows) const {
  const auto key = mix(mix(seed) ^ static_cast<uint64_t>(step));
  return windows(train_, rows, [&](int64_t row, uint64_t last_start) {
    return mix(key ^ static_cast<uint64_t>(row)) % (last_start + 1);
  });
}

Batch Corpus::validation_rows(int64_t count, Rows rows) const {
  return windows(validation_, rows, [&](int64_t row, uint64_t last_start) {
    return last_start * static_cast<uint64_t>(row) / static_cast<uint64_t>(std::max<int64_t>(count - 1, 1));
  });
}

}  // namespace gpt
