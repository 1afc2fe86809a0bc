#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include <fsdp/error.h>

#include "checkpoint/dtype.h"
#include "checkpoint/file.h"

/// The safetensors format: 8 bytes of header length (little-endian), a JSON header, the tensors' bytes.
/// Nothing here knows torch.
namespace fsdp::checkpoint {

/// The longest header that a reader of the format accepts.
constexpr uint64_t kHeaderLimit = 100'000'000;
/// The header's length field.
constexpr uint64_t kLengthBytes = 8;
/// Tensors of more dims than this are taken for an attack.
constexpr size_t kMaxDims = 64;

/// What is wrong with a file.
enum class Failure {
  kTooShort,         ///< not even a length field
  kHeaderTooLarge,   ///< the length field is beyond kHeaderLimit
  kHeaderTruncated,  ///< the header ends behind the file's end
  kNotJson,          ///< the header is no JSON text
  kBadStructure,     ///< JSON, but not an object of tensors
  kDuplicateName,    ///< a tensor, a field or a metadata key twice
  kMissingField,     ///< a tensor without dtype, shape or data_offsets
  kUnknownField,     ///< a tensor with another field
  kUnknownDType,
  kBadShape,       ///< negative, fractional, too many dims, or more bytes than 64 bits count
  kBadOffsets,     ///< not two numbers, or the second before the first
  kSizeMismatch,   ///< shape and dtype need another number of bytes than the offsets give
  kOverlap,        ///< two tensors share bytes
  kHole,           ///< bytes that no tensor owns
  kDataTruncated,  ///< the tensors end behind the file's end
  kTrailingBytes,  ///< the file goes on behind the last tensor
  kBadName,        ///< cannot be written: a name that is not UTF-8, or "__metadata__"
};
std::string_view failure_name(Failure failure);

/// A file that breaks the format. The message names file, tensor, expected and got.
class FormatError : public CheckpointError {
 public:
  FormatError(Failure failure, const std::string& file, const std::string& tensor, const std::string& what);
  const Failure failure;
  const std::string tensor;  ///< "" if no tensor is concerned
};

struct TensorSpec {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;  ///< {} is one element
};

/// Where a tensor's bytes lie, counted from the end of the header.
struct TensorEntry : TensorSpec {
  uint64_t begin = 0;
  uint64_t end = 0;
};

struct Header {
  std::vector<TensorEntry> tensors;  ///< by offset
  std::map<std::string, std::string> metadata;
  uint64_t data_begin = 0;  ///< the first tensor byte's place in the file
  uint32_t crc32 = 0;       ///< of the length field and the header
};

/// Bytes of a tensor; false if 64 bits cannot count them or a size is negative.
bool byte_size(DType dtype, const std::vector<int64_t>& shape, uint64_t& bytes);

/// The length of the header that follows a file's first 8 bytes, `field`, within `file_size` bytes.
uint64_t header_length(const unsigned char* field, uint64_t file_size, const std::string& file);

/// Reads the JSON text of a header whose tensors own `data_size` bytes. `file` is for messages.
Header parse_header(std::string_view json, uint64_t data_size, const std::string& file);

/// Reads and checks a file's header, and that the file is exactly as long as the header says.
Header read_header(const File& file);

/// A header ready to be written: `bytes` is the file's beginning, and tensors follow in the order of `header`.
struct Layout {
  Header header;
  std::string bytes;
};

/// Places tensors in a file: those of large elements first, then by name, so that each is aligned to its element.
Layout lay_out(std::vector<TensorSpec> tensors, const std::map<std::string, std::string>& metadata);

/// A name from a file as it may be printed: control characters replaced, cut at 100 characters.
std::string printable(std::string_view name);

}  // namespace fsdp::checkpoint
