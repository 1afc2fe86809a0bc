// The file format: round trips, and one test a way to break it.
#include <cstdlib>
#include <cstring>
#include <limits>

#include <gtest/gtest.h>

#include "checkpoint/crc32.h"
#include "checkpoint/safetensors.h"
#include "temp_folder.h"

namespace fsdp::checkpoint {
namespace {

using testing::TempFolder;

TEST(Crc32, IsZlibs) {
  EXPECT_EQ(crc32("", 0), 0u);
  EXPECT_EQ(crc32("123456789", 9), 0xCBF43926u);
  std::string text(1000, '\0');
  for (size_t i = 0; i < text.size(); ++i) {
    text[i] = static_cast<char>(i * 31 + (i >> 3));
  }
  const uint32_t whole = crc32(text.data(), text.size());
  for (size_t cut : {0u, 1u, 15u, 16u, 17u, 999u}) {
    EXPECT_EQ(crc32(text.data() + cut, text.size() - cut, crc32(text.data(), cut)), whole);
  }
}

TEST(DType, NamesAndSizes) {
  for (int i = 0; i <= static_cast<int>(DType::kC64); ++i) {
    const auto dtype = static_cast<DType>(i);
    EXPECT_EQ(dtype_from_name(dtype_name(dtype)), dtype);
  }
  EXPECT_EQ(dtype_size(DType::kBF16), 2u);
  EXPECT_EQ(dtype_size(DType::kC64), 8u);
  EXPECT_FALSE(dtype_from_name("f32"));
}

TEST(Safetensors, LaysOutLargeElementsFirst) {
  const auto layout =
      lay_out({{"b", DType::kU8, {3}}, {"a", DType::kF64, {}}, {"c", DType::kU8, {0, 7}}}, {{"k", "v"}});
  ASSERT_EQ(layout.header.tensors.size(), 3u);
  EXPECT_EQ(layout.header.tensors[0].name, "a");
  EXPECT_EQ(layout.header.tensors[0].end, 8u);
  EXPECT_EQ(layout.header.tensors[1].name, "b");
  EXPECT_EQ(layout.header.tensors[2].begin, layout.header.tensors[2].end);
  EXPECT_EQ(layout.bytes.size() % 8, 0u);
}

TEST(Safetensors, ReadsWhatItWrites) {
  const TempFolder folder;
  const auto layout = lay_out({{"w", DType::kF32, {2, 2}}, {"\xC3\xBC.b", DType::kBF16, {1}}}, {{"format", "pt"}});
  File out = File::create(folder / "x");
  out.append(layout.bytes.data(), layout.bytes.size());
  const std::string data(18, 'd');
  out.append(data.data(), data.size());
  out.finish();

  const File in = File::open(folder / "x");
  const Header header = read_header(in);
  EXPECT_EQ(header.crc32, layout.header.crc32);
  EXPECT_EQ(header.data_begin, layout.bytes.size());
  EXPECT_EQ(header.metadata.at("format"), "pt");
  ASSERT_EQ(header.tensors.size(), 2u);
  EXPECT_EQ(header.tensors[0].name, "w");
  EXPECT_EQ(header.tensors[0].shape, (std::vector<int64_t>{2, 2}));
  EXPECT_EQ(header.tensors[1].begin, 16u);
  EXPECT_EQ(header.tensors[1].end, 18u);
}

TEST(Safetensors, RefusesToWriteBadNames) {
  const auto failure = [](const std::vector<TensorSpec>& specs) {
    try {
      lay_out(specs, {});
    } catch (const FormatError& error) {
      return error.failure;
    }
    return Failure::kTooShort;
  };
  EXPECT_EQ(failure({{"__metadata__", DType::kU8, {1}}}), Failure::kBadName);
  EXPECT_EQ(failure({{"\xFF", DType::kU8, {1}}}), Failure::kBadName);
  EXPECT_EQ(failure({{"a", DType::kU8, {1}}, {"a", DType::kU8, {1}}}), Failure::kDuplicateName);
  EXPECT_EQ(failure({{"a", DType::kF64, {int64_t{1} << 62}}}), Failure::kBadShape);
}

struct Broken {
  Failure failure;
  const char* json;
  uint64_t data_size;
  const char* tensor;  // that the error names
};

class SafetensorsBroken : public ::testing::TestWithParam<Broken> {};

TEST_P(SafetensorsBroken, IsFoundAndNamed) {
  const auto& broken = GetParam();
  try {
    parse_header(broken.json, broken.data_size, "the-file");
    FAIL() << "nothing was found in " << broken.json;
  } catch (const FormatError& error) {
    EXPECT_EQ(failure_name(error.failure), failure_name(broken.failure)) << error.what();
    EXPECT_EQ(error.tensor, broken.tensor);
    EXPECT_NE(std::string(error.what()).find("'the-file'"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find(broken.tensor), std::string::npos);
  }
}

#define FSDP_TENSOR(fields) "{\"t\":{" fields "}}"
INSTANTIATE_TEST_SUITE_P(
    All, SafetensorsBroken,
    ::testing::Values(
        Broken{Failure::kNotJson, "", 0, ""}, Broken{Failure::kNotJson, "[]", 0, ""},
        Broken{Failure::kNotJson, " {}", 0, ""}, Broken{Failure::kNotJson, "{", 0, ""},
        Broken{Failure::kNotJson, "{}x", 0, ""}, Broken{Failure::kNotJson, "{\"\xFF\":1}", 0, ""},
        Broken{Failure::kBadStructure, "{\"t\":1}", 0, "t"}, Broken{Failure::kBadStructure, "{\"t\":[]}", 0, "t"},
        Broken{Failure::kBadStructure, "{\"t\":null}", 0, "t"},
        Broken{Failure::kBadStructure, FSDP_TENSOR("\"dtype\":{}"), 0, "t"},
        Broken{Failure::kBadStructure, FSDP_TENSOR("\"dtype\":7"), 0, "t"},
        Broken{Failure::kBadStructure, "{\"__metadata__\":{\"a\":1}}", 0, "__metadata__"},
        Broken{Failure::kBadStructure, "{\"__metadata__\":{\"a\":{}}}", 0, "__metadata__"},
        Broken{Failure::kDuplicateName, "{\"__metadata__\":{\"a\":\"b\",\"a\":\"b\"}}", 0, "__metadata__"},
        Broken{Failure::kDuplicateName, "{\"__metadata__\":{},\"__metadata__\":{}}", 0, "__metadata__"},
        Broken{Failure::kDuplicateName, FSDP_TENSOR("\"dtype\":\"U8\",\"dtype\":\"U8\""), 0, "t"},
        Broken{Failure::kDuplicateName,
               "{\"t\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]},"
               "\"t\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0]}}",
               0, "t"},
        Broken{Failure::kMissingField, FSDP_TENSOR("\"dtype\":\"U8\",\"shape\":[1]"), 1, "t"},
        Broken{Failure::kUnknownField, FSDP_TENSOR("\"x\":1"), 0, "t"},
        Broken{Failure::kUnknownDType, FSDP_TENSOR("\"dtype\":\"F33\""), 0, "t"},
        Broken{Failure::kBadShape, FSDP_TENSOR("\"shape\":[-1]"), 0, "t"},
        Broken{Failure::kBadShape, FSDP_TENSOR("\"shape\":[1.0]"), 0, "t"},
        Broken{Failure::kBadShape, FSDP_TENSOR("\"shape\":[\"1\"]"), 0, "t"},
        Broken{Failure::kBadShape, FSDP_TENSOR("\"shape\":[[1]]"), 0, "t"},
        Broken{Failure::kBadShape, FSDP_TENSOR("\"shape\":[9223372036854775808]"), 0, "t"},
        Broken{Failure::kBadShape, FSDP_TENSOR("\"shape\":[99999999999999999999]"), 0, "t"},
        Broken{Failure::kBadShape,
               FSDP_TENSOR("\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]"), 0, "t"},
        Broken{Failure::kBadShape,
               FSDP_TENSOR("\"dtype\":\"U8\",\"shape\":[0,4294967296,4294967296],\"data_offsets\":[0,0]"), 0, "t"},
        Broken{Failure::kBadOffsets, FSDP_TENSOR("\"data_offsets\":[0]"), 0, "t"},
        Broken{Failure::kBadOffsets, FSDP_TENSOR("\"data_offsets\":[0,1,2]"), 0, "t"},
        Broken{Failure::kBadOffsets, FSDP_TENSOR("\"data_offsets\":[0,-1]"), 0, "t"},
        Broken{Failure::kBadOffsets, FSDP_TENSOR("\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,0]"), 1, "t"},
        Broken{Failure::kSizeMismatch, FSDP_TENSOR("\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,1]"), 1, "t"},
        Broken{Failure::kOverlap,
               "{\"s\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
               "\"t\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}",
               3, "t"},
        Broken{Failure::kHole, FSDP_TENSOR("\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]"), 3, "t"},
        Broken{Failure::kDataTruncated, FSDP_TENSOR("\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]"), 1, "t"},
        Broken{Failure::kTrailingBytes, FSDP_TENSOR("\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]"), 3, ""}));

TEST(Safetensors, RefusesANulThatHidesText) {
  EXPECT_THROW(parse_header(std::string_view("{}\0{}", 5), 0, "f"), FormatError);
}

TEST(Safetensors, RefusesManyDimsAndDeepNesting) {
  std::string dims = "1";
  for (int i = 0; i < 70; ++i) {
    dims += ",1";
  }
  EXPECT_THROW(parse_header("{\"t\":{\"shape\":[" + dims + "]}}", 1, "f"), FormatError);
  EXPECT_THROW(parse_header("{\"t\":" + std::string(1'000'000, '['), 1, "f"), FormatError);
}

TEST(Safetensors, ChecksTheLengthField) {
  const TempFolder folder;
  const auto failure_of = [&](const std::string& bytes) {
    testing::spill(folder / "x", bytes);
    try {
      read_header(File::open(folder / "x"));
    } catch (const FormatError& error) {
      return error.failure;
    }
    return Failure::kBadName;
  };
  const std::string zeros(6, '\0');
  EXPECT_EQ(failure_of(""), Failure::kTooShort);
  EXPECT_EQ(failure_of("1234567"), Failure::kTooShort);
  EXPECT_EQ(failure_of(std::string(8, '\xFF') + "{}"), Failure::kHeaderTooLarge);
  EXPECT_EQ(failure_of("\x09" + zeros + std::string(1, '\0') + "{}"), Failure::kHeaderTruncated);
  EXPECT_EQ(failure_of("\x02" + zeros + std::string(1, '\0') + "{}"), Failure::kBadName);  // nothing is wrong
}

TEST(Safetensors, NamesInMessagesAreHarmless) {
  EXPECT_EQ(printable("a\x1B[31m\n"), "a?[31m?");
  EXPECT_LT(printable(std::string(10'000, 'x')).size(), 200u);
}

TEST(File, SaysWhatTheSystemSays) {
  const TempFolder folder;
  const auto missing = testing::message_of<CheckpointError>([&] { File::open(folder / "none"); });
  EXPECT_NE(missing.find("No such file"), std::string::npos) << missing;
  EXPECT_THROW(File::open(folder.path()), CheckpointError);
  testing::spill(folder / "x", "abc");
  EXPECT_THROW(File::create(folder / "x"), CheckpointError);
  char out[4];
  const File file = File::open(folder / "x");
  EXPECT_THROW(file.read_at(0, out, 4), CheckpointError);
  EXPECT_THROW(file.read_at(std::numeric_limits<uint64_t>::max(), out, 2), CheckpointError);
}

}  // namespace
}  // namespace fsdp::checkpoint
