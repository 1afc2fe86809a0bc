#include "checkpoint/safetensors.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <tuple>
#include <utility>

#include <nlohmann/json.hpp>

#include "checkpoint/crc32.h"

namespace fsdp::checkpoint {
namespace {

using Json = nlohmann::json;

constexpr std::string_view kMetadataKey = "__metadata__";

/// Takes the JSON events of a header one by one, so that a hostile text costs no more memory than its own length:
/// whatever does not belong at its place ends the parse at once.
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderReader(const std::string& file) : file_(file) {}

  Header header;

  bool null() override { return unexpected("null"); }
  bool boolean(bool) override { return unexpected("a boolean"); }
  bool number_float(number_float_t, const string_t& text) override {
    if (in_list()) {
      fail(list_failure(), "expected whole numbers in 64 bits, got " + printable(text));
    }
    return unexpected("a number");
  }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool number_integer(number_integer_t value) override {
    if (in_list() && value < 0) {
      fail(list_failure(), "expected numbers of at least 0, got " + std::to_string(value));
    }
    return number_unsigned(static_cast<number_unsigned_t>(value));
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ == Place::kShape) {
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        fail(Failure::kBadShape, "a size of " + std::to_string(value) + " is too large");
      }
      if (entry_.shape.size() == kMaxDims) {
        fail(Failure::kBadShape, "more than " + std::to_string(kMaxDims) + " dims");
      }
      entry_.shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (place_ == Place::kOffsets) {
      if (offsets_seen_ == 2) {
        fail(Failure::kBadOffsets, "expected two offsets, got more");
      }
      (offsets_seen_++ == 0 ? entry_.begin : entry_.end) = value;
      return true;
    }
    return unexpected("a number");
  }

  bool string(string_t& value) override {
    if (place_ == Place::kMetadata) {
      if (!header.metadata.emplace(key_, value).second) {
        fail(Failure::kDuplicateName, "metadata key '" + printable(key_) + "' is there twice");
      }
      return true;
    }
    if (place_ == Place::kTensor && field_ == Field::kDType) {
      const auto dtype = dtype_from_name(value);
      if (!dtype) {
        fail(Failure::kUnknownDType, "unknown dtype '" + printable(value) + "'");
      }
      entry_.dtype = *dtype;
      return true;
    }
    return unexpected("a string");
  }

  bool start_object(size_t) override {
    if (place_ == Place::kStart) {
      place_ = Place::kTop;
      return true;
    }
    if (place_ != Place::kTop) {
      return unexpected("an object");
    }
    if (entry_.name == kMetadataKey) {
      if (std::exchange(metadata_seen_, true)) {
        fail(Failure::kDuplicateName, "'__metadata__' is there twice");
      }
      place_ = Place::kMetadata;
    } else {
      place_ = Place::kTensor;
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor) {
      if (fields_seen_ != kAllFields) {
        fail(Failure::kMissingField, "expected dtype, shape and data_offsets");
      }
      header.tensors.push_back(std::exchange(entry_, {}));
      fields_seen_ = 0;
      offsets_seen_ = 0;
    }
    entry_.name.clear();
    place_ = place_ == Place::kTop ? Place::kEnd : Place::kTop;
    return true;
  }

  bool key(string_t& value) override {
    if (place_ == Place::kTop) {
      entry_.name = std::move(value);
    } else if (place_ == Place::kMetadata) {
      key_ = std::move(value);
    } else {
      start_field(value);
    }
    return true;
  }

  bool start_array(size_t) override {
    if (place_ == Place::kTensor && field_ == Field::kShape) {
      place_ = Place::kShape;
    } else if (place_ == Place::kTensor && field_ == Field::kOffsets) {
      place_ = Place::kOffsets;
    } else {
      return unexpected("a list");
    }
    return true;
  }

  bool end_array() override {
    if (place_ == Place::kOffsets && offsets_seen_ != 2) {
      fail(Failure::kBadOffsets, "expected two offsets, got " + std::to_string(offsets_seen_));
    }
    place_ = Place::kTensor;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    fail(Failure::kNotJson, "the header is no JSON text at byte " + std::to_string(position));
  }

 private:
  enum class Place { kStart, kTop, kMetadata, kTensor, kShape, kOffsets, kEnd };
  enum class Field { kNone, kDType = 1, kShape = 2, kOffsets = 4 };
  static constexpr int kAllFields = 7;

  [[noreturn]] void fail(Failure failure, const std::string& what) const {
    throw FormatError(failure, file_, entry_.name, what);
  }

  bool unexpected(const std::string& got) const {
    if (in_list()) {
      fail(list_failure(), "expected numbers, got " + got);
    }
    const char* expected = place_ == Place::kStart      ? "an object of tensors"
                           : place_ == Place::kTop      ? "an object for each tensor"
                           : place_ == Place::kMetadata ? "strings in '__metadata__'"
                                                        : "a dtype name and two lists in a tensor";
    fail(Failure::kBadStructure, std::string("expected ") + expected + ", got " + got);
  }

  bool in_list() const { return place_ == Place::kShape || place_ == Place::kOffsets; }
  Failure list_failure() const { return place_ == Place::kShape ? Failure::kBadShape : Failure::kBadOffsets; }

