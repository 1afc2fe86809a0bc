#include <map>
#include <memory>
#include <set>
#include <unordered_map>

#include <ATen/Functions.h>
#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>
#include <fsdp/checkpoint.h>
#include <fsdp/error.h>

#include "checkpoint/collect.h"
#include "checkpoint/crc32.h"
#include "checkpoint/folder.h"
#include "checkpoint/match.h"
#include "checkpoint/new_state.h"
#include "checkpoint/ranks.h"
#include "checkpoint/safetensors.h"
#include "tensor/sharded_tensor.h"

namespace fsdp::checkpoint {
namespace {

constexpr uint64_t kIndexLimit = uint64_t{1} << 30;
constexpr size_t kChunk = size_t{4} << 20;

/// A file of the checkpoint, opened and found to be the one that the index tells of.
class RankFile {
 public:
  RankFile(const std::string& folder, const Index& index, int64_t rank)
      : file_(File::open(folder + "/" + rank_file(rank, index.world_size()))) {
    const IndexFile& expected = index.files[static_cast<size_t>(rank)];
    if (file_.size() != expected.size) {
      throw CheckpointError("'" + file_.path() + "' has " + std::to_string(file_.size()) + " bytes, expected " +
                            std::to_string(expected.size) +
                            (file_.size() < expected.size ? ": it was cut off" : "; it is of another checkpoint"));
    }
    header_ = read_header(file_);
    if (header_.crc32 != expected.header_crc32) {
      throw CheckpointError(c10::str("the header of '", file_.path(), "' is damaged: its checksum is ", header_.crc32,
                                     ", expected ", expected.header_crc32));
    }
    for (const auto& entry : header_.tensors) {
      entries_.emplace(entry.name, &entry);
    }
  }
  RankFile(const RankFile&) = delete;

  const File& file() const { return file_; }

  /// Where a piece's bytes begin in the file.
  uint64_t begin_of(const std::string& name, const IndexTensor& tensor, const Piece& piece) const {
    auto shape = tensor.shape;
    if (!shape.empty()) {
      shape[0] = piece.end - piece.begin;
    }
    const auto it = entries_.find(name);
    if (it == entries_.end() || it->second->dtype != tensor.dtype || it->second->shape != shape) {
      throw CheckpointError("'" + file_.path() + "' has " +
                            (it == entries_.end() ? "no" : describe(it->second->dtype, it->second->shape) + " as") +
                            " tensor '" + printable(name) + "'; the index expects " + describe(tensor.dtype, shape));
    }
    return header_.data_begin + it->second->begin;
  }

 private:
  File file_;
  Header header_;
  std::unordered_map<std::string, const TensorEntry*> entries_;
};

void check_data(const RankFile& file, const std::string& name, const Piece& piece, uint64_t begin, uint64_t bytes) {
  std::string chunk(std::min<uint64_t>(bytes, kChunk), '\0');
  uint32_t crc = 0;
  for (uint64_t done = 0; done < bytes;) {
    const size_t count = std::min<uint64_t>(chunk.size(), bytes - done);
    file.file().read_at(begin + done, chunk.data(), count);
    crc = crc32(chunk.data(), count, crc);
    done += count;
  }
  if (crc != piece.crc32) {
    throw CheckpointError(c10::str("the data of '", printable(name), "' in '", file.file().path(),
                                   "' is damaged: its checksum is ", crc, ", expected ", piece.crc32));
  }
}

void read_into(const HeldTensor& target, const RankFile& file, uint64_t begin, const Read& read) {
  auto shape = target.spec.shape;
  const int64_t count = read.end - read.begin;
  if (!shape.empty()) {
    shape[0] = count;
  }
  const auto type = target.local.scalar_type();
  // Bytes of a file may be anything, and a bool is 0 or 1.
  auto rows = at::empty(shape, type == at::kBool ? at::kByte : type);
  file.file().read_at(begin + read.from, rows.mutable_data_ptr(), read.bytes);
  if (type == at::kBool) {
    rows = rows.ne(0);
  }
  // copy_, not a read in place: it tells whoever watches the tensor's version, and reaches any device and layout.
  if (target.dim == tensor::kElements) {
    const int64_t row = rows.numel() / count, first = read.begin * row;
    const int64_t begin = std::max(first, target.cut.begin), end = std::min(read.end * row, target.cut.end);
    target.local.narrow(0, begin - target.cut.begin, end - begin)
        .copy_(rows.view({-1}).narrow(0, begin - first, end - begin));
  } else if (shape.empty()) {
    target.local.copy_(rows.view(target.local.sizes()));
  } else if (target.dim == 0) {
    target.local.narrow(0, read.begin - target.spec.begin, count).copy_(rows);
  } else {
    target.local.narrow(0, read.begin, count).copy_(rows.narrow(target.dim, target.cut.begin, target.cut.size()));
  }
}

/// The rows that have something for this rank.
tensor::RowRange rows_for(const HeldTensor& target) {
  const auto& spec = target.spec;
  if (target.dim == 0) return {spec.begin, spec.end};
  const int64_t rows = spec.shape.empty() ? 1 : spec.shape[0];
  if (target.dim != tensor::kElements) return {0, rows};  // cut along another dim: all
  const int64_t row = rows == 0 ? 0 : target.tensor.numel() / rows;
  if (row == 0 || target.cut.size() == 0) return {0, 0};
  return {target.cut.begin / row, (target.cut.end + row - 1) / row};
}

/// What this rank reads, by file, and whose checksums it compares.
class ReadPlan {
 public:
  ReadPlan(std::string folder, const Index& index, const std::vector<HeldTensor>& targets, int rank, int size)
      : folder_(std::move(folder)), index_(index), targets_(targets) {
    for (size_t i = 0; i < targets.size(); ++i) {
      const auto rows = rows_for(targets[i]);
      for (const auto& read : plan_reads(*find_tensor(index, targets[i].spec.name), rows.begin, rows.end)) {
        by_file_[read.piece.rank].reads.push_back({i, read});
      }
    }
    // A piece has one checksum, and ranks may need only rows of it: they share the pieces of what all of them want.
    int turn = 0;
    for (size_t i = 0; i < targets.size(); ++i) {
      const bool own = targets[i].spec.name.starts_with(kOwnPrefix);
      for (const auto& piece : find_tensor(index, targets[i].spec.name)->pieces) {
        if (own || turn++ % size == rank) by_file_[piece.rank].checked.push_back({i, piece});
      }
    }
    // Files that nobody reads from must be whole too.
    for (int64_t file = rank; file < index.world_size(); file += size) {
      by_file_[file];
    }
  }

