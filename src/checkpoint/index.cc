#include "checkpoint/index.h"

#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>

#include <nlohmann/json.hpp>

#include <fsdp/error.h>

#include "checkpoint/crc32.h"
#include "checkpoint/safetensors.h"

namespace fsdp::checkpoint {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kFormatName = "libfsdp.checkpoint";
// The file begins with this, eight hexadecimal digits and '",': the CRC-32 of all that follows.
constexpr std::string_view kChecksumKey = "{\"crc32\":\"";
constexpr std::string_view kChecksumEnd = "\",";
constexpr size_t kChecksumDigits = 8;
constexpr size_t kBodyBegin = kChecksumKey.size() + kChecksumDigits + kChecksumEnd.size();
constexpr int kMaxDepth = 16;
constexpr int64_t kMaxRanks = 1'000'000;

std::string hex(uint32_t value) {
  char digits[kChecksumDigits + 1];
  std::snprintf(digits, sizeof digits, "%08x", value);
  return digits;
}

Json write_option(const OptionValue& value) {
  return std::visit([](const auto& v) { return Json(v); }, value);
}

bool finite(const OptionValue& value) {
  if (const auto* number = std::get_if<double>(&value)) {
    return std::isfinite(*number);
  }
  if (const auto* pair = std::get_if<std::pair<double, double>>(&value)) {
    return std::isfinite(pair->first) && std::isfinite(pair->second);
  }
  return true;
}

Json write_optimizer(const OptimizerIndex& optimizer) {
  Json groups = Json::array();
  for (const auto& group : optimizer.groups) {
    Json options = Json::object();
    for (const auto& [name, value] : group.options) {
      if (!finite(value)) {
        throw CheckpointError("the optimizer's option '" + name + "' is not a finite number; it cannot be saved");
      }
      options[name] = write_option(value);
    }
    groups.push_back({{"params", group.params}, {"options", options}});
  }
  return {{"type", optimizer.type}, {"groups", groups}, {"counters", optimizer.counters}};
}

/// Reads values out of the JSON tree; each failure names the place.
class Reader {
 public:
  explicit Reader(const std::string& file) : file_(file) {}

  [[noreturn]] void fail(const std::string& place, const std::string& what) const {
    throw CheckpointError("'" + file_ + "', " + printable(place) + ": " + what +
                          "; the index is damaged or was not written by libfsdp");
  }

  const Json& member(const Json& object, const char* key, const std::string& place) const {
    const auto it = object.is_object() ? object.find(key) : object.end();
    if (!object.is_object() || it == object.end()) {
      fail(place, std::string("'") + key + "' is missing");
    }
    return *it;
  }

  const Json& list(const Json& json, const std::string& place) const {
    if (!json.is_array()) {
      fail(place, "expected a list");
    }
    return json;
  }

  const Json& object(const Json& json, const std::string& place) const {
    if (!json.is_object()) {
      fail(place, "expected an object");
    }
    return json;
  }

  std::string string(const Json& json, const std::string& place) const {
    if (!json.is_string()) {
      fail(place, "expected a string");
    }
    return json.get<std::string>();
  }

  int64_t integer(const Json& json, const std::string& place, int64_t least, int64_t most) const {
    const bool fits = json.is_number_unsigned()
                          ? json.get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())
                          : json.is_number_integer();
    if (!fits || json.get<int64_t>() < least || json.get<int64_t>() > most) {
      fail(place, "expected a whole number from " + std::to_string(least) + " to " + std::to_string(most));
    }
    return json.get<int64_t>();
  }

  int64_t count(const Json& json, const std::string& place) const {
    return integer(json, place, 0, std::numeric_limits<int64_t>::max());
  }

  double number(const Json& json, const std::string& place) const {
    if (!json.is_number()) {
      fail(place, "expected a number");
    }
    return json.get<double>();
  }

  uint32_t checksum(const Json& json, const std::string& place) const {
    const std::string digits = string(json, place);
    uint32_t value = 0;
    const auto end = digits.data() + digits.size();
    const auto parsed = std::from_chars(digits.data(), end, value, 16);
    if (digits.size() != kChecksumDigits || parsed.ec != std::errc() || parsed.ptr != end) {
      fail(place, "expected eight hexadecimal digits");
    }
    return value;
  }