  void start_field(const std::string& name) {
    field_ = name == "dtype"          ? Field::kDType
             : name == "shape"        ? Field::kShape
             : name == "data_offsets" ? Field::kOffsets
                                      : Field::kNone;
    const int bit = static_cast<int>(field_);
    if (bit == 0) {
      fail(Failure::kUnknownField, "unknown field '" + printable(name) + "'");
    }
    if (fields_seen_ & bit) {
      fail(Failure::kDuplicateName, "field '" + name + "' is there twice");
    }
    fields_seen_ |= bit;
  }

  const std::string& file_;
  Place place_ = Place::kStart;
  Field field_ = Field::kNone;
  TensorEntry entry_;  // the tensor being read; its name is set by its key
  std::string key_;    // of the metadata
  int fields_seen_ = 0;
  int offsets_seen_ = 0;
  bool metadata_seen_ = false;
};

void check_names(const Header& header, const std::string& file) {
  std::vector<std::string_view> names;
  names.reserve(header.tensors.size());
  for (const auto& tensor : header.tensors) {
    names.push_back(tensor.name);
  }
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    throw FormatError(Failure::kDuplicateName, file, std::string(*twice), "the name is there twice");
  }
}

// Every byte belongs to exactly one tensor. Expects the tensors by offset.
void check_coverage(const Header& header, uint64_t data_size, const std::string& file) {
  uint64_t covered = 0;
  for (const auto& tensor : header.tensors) {
    const auto fail = [&](Failure failure, const std::string& what) {
      throw FormatError(failure, file, tensor.name, what);
    };
    if (tensor.end < tensor.begin) {
      fail(Failure::kBadOffsets, "the offsets end before they begin");
    }
    uint64_t bytes = 0;
    if (!byte_size(tensor.dtype, tensor.shape, bytes)) {
      fail(Failure::kBadShape, "64 bits cannot count its bytes");
    }
    if (bytes != tensor.end - tensor.begin) {
      fail(Failure::kSizeMismatch, "shape and dtype need " + std::to_string(bytes) + " bytes, its offsets give " +
                                       std::to_string(tensor.end - tensor.begin));
    }
    if (tensor.end > data_size) {
      fail(Failure::kDataTruncated, "it ends at byte " + std::to_string(tensor.end) + " of the data; the file has " +
                                        std::to_string(data_size) + ": it was cut off");
    }
    if (tensor.begin != covered) {
      fail(tensor.begin < covered ? Failure::kOverlap : Failure::kHole,
           "it begins at byte " + std::to_string(tensor.begin) + "; expected " + std::to_string(covered));
    }
    covered = tensor.end;
  }
  if (covered != data_size) {
    throw FormatError(Failure::kTrailingBytes, file, "",
                      "the tensors have " + std::to_string(covered) + " bytes, the file has " +
                          std::to_string(data_size) + " for them");
  }
}

void sort_by_offset(std::vector<TensorEntry>& tensors) {
  // Empty tensors lie before the one that begins where they do.
  std::sort(tensors.begin(), tensors.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::tie(a.begin, a.end) < std::tie(b.begin, b.end);
  });
}

std::string header_of(uint64_t length) {
  return "a header of " + std::to_string(length) + " bytes; at most " + std::to_string(kHeaderLimit) + " are allowed";
}

std::string store_length(uint64_t length) {
  std::string bytes(kLengthBytes, '\0');
  for (auto& byte : bytes) {
    byte = static_cast<char>(length & 0xFF);
    length >>= 8;
  }
  return bytes;
}

std::string message(const std::string& file, const std::string& tensor, const std::string& what, Failure failure) {
  return "'" + file + "'" + (tensor.empty() ? "" : ", tensor '" + printable(tensor) + "'") + ": " + what + " [" +
         std::string(failure_name(failure)) + "]";
}

}  // namespace

std::string_view failure_name(Failure failure) {
  switch (failure) {
    case Failure::kTooShort:
      return "too short";
    case Failure::kHeaderTooLarge:
      return "header too large";
    case Failure::kHeaderTruncated:
      return "header truncated";
    case Failure::kNotJson:
      return "not JSON";
    case Failure::kBadStructure:
      return "bad structure";
    case Failure::kDuplicateName:
      return "duplicate name";
    case Failure::kMissingField:
      return "missing field";
    case Failure::kUnknownField:
      return "unknown field";
    case Failure::kUnknownDType:
      return "unknown dtype";
    case Failure::kBadShape:
      return "bad shape";
    case Failure::kBadOffsets:
      return "bad offsets";
    case Failure::kSizeMismatch:
      return "size mismatch";
    case Failure::kOverlap:
      return "overlap";
    case Failure::kHole:
      return "hole";
    case Failure::kDataTruncated:
      return "data truncated";
    case Failure::kTrailingBytes:
      return "trailing bytes";
    case Failure::kBadName:
      return "bad name";
  }
  return "unknown";
}

FormatError::FormatError(Failure failure, const std::string& file, const std::string& tensor, const std::string& what)
    : CheckpointError(message(file, tensor, what, failure)), failure(failure), tensor(tensor) {}

