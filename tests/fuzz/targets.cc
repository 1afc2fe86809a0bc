#include "targets.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "checkpoint/index.h"
#include "checkpoint/plan.h"
#include "checkpoint/safetensors.h"

namespace fsdp::fuzz {
namespace {

using namespace fsdp::checkpoint;

void promise(bool kept, const char* what) {
  if (!kept) {
    std::fprintf(stderr, "broken promise: %s\n", what);
    std::abort();
  }
}

void check_header(const Header& header, uint64_t data_size) {
  uint64_t covered = 0;
  for (const auto& tensor : header.tensors) {
    uint64_t bytes = 0;
    promise(byte_size(tensor.dtype, tensor.shape, bytes), "a size that 64 bits count");
    promise(tensor.begin == covered && tensor.end - tensor.begin == bytes && tensor.end <= data_size, "offsets");
    covered = tensor.end;
  }
  promise(covered == data_size, "every byte has an owner");
}

// What was read can be written, and reads as the same.
void check_round_trip(const Header& header, uint64_t data_size) {
  const Layout layout = lay_out({header.tensors.begin(), header.tensors.end()}, header.metadata);
  const std::string_view json = std::string_view(layout.bytes).substr(kLengthBytes);
  const Header again = parse_header(json, data_size, "again");
  promise(again.metadata == header.metadata && again.tensors.size() == header.tensors.size(), "round trip");
  for (size_t i = 0; i < again.tensors.size(); ++i) {
    const auto& a = again.tensors[i];
    const auto& b = layout.header.tensors[i];
    // Empty tensors share an offset, so their order is free.
    promise(a.begin == b.begin || a.begin == a.end, "order");
  }
}

void read_as(std::string_view json, uint64_t data_size) {
  try {
    const Header header = parse_header(json, data_size, "fuzz");
    check_header(header, data_size);
    check_round_trip(header, data_size);
  } catch (const FormatError&) {
  }
}

}  // namespace

void header(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  try {
    const uint64_t length = header_length(data, size, "fuzz");
    promise(length <= size - kLengthBytes, "the header lies in the file");
    read_as(bytes.substr(kLengthBytes, length), size - kLengthBytes - length);
  } catch (const FormatError&) {
  }
  // Most changes of the length field end the read above; look at the text behind it all the same.
  if (size > kLengthBytes) {
    read_as(bytes.substr(kLengthBytes), 0);
  }
}

void index(const uint8_t* data, size_t size) {
  const std::string text = seal({reinterpret_cast<const char*>(data), size});
  try {
    const Index index = parse_index(text, "fuzz");
    for (const auto& [name, tensor] : index.tensors) {
      uint64_t bytes = 0;
      promise(byte_size(tensor.dtype, tensor.shape, bytes), "a size that 64 bits count");
      uint64_t covered = 0;
      for (const auto& read : plan_reads(tensor, 0, tensor.rows())) {
        promise(read.begin == read.piece.begin && read.end == read.piece.end && read.to == covered &&
                    read.piece.rank < index.world_size(),
                "pieces in order");
        covered += read.bytes;
      }
      promise(covered == bytes, "pieces are the tensor");
    }
    promise(write_index(parse_index(write_index(index), "again")) == write_index(index), "round trip");
  } catch (const CheckpointError&) {
  }
}

}  // namespace fsdp::fuzz