  std::map<std::string, std::string> strings(const Json& json, const std::string& place) const {
    std::map<std::string, std::string> out;
    for (const auto& [key, value] : object(json, place).items()) {
      out[key] = string(value, place);
    }
    return out;
  }

  std::vector<IndexFile> files(const Json& json) const {
    std::vector<IndexFile> out;
    const auto world = static_cast<int64_t>(list(json, "files").size());
    if (world < 1 || world > kMaxRanks) {
      fail("files", "expected one a rank");
    }
    for (const auto& item : json) {
      const std::string place = rank_file(static_cast<int64_t>(out.size()), world);
      if (string(member(item, "name", place), place) != place) {
        fail("files", "expected the name '" + place + "'");
      }
      out.push_back({static_cast<uint64_t>(count(member(item, "size", place), place)),
                     checksum(member(item, "header_crc32", place), place)});
    }
    return out;
  }

  IndexTensor tensor(const Json& json, const std::string& name, int64_t world) const {
    IndexTensor out;
    const std::string dtype = string(member(json, "dtype", name), name);
    const auto known = dtype_from_name(dtype);
    if (!known) {
      fail(name, "unknown dtype '" + printable(dtype) + "'");
    }
    out.dtype = *known;
    for (const auto& size : list(member(json, "shape", name), name)) {
      out.shape.push_back(count(size, name));
    }
    uint64_t bytes = 0;
    if (out.shape.size() > kMaxDims || !byte_size(out.dtype, out.shape, bytes)) {
      fail(name, "64 bits cannot count its bytes");
    }
    int64_t covered = 0;
    for (const auto& item : list(member(json, "pieces", name), name)) {
      const Json& rows = list(member(item, "rows", name), name);
      if (rows.size() != 2) {
        fail(name, "expected the first row and the one behind the last");
      }
      Piece piece;
      piece.rank = integer(member(item, "rank", name), name, 0, world - 1);
      piece.begin = count(rows[0], name);
      piece.end = integer(rows[1], name, 1, out.rows());
      piece.crc32 = checksum(member(item, "crc32", name), name);
      if (piece.begin != covered || piece.end <= piece.begin) {
        fail(name, "a piece begins at row " + std::to_string(piece.begin) + "; expected " + std::to_string(covered));
      }
      covered = piece.end;
      out.pieces.push_back(piece);
    }
    if (covered != (bytes == 0 ? 0 : out.rows())) {
      fail(name, "the pieces end at row " + std::to_string(covered) + " of " + std::to_string(out.rows()));
    }
    return out;
  }

  OptionValue option(const Json& json, const std::string& place) const {
    if (json.is_boolean()) {
      return json.get<bool>();
    }
    if (json.is_array() && json.size() == 2) {
      return std::make_pair(number(json[0], place), number(json[1], place));
    }
    return number(json, place);
  }

  OptimizerIndex optimizer(const Json& json) const {
    const std::string place = "optimizer";
    OptimizerIndex out;
    out.type = string(member(json, "type", place), place);
    for (const auto& item : list(member(json, "groups", place), place)) {
      OptimizerIndex::Group group;
      for (const auto& param : list(member(item, "params", place), place)) {
        group.params.push_back(string(param, place));
      }
      for (const auto& [name, value] : object(member(item, "options", place), place).items()) {
        group.options[name] = option(value, place + " option '" + name + "'");
      }
      out.groups.push_back(std::move(group));
    }
    for (const auto& [fqn, counts] : object(member(json, "counters", place), place).items()) {
      auto& counters = out.counters[fqn];
      for (const auto& [name, value] : object(counts, fqn).items()) {
        counters[name] = count(value, fqn);
      }
    }
    return out;
  }

 private:
  const std::string& file_;
};

// The body of the index once its checksum is known to be right.
std::string_view checked_body(std::string_view text, const std::string& file) {
  if (!text.starts_with(kChecksumKey) || text.size() < kBodyBegin ||
      text.substr(kBodyBegin - kChecksumEnd.size(), kChecksumEnd.size()) != kChecksumEnd) {
    throw CheckpointError("'" + file + "' is no index of a libfsdp checkpoint: it does not begin with " +
                          std::string(kChecksumKey) + "...");
  }
  const auto body = text.substr(kBodyBegin);
  const auto expected = text.substr(kChecksumKey.size(), kChecksumDigits);
  const auto got = hex(crc32(body.data(), body.size()));
  if (expected != got) {
    throw CheckpointError("'" + file + "' is damaged: its checksum is " + got + ", expected " + printable(expected) +
                          "; load another checkpoint");
  }
  return body;
}