std::string printable(std::string_view name) {
  constexpr size_t kLongest = 100;
  std::string text(name.substr(0, kLongest));
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7F; }, '?');
  return name.size() > kLongest ? text + "..." : text;
}

bool byte_size(DType dtype, const std::vector<int64_t>& shape, uint64_t& bytes) {
  // A zero anywhere makes the size zero, but only after the other sizes were seen not to overflow: no reader may
  // trip over them.
  bool empty = false;
  bytes = dtype_size(dtype);
  for (const int64_t size : shape) {
    if (size < 0) {
      return false;
    }
    if (size == 0) {
      empty = true;
    } else if (__builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes) ||
               bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return false;
    }
  }
  if (empty) {
    bytes = 0;
  }
  return true;
}

Header parse_header(std::string_view json, uint64_t data_size, const std::string& file) {
  if (json.empty() || json.front() != '{') {
    throw FormatError(Failure::kNotJson, file, "", "the header does not begin with '{'");
  }
  // The JSON library takes a NUL for the end of the text, and would leave what follows it unread.
  if (json.find('\0') != std::string_view::npos) {
    throw FormatError(Failure::kNotJson, file, "", "the header has a NUL byte");
  }
  HeaderReader reader(file);
  Json::sax_parse(json.begin(), json.end(), &reader);
  Header header = std::move(reader.header);
  check_names(header, file);
  sort_by_offset(header.tensors);
  check_coverage(header, data_size, file);
  header.data_begin = kLengthBytes + json.size();
  return header;
}

uint64_t header_length(const unsigned char* field, uint64_t file_size, const std::string& file) {
  if (file_size < kLengthBytes) {
    throw FormatError(Failure::kTooShort, file, "", "expected at least 8 bytes, got " + std::to_string(file_size));
  }
  uint64_t length = 0;
  for (size_t i = kLengthBytes; i-- > 0;) {
    length = length << 8 | field[i];
  }
  if (length > kHeaderLimit) {
    throw FormatError(Failure::kHeaderTooLarge, file, "", header_of(length));
  }
  if (length > file_size - kLengthBytes) {
    throw FormatError(Failure::kHeaderTruncated, file, "",
                      "a header of " + std::to_string(length) + " bytes, but only " +
                          std::to_string(file_size - kLengthBytes) + " follow: the file was cut off");
  }
  return length;
}

Header read_header(const File& file) {
  unsigned char field[kLengthBytes] = {};
  file.read_at(0, field, std::min<uint64_t>(kLengthBytes, file.size()));
  const uint64_t length = header_length(field, file.size(), file.path());
  std::string json(length, '\0');
  file.read_at(kLengthBytes, json.data(), json.size());
  Header header = parse_header(json, file.size() - kLengthBytes - length, file.path());
  header.crc32 = crc32(json.data(), json.size(), crc32(field, kLengthBytes));
  return header;
}

Layout lay_out(std::vector<TensorSpec> tensors, const std::map<std::string, std::string>& metadata) {
  std::sort(tensors.begin(), tensors.end(), [](const TensorSpec& a, const TensorSpec& b) {
    const uint64_t sizes[] = {dtype_size(a.dtype), dtype_size(b.dtype)};
    return sizes[0] != sizes[1] ? sizes[0] > sizes[1] : a.name < b.name;
  });
  Layout layout;
  Json json = Json::object();
  uint64_t offset = 0;
  for (auto& tensor : tensors) {
    uint64_t bytes = 0;
    if (!byte_size(tensor.dtype, tensor.shape, bytes) || __builtin_add_overflow(offset, bytes, &bytes)) {
      throw FormatError(Failure::kBadShape, "header", tensor.name, "64 bits cannot count its bytes");
    }
    if (tensor.name == kMetadataKey || json.contains(tensor.name)) {
      throw FormatError(tensor.name == kMetadataKey ? Failure::kBadName : Failure::kDuplicateName, "header",
                        tensor.name, "a tensor cannot have this name");
    }
    json[tensor.name] = {
        {"dtype", dtype_name(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {offset, bytes}}};
    TensorEntry entry;
    static_cast<TensorSpec&>(entry) = std::move(tensor);
    entry.begin = std::exchange(offset, bytes);
    entry.end = bytes;
    layout.header.tensors.push_back(std::move(entry));
  }
  if (!metadata.empty()) {
    json[std::string(kMetadataKey)] = metadata;
  }
  std::string text;
  try {
    text = json.dump();
  } catch (const Json::exception&) {
    throw FormatError(Failure::kBadName, "header", "", "a name or a metadata value is not UTF-8");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');  // data begins at a multiple of 8
  if (text.size() > kHeaderLimit) {
    throw FormatError(Failure::kHeaderTooLarge, "header", "", header_of(text.size()));
  }
  layout.bytes = store_length(text.size()) + text;
  layout.header.metadata = metadata;
  layout.header.data_begin = layout.bytes.size();
  layout.header.crc32 = crc32(layout.bytes.data(), layout.bytes.size());
  return layout;
}

}  // namespace fsdp::checkpoint
