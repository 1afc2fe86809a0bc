// The index, the plan of pieces and reads, and what differs between a checkpoint and a model.
#include <gtest/gtest.h>

#include <fsdp/error.h>

#include "checkpoint/index.h"
#include "checkpoint/match.h"
#include "checkpoint/plan.h"
#include "temp_folder.h"

namespace fsdp::checkpoint {
namespace {

using testing::message_of;

Index sample() {
  Index index;
  index.step = 12;
  index.metadata = {{"seed", "7"}};
  index.files = {{100, 1}, {200, 2}};
  index.tensors["model.w"] = {DType::kF32, {3, 2}, {{0, 0, 2, 5}, {1, 2, 3, 6}}};
  index.tensors["model.s"] = {DType::kF64, {}, {{0, 0, 1, 7}}};
  index.tensors["model.e"] = {DType::kI64, {0, 4}, {}};
  index.aliases = {{"model.tied", "model.w"}};
  OptimizerIndex optimizer;
  optimizer.type = "AdamW";
  optimizer.groups.push_back({{"w", "s"}, {{"lr", 0.1}, {"betas", std::make_pair(0.9, 1.0 / 3)}, {"amsgrad", false}}});
  optimizer.counters["w"]["step"] = 12;
  index.optimizer = optimizer;
  return index;
}

TEST(Index, RoundTrip) {
  const std::string text = write_index(sample());
  const Index index = parse_index(text, "f");
  EXPECT_EQ(write_index(index), text);
  EXPECT_EQ(index.step, 12);
  EXPECT_EQ(index.world_size(), 2);
  EXPECT_EQ(std::get<0>(OptionValue(index.optimizer->groups[0].options.at("amsgrad"))), false);
  EXPECT_EQ((std::get<std::pair<double, double>>(index.optimizer->groups[0].options.at("betas")).second), 1.0 / 3);
  EXPECT_EQ(index.tensors.at("model.w").row_bytes(), 8u);
  EXPECT_EQ(index.tensors.at("model.s").row_bytes(), 8u);
}

TEST(IndexFault, EveryFlippedBitIsFound) {
  const std::string text = write_index(sample());
  for (size_t bit = 0; bit < text.size() * 8; bit += 3) {
    std::string damaged = text;
    damaged[bit / 8] ^= static_cast<char>(1u << (bit % 8));
    EXPECT_THROW(parse_index(damaged, "f"), CheckpointError) << "bit " << bit;
  }
  for (size_t length = 0; length < text.size(); length += 7) {
    EXPECT_THROW(parse_index(text.substr(0, length), "f"), CheckpointError) << length;
  }
}

TEST(Index, NewerVersionIsNamed) {
  std::string body = write_index(sample()).substr(21);
  const auto at = body.find("\"version\": 1");
  ASSERT_NE(at, std::string::npos);
  body.replace(at, 12, "\"version\": 9");
  const auto message = message_of<CheckpointError>([&] { parse_index(seal(body), "f"); });
  EXPECT_NE(message.find("version 9"), std::string::npos) << message;
  EXPECT_NE(message.find("newer"), std::string::npos) << message;
}

TEST(Index, RefusesPiecesThatAreNotTheRows) {
  const auto with = [](std::vector<Piece> pieces) {
    Index index = sample();
    index.tensors["model.w"].pieces = std::move(pieces);
    parse_index(write_index(index), "f");
  };
  EXPECT_THROW(with({}), CheckpointError);
  EXPECT_THROW(with({{0, 0, 2, 0}}), CheckpointError);
  EXPECT_THROW(with({{0, 0, 2, 0}, {1, 1, 3, 0}}), CheckpointError);
  EXPECT_THROW(with({{0, 0, 4, 0}}), CheckpointError);
  EXPECT_THROW(with({{0, 0, 0, 0}, {0, 0, 3, 0}}), CheckpointError);
  EXPECT_THROW(with({{2, 0, 3, 0}}), CheckpointError);
  EXPECT_NO_THROW(with({{1, 0, 3, 0}}));
}

std::vector<LocalTensor> one(const std::string& name, std::vector<int64_t> shape, int64_t begin, int64_t end) {
  return {{name, DType::kF32, std::move(shape), begin, end}};
}

TEST(Plan, TheWireKeepsSpecs) {
  const auto back = decode(encode({{"a\nb", DType::kBF16, {3, 0}, 1, 2}, {"s", DType::kI64, {}, 0, 1}}));
  ASSERT_EQ(back.size(), 2u);
  EXPECT_EQ(back[0].name, "a\nb");
  EXPECT_EQ(back[0].dtype, DType::kBF16);
  EXPECT_EQ(back[0].shape, (std::vector<int64_t>{3, 0}));
  EXPECT_EQ(back[1].shape, std::vector<int64_t>{});
  EXPECT_EQ(back[0].begin, 1);
  EXPECT_EQ(back[0].end, 2);
}

TEST(Plan, TheFirstOfReplicasWrites) {
  const auto plan = plan_pieces({one("w", {4}, 0, 2), one("w", {4}, 2, 4), one("w", {4}, 0, 2), one("w", {4}, 2, 4)});
  const auto& pieces = plan.at("w").pieces;
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].rank, 0);
  EXPECT_EQ(pieces[1].rank, 1);
  EXPECT_EQ(plan_pieces({one("p", {4}, 0, 4), one("p", {4}, 0, 4)}).at("p").pieces.size(), 1u);
}

