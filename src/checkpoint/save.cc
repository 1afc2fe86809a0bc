#include <filesystem>
#include <memory>
#include <unordered_map>

#include <c10/core/GradMode.h>
#include <c10/util/StringUtil.h>
#include <fsdp/checkpoint.h>
#include <fsdp/dtensor.h>
#include <fsdp/error.h>
#include <nlohmann/json.hpp>

#include "checkpoint/collect.h"
#include "checkpoint/crc32.h"
#include "checkpoint/folder.h"
#include "checkpoint/ranks.h"
#include "checkpoint/safetensors.h"

namespace fsdp::checkpoint {
namespace {

using Plan = std::map<std::string, IndexTensor>;

/// What a rank tells about the file that it wrote.
struct Written {
  IndexFile file;
  std::map<std::string, uint32_t> crc32s;  // by tensor

  std::string encode() const { return nlohmann::json{file.size, file.header_crc32, crc32s}.dump(); }
  static Written decode(const std::string& text) {
    const auto json = nlohmann::json::parse(text);
    return {{json[0], json[1]}, json[2]};
  }
};

Plan plan_from(const std::vector<std::string>& texts) {
  std::vector<std::vector<LocalTensor>> by_rank;
  for (const auto& text : texts) {
    by_rank.push_back(decode(text));
  }
  return plan_pieces(by_rank);
}

// The rows of `tensor` that `rank` writes, as a file's tensor.
std::vector<TensorSpec> pieces_of(const std::vector<HeldTensor>& held, const Plan& plan, int rank) {
  std::vector<TensorSpec> specs;
  for (const auto& tensor : held) {
    for (const auto& piece : plan.at(tensor.spec.name).pieces) {
      if (piece.rank == rank) {
        auto shape = tensor.spec.shape;
        if (!shape.empty()) {
          shape[0] = piece.end - piece.begin;
        }
        specs.push_back({tensor.spec.name, tensor.spec.dtype, std::move(shape)});
      }
    }
  }
  return specs;
}

Written write_file(const std::string& path, const std::vector<HeldTensor>& held, const Plan& plan, int rank) {
  std::unordered_map<std::string, at::Tensor> by_name;
  for (const auto& tensor : held) {
    by_name.emplace(tensor.spec.name, tensor.local);
  }
  const Layout layout = lay_out(pieces_of(held, plan, rank), {{"format", "pt"}});
  File file = File::create(path);
  file.append(layout.bytes.data(), layout.bytes.size());
  Written written;
  for (const auto& entry : layout.header.tensors) {
    const auto bytes = by_name.at(entry.name).detach().resolve_conj().resolve_neg().cpu().contiguous();
    if (bytes.nbytes() != entry.end - entry.begin) {
      throw InvariantError("'" + entry.name + "': this rank's rows have " + std::to_string(bytes.nbytes()) +
                           " bytes, expected " + std::to_string(entry.end - entry.begin));
    }
    file.append(bytes.const_data_ptr(), bytes.nbytes());
    written.crc32s[entry.name] = crc32(bytes.const_data_ptr(), bytes.nbytes());
  }
  file.finish();
  written.file = {file.size(), layout.header.crc32};
  return written;
}

// Rank 0's last look before it publishes: all files are where it can see them.
void check_visible(const std::string& folder, const std::vector<IndexFile>& files) {
  for (size_t rank = 0; rank < files.size(); ++rank) {
    const auto name = rank_file(static_cast<int64_t>(rank), static_cast<int64_t>(files.size()));
    std::error_code error;
    const auto size = std::filesystem::file_size(std::filesystem::path(folder) / name, error);
    if (error || size != files[rank].size) {
      throw CheckpointError("rank 0 does not see the " + std::to_string(files[rank].size) + " bytes that rank " +
                            std::to_string(rank) + " wrote to '" + folder + "/" + name +
                            "'; save to a file system that all hosts share");
    }
  }
}

// A file has one tensor a name: ranks that hold others under the same name would silently lose theirs.
void check_world(const std::vector<HeldTensor>& held, int world) {
  for (const auto& each : held) {
    const auto ranks = tensor::is_sharded(each.tensor) ? dtensor(each.tensor).device_mesh().size() : world;
    if (ranks == world) continue;
    throw NotSupported("'" + each.spec.name + "' lies over " + std::to_string(ranks) + " of the world's " +
                       std::to_string(world) +
                       " ranks, and the others may have values of their own (a mesh of its own, tensor parallelism); "
                       "save the ranks' full_state_dict() under names of their own instead");
  }
}

void add_files(Index& index, const std::vector<std::string>& texts) {
  std::vector<Written> written;
  for (const auto& text : texts) {
    written.push_back(Written::decode(text));
    index.files.push_back(written.back().file);
  }
  for (auto& [name, tensor] : index.tensors) {
    for (auto& piece : tensor.pieces) {
      piece.crc32 = written[static_cast<size_t>(piece.rank)].crc32s.at(name);
    }
  }
}

}  // namespace

void save(const torch::nn::Module& model, const torch::optim::Optimizer* optimizer, const std::string& path,
          const SaveOptions& options) {
  const at::NoGradGuard no_grad;
  const Ranks ranks("save to '" + path + "'");
  Index index;
  std::vector<HeldTensor> held;
  ranks.together([&] {
    if (options.step < 0) {
      throw InvalidArgument(c10::str("the step is ", options.step, "; expected at least 0"));
    }
    auto tensors = collect_model(model);
    index.step = options.step;
    index.metadata = options.metadata;
    index.aliases = tensors.aliases;
    held = tensors.held;
    if (optimizer) {
      index.optimizer = collect_optimizer(*optimizer, tensors, held);
    }
    check_world(held, ranks.size());
    if (options.rng) {
      held.push_back(hold(generator_name(ranks.rank()), generator_state()));
    }
  });
  const auto all_specs = ranks.gather(encode(specs_of(held)));
  gather_rows(held);

  std::unique_ptr<Staging> staging;  // rank 0's
  ranks.together([&] {
    index.tensors = plan_from(all_specs);
    if (ranks.rank() == 0) {
      staging = std::make_unique<Staging>(path);
    }
  });
  const std::string folder = ranks.gather(staging ? staging->folder() : "")[0];

  Written written;
  ranks.together([&] {
    const auto name = rank_file(ranks.rank(), ranks.size());
    written = write_file(folder + "/" + name, held, index.tensors, ranks.rank());
  });
  const auto all_written = ranks.gather(written.encode());

  ranks.together([&] {
    if (staging) {
      add_files(index, all_written);
      check_visible(folder, index.files);
      staging->publish(write_index(index));
    }
  });
}

}  // namespace fsdp::checkpoint