  void check(bool verify_data) const {
    each_file([&](const RankFile& file, const OfFile& of_file) {
      for (const auto& [target, read] : of_file.reads) locate(file, target, read.piece);
      if (!verify_data) return;
      for (const auto& [target, piece] : of_file.checked) {
        const auto& [name, begin] = locate(file, target, piece);
        check_data(file, name, piece, begin, index_.tensors.at(name).row_bytes() * (piece.end - piece.begin));
      }
    });
  }

  void run() const {
    each_file([&](const RankFile& file, const OfFile& of_file) {
      for (const auto& [target, read] : of_file.reads) {
        read_into(targets_[target], file, locate(file, target, read.piece).second, read);
      }
    });
  }

 private:
  struct OfFile {  // with indices in targets_
    std::vector<std::pair<size_t, Read>> reads;
    std::vector<std::pair<size_t, Piece>> checked;
  };

  // One file is open at a time: a checkpoint of many ranks has more of them than a process may open.
  template <class Fn>
  void each_file(Fn fn) const {
    for (const auto& [rank, of_file] : by_file_) {
      fn(RankFile(folder_, index_, rank), of_file);
    }
  }

  std::pair<std::string, uint64_t> locate(const RankFile& file, size_t target, const Piece& piece) const {
    const auto& name = stored_name(index_, targets_[target].spec.name);
    return {name, file.begin_of(name, index_.tensors.at(name), piece)};
  }

  std::string folder_;
  const Index& index_;
  const std::vector<HeldTensor>& targets_;
  std::map<int64_t, OfFile> by_file_;
};

// This rank's generator, if the checkpoint has it: appended to `targets`, to be set when it is read.
at::Tensor prepare_generator(const Index& index, int rank, std::vector<HeldTensor>& targets) {
  const auto name = generator_name(rank);
  if (!index.tensors.count(name)) {
    return {};
  }
  auto state = at::empty_like(generator_state());
  auto held = hold(name, state);
  const auto& saved = index.tensors.at(name);
  if (saved.dtype != held.spec.dtype || saved.shape != held.spec.shape) {
    throw CheckpointError("'" + name + "' is " + describe(saved.dtype, saved.shape) + ", expected " +
                          describe(held.spec.dtype, held.spec.shape) +
                          "; another torch saved it: load with {.rng = false}");
  }
  targets.push_back(std::move(held));
  return state;
}

}  // namespace

LoadInfo load(const torch::nn::Module& model, torch::optim::Optimizer* optimizer, const std::string& path,
              const LoadOptions& options) {
  const at::NoGradGuard no_grad;
  const Ranks ranks("load from '" + path + "'");
  std::string folder, text;
  Index index;
  ranks.together([&] {
    folder = find(path);
    text = read_text(folder + "/" + kIndexFile, kIndexLimit);
    index = parse_index(text, folder + "/" + kIndexFile);
  });
  const auto crcs = ranks.gather(std::to_string(crc32(text.data(), text.size())));

  std::vector<HeldTensor> targets;
  NewStates states;
  at::Tensor generator;
  std::unique_ptr<ReadPlan> plan;
  ranks.together([&] {
    if (std::set<std::string>(crcs.begin(), crcs.end()).size() > 1) {
      throw CheckpointError("the ranks see different checkpoints at '" + folder + "'");
    }
    const auto tensors = collect_model(model);
    check_match(index, kModelPrefix, specs_of(tensors.held), tensors.aliases, "model");
    targets = tensors.held;
    if (optimizer) {
      check_optimizer(*optimizer, index, tensors);
      states = prepare_states(*optimizer, index, tensors, targets);
    }
    if (options.rng) {
      generator = prepare_generator(index, ranks.rank(), targets);
    }
    plan = std::make_unique<ReadPlan>(folder, index, targets, ranks.rank(), ranks.size());
    plan->check(options.verify_data);
  });

  // From here on values change.
  ranks.together([&] {
    try {
      plan->run();
    } catch (const std::exception& error) {
      throw CheckpointError(std::string(error.what()) + "; the model holds a part of the checkpoint now");
    }
    if (optimizer) {
      set_optimizer(*optimizer, index, std::move(states));
    }
    if (generator.defined()) {
      set_generator_state(generator);
    }
  });
  return {index.step, index.metadata, index.world_size()};
}

}  // namespace fsdp::checkpoint