TEST(Plan, EmptyShardsWriteNothing) {
  const auto plan = plan_pieces({one("w", {1, 3}, 0, 1), one("w", {1, 3}, 1, 1), one("w", {1, 3}, 1, 1)});
  EXPECT_EQ(plan.at("w").pieces.size(), 1u);
  EXPECT_TRUE(plan_pieces({one("e", {2, 0}, 0, 2)}).at("e").pieces.empty());
  EXPECT_EQ(plan_pieces({one("s", {}, 0, 1), one("s", {}, 1, 1)}).at("s").pieces.size(), 1u);
}

TEST(Plan, RanksMustAgree) {
  EXPECT_THROW(plan_pieces({one("w", {4}, 0, 2), one("v", {4}, 2, 4)}), CheckpointError);
  EXPECT_THROW(plan_pieces({one("w", {4}, 0, 2), one("w", {5}, 2, 5)}), CheckpointError);
  EXPECT_THROW(plan_pieces({one("w", {4}, 0, 2), one("w", {4}, 3, 4)}), CheckpointError);
  EXPECT_THROW(plan_pieces({one("w", {4}, 0, 2)}), CheckpointError);
  EXPECT_NO_THROW(plan_pieces({one("rng.a", {4}, 0, 4), one("rng.b", {4}, 0, 4)}));
}

// Every row of 17 is read once, at its place, whoever saved and whoever loads.
TEST(Plan, ReadsCoverTheRows) {
  for (int64_t saved = 1; saved <= 8; ++saved) {
    IndexTensor tensor{DType::kF32, {17, 3}, {}};
    const auto chunk = [](int64_t world, int64_t rank) {
      return std::min<int64_t>(17, (17 + world - 1) / world * rank);
    };
    for (int64_t r = 0; r < saved; ++r) {
      if (chunk(saved, r) < chunk(saved, r + 1)) {
        tensor.pieces.push_back({r, chunk(saved, r), chunk(saved, r + 1), 0});
      }
    }
    for (int64_t world = 1; world <= 8; ++world) {
      for (int64_t r = 0; r < world; ++r) {
        int64_t row = chunk(world, r);
        for (const auto& read : plan_reads(tensor, chunk(world, r), chunk(world, r + 1))) {
          EXPECT_EQ(read.begin, row);
          EXPECT_EQ(read.to, static_cast<uint64_t>(row - chunk(world, r)) * 12);
          EXPECT_EQ(read.from, static_cast<uint64_t>(row - read.piece.begin) * 12);
          EXPECT_EQ(read.bytes, static_cast<uint64_t>(read.end - read.begin) * 12);
          row = read.end;
        }
        EXPECT_EQ(row, chunk(world, r + 1));
      }
    }
  }
}

TEST(Match, ListsDifferencesBothWays) {
  const Index index = sample();
  const std::vector<LocalTensor> wanted = {{"model.w", DType::kF32, {4, 2}, 0, 4},
                                           {"model.s", DType::kF64, {}, 0, 1},
                                           {"model.new", DType::kF32, {1}, 0, 1}};
  const auto message = message_of<CheckpointError>([&] { check_match(index, "model.", wanted, {}, "model"); });
  EXPECT_NE(message.find("missing from it: 'new'"), std::string::npos) << message;
  EXPECT_NE(message.find("only in it: 'e', 'tied'"), std::string::npos) << message;
  EXPECT_NE(message.find("'w' is F32[4, 2] here, F32[3, 2] in it"), std::string::npos) << message;
}

TEST(Match, TiedTensors) {
  Index index = sample();
  const std::vector<LocalTensor> wanted = {{"model.w", DType::kF32, {3, 2}, 0, 3},
                                           {"model.s", DType::kF64, {}, 0, 1},
                                           {"model.e", DType::kI64, {0, 4}, 0, 0}};
  EXPECT_NO_THROW(check_match(index, "model.", wanted, {{"model.tied", "model.w"}}, "model"));
  // Untied here, tied there: both get the one tensor.
  auto untied = wanted;
  untied.push_back({"model.tied", DType::kF32, {3, 2}, 0, 3});
  EXPECT_NO_THROW(check_match(index, "model.", untied, {}, "model"));
  // Tied here, two tensors there.
  index.aliases.clear();
  index.tensors["model.tied"] = index.tensors["model.w"];
  const auto message = message_of<CheckpointError>([&] {
    check_match(index, "model.", wanted, {{"model.tied", "model.w"}}, "model");
  });
  EXPECT_NE(message.find("are one tensor here, two in it"), std::string::npos) << message;
}

TEST(Match, ParameterGroups) {
  const auto saved = *sample().optimizer;
  EXPECT_NO_THROW(check_groups(saved, saved));
  auto here = saved;
  here.groups[0].params = {"s", "w"};  // the order does not matter
  EXPECT_NO_THROW(check_groups(saved, here));
  here.groups[0].params = {"s", "x"};
  const auto message = message_of<CheckpointError>([&] { check_groups(saved, here); });
  EXPECT_NE(message.find("only in the checkpoint: 'w'"), std::string::npos) << message;
  EXPECT_NE(message.find("only in the optimizer: 'x'"), std::string::npos) << message;
  here = saved;
  here.type = "SGD";
  EXPECT_THROW(check_groups(saved, here), CheckpointError);
  here = saved;
  here.groups.push_back({});
  EXPECT_THROW(check_groups(saved, here), CheckpointError);
}

}  // namespace
}  // namespace fsdp::checkpoint