Json parse_body(std::string_view body, const std::string& file) {
  const auto limit = [&](int depth, Json::parse_event_t, Json&) {
    if (depth > kMaxDepth) {
      throw CheckpointError("'" + file + "' is nested too deeply to be an index");
    }
    return true;
  };
  try {
    return Json::parse("{" + std::string(body), limit);
  } catch (const Json::exception& error) {
    throw CheckpointError("'" + file + "' is not JSON: " + error.what());
  }
}

}  // namespace

uint64_t IndexTensor::row_bytes() const {
  uint64_t bytes = 0;
  byte_size(dtype, shape, bytes);
  return rows() == 0 ? 0 : bytes / static_cast<uint64_t>(rows());
}

std::string rank_file(int64_t rank, int64_t world_size) {
  char name[80];
  std::snprintf(name, sizeof name, "rank-%05lld-of-%05lld.safetensors", static_cast<long long>(rank),
                static_cast<long long>(world_size));
  return name;
}

std::string seal(std::string_view body) {
  std::string text(kChecksumKey);
  return text.append(hex(crc32(body.data(), body.size()))).append(kChecksumEnd).append(body);
}

std::string write_index(const Index& index) {
  Json json = {{"format", kFormatName}, {"version", kFormatVersion},  {"world_size", index.world_size()},
               {"step", index.step},    {"metadata", index.metadata}, {"aliases", index.aliases}};
  Json& files = json["files"] = Json::array();
  for (const auto& file : index.files) {
    files.push_back({{"name", rank_file(static_cast<int64_t>(files.size()), index.world_size())},
                     {"size", file.size},
                     {"header_crc32", hex(file.header_crc32)}});
  }
  Json& tensors = json["tensors"] = Json::object();
  for (const auto& [name, tensor] : index.tensors) {
    Json pieces = Json::array();
    for (const auto& piece : tensor.pieces) {
      pieces.push_back({{"rank", piece.rank}, {"rows", {piece.begin, piece.end}}, {"crc32", hex(piece.crc32)}});
    }
    tensors[name] = {{"dtype", dtype_name(tensor.dtype)}, {"shape", tensor.shape}, {"pieces", std::move(pieces)}};
  }
  if (index.optimizer) {
    json["optimizer"] = write_optimizer(*index.optimizer);
  }
  std::string body;
  try {
    body = json.dump(1).substr(1) + "\n";
  } catch (const Json::exception&) {
    throw CheckpointError("a name or a metadata value is not UTF-8; it cannot be saved");
  }
  return seal(body);
}

Index parse_index(std::string_view text, const std::string& file) {
  const Json json = parse_body(checked_body(text, file), file);
  const Reader read(file);
  if (read.string(read.member(json, "format", "index"), "format") != kFormatName) {
    read.fail("format", "expected '" + std::string(kFormatName) + "'");
  }
  const int64_t version = read.count(read.member(json, "version", "index"), "version");
  if (version != kFormatVersion) {
    throw CheckpointError("'" + file + "' has format version " + std::to_string(version) + "; this libfsdp reads " +
                          std::to_string(kFormatVersion) + ": use a newer libfsdp");
  }
  Index index;
  index.step = read.count(read.member(json, "step", "index"), "step");
  index.metadata = read.strings(read.member(json, "metadata", "index"), "metadata");
  index.aliases = read.strings(read.member(json, "aliases", "index"), "aliases");
  index.files = read.files(read.member(json, "files", "index"));
  read.integer(read.member(json, "world_size", "index"), "world_size", index.world_size(), index.world_size());
  for (const auto& [name, value] : read.object(read.member(json, "tensors", "index"), "tensors").items()) {
    index.tensors.emplace(name, read.tensor(value, name, index.world_size()));
  }
  for (const auto& [alias, name] : index.aliases) {
    if (index.tensors.count(alias) || !index.tensors.count(name)) {
      read.fail("aliases", "'" + alias + "' names no tensor of its own");
    }
  }
  if (json.contains("optimizer")) {
    index.optimizer = read.optimizer(json["optimizer"]);
  }
  return index;
}

}  // namespace fsdp::checkpoint
