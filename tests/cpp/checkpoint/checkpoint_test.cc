// Save and load on one rank: what comes back, and what is found before anything is changed.
#include <gtest/gtest.h>

#include <fsdp/checkpoint.h>
#include <fsdp/error.h>

#include "net.h"
#include "temp_folder.h"

namespace fsdp {
namespace {

namespace fs = std::filesystem;
using testing::expect_equal;
using testing::message_of;
using testing::Net;
using testing::TempFolder;
using testing::train;

const char* const kFile = "rank-00000-of-00001.safetensors";

torch::optim::AdamW adamw(const Net& net) {
  return torch::optim::AdamW(net->parameters(), torch::optim::AdamWOptions(0.01));
}

TEST(Checkpoint, GivesBackWhatWasSaved) {
  const TempFolder folder;
  Net net(1);
  auto optimizer = adamw(net);
  train(net, optimizer, 0, 2);
  static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).lr(0.005);
  save(net, optimizer, folder / "ckpt", {.step = 2, .metadata = {{"data", "the text"}}});
  const auto next_random = torch::randn({4});

  Net other(2);
  auto fresh = adamw(other);
  const auto info = load(other, fresh, folder / "ckpt");
  EXPECT_EQ(info.step, 2);
  EXPECT_EQ(info.metadata.at("data"), "the text");
  EXPECT_EQ(info.world_size, 1);
  EXPECT_TRUE(torch::equal(torch::randn({4}), next_random)) << "the generator";
  expect_equal(full_state_dict(other), full_state_dict(net));
  EXPECT_EQ(fresh.param_groups()[0].options().get_lr(), 0.005);
  EXPECT_EQ(train(other, fresh, 2, 5), train(net, optimizer, 2, 5));
}

TEST(Checkpoint, TakesModulesHoldersAndPointers) {
  const TempFolder folder;
  Net net(1);
  save(net, folder / "a");
  save(net.ptr(), folder / "a");
  save(*net, folder / "a");
  Net other(2);
  load(*other, folder / "a");
  expect_equal(full_state_dict(other.ptr()), full_state_dict(net));
}

struct EveryDTypeImpl : torch::nn::Module {
  explicit EveryDTypeImpl(int64_t value) {
    for (const auto type :
         {torch::kBool, torch::kByte, torch::kChar, torch::kShort, torch::kInt, torch::kLong, torch::kHalf,
          torch::kBFloat16, torch::kFloat, torch::kDouble, torch::kComplexFloat, torch::kFloat8_e4m3fn}) {
      register_buffer(c10::str("b", static_cast<int>(type)), torch::full({3, 2}, value, torch::kFloat).to(type));
    }
    register_buffer("scalar", torch::full({}, value));
    register_buffer("empty", torch::full({0, 3}, value));
    register_buffer("transposed", torch::arange(6).view({2, 3}).t() * value);
    register_buffer("conj", torch::conj(torch::full({2}, c10::complex<float>(1, 2)) * value));
  }
};
TORCH_MODULE(EveryDType);

TEST(Checkpoint, HoldsEveryDTypeAndLayout) {
  const TempFolder folder;
  EveryDType a(1), b(0);
  save(a, folder / "ckpt");
  load(b, folder / "ckpt");
  const auto got = state_dict(b);
  for (const auto& item : state_dict(a)) {
    const auto type = item.value().is_complex() ? torch::kComplexDouble : torch::kDouble;
    EXPECT_TRUE(torch::equal(got[item.key()].to(type), item.value().to(type))) << item.key();
  }
  EXPECT_FALSE(got["transposed"].is_contiguous()) << "the layout stays the model's";
}

TEST(Checkpoint, RefusesADTypeThatTheFormatLacks) {
  const TempFolder folder;
  torch::nn::Linear net(2, 2);
  net->register_buffer("big", torch::zeros({1}, torch::kComplexDouble));
  const auto message = message_of<NotSupported>([&] { save(net, folder / "ckpt"); });
  EXPECT_NE(message.find("big"), std::string::npos) << message;
  EXPECT_FALSE(fs::exists(folder / "ckpt"));
}

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor>)>;
struct Kind {
  const char* name;
  MakeOptimizer make;
};

class CheckpointOptimizer : public ::testing::TestWithParam<Kind> {};

TEST_P(CheckpointOptimizer, GoesOnAsIfNothingHappened) {
  const TempFolder folder;
  Net net(1);
  const auto optimizer = GetParam().make(net->parameters());
  train(net, *optimizer, 0, 2);
  save(net, *optimizer, folder / "ckpt");
  const auto saved = full_state_dict(net);
  const auto expected = train(net, *optimizer, 2, 5);

  Net other(2);
  const auto fresh = GetParam().make(other->parameters());
  load(other, *fresh, folder / "ckpt");
  expect_equal(full_state_dict(other), saved);
  EXPECT_EQ(train(other, *fresh, 2, 5), expected) << "a new optimizer";

  train(other, *fresh, 7, 8);
  load(other, *fresh, folder / "ckpt");
  EXPECT_EQ(train(other, *fresh, 2, 5), expected) << "an optimizer that has state";
}

namespace o = torch::optim;
template <class Optimizer, class Options>
MakeOptimizer with(Options options) {
  return [options](std::vector<torch::Tensor> parameters) {
    return std::make_unique<Optimizer>(std::move(parameters), options);
  };
}

INSTANTIATE_TEST_SUITE_P(
    All, CheckpointOptimizer,
    ::testing::Values(Kind{"AdamW", with<o::AdamW>(o::AdamWOptions(0.01))},
                      Kind{"AdamWAmsgrad", with<o::AdamW>(o::AdamWOptions(0.01).amsgrad(true).betas({0.8, 0.9}))},
                      Kind{"Adam", with<o::Adam>(o::AdamOptions(0.01).weight_decay(0.1))},
                      Kind{"Sgd", with<o::SGD>(o::SGDOptions(0.01))},
                      Kind{"SgdMomentum", with<o::SGD>(o::SGDOptions(0.01).momentum(0.9).nesterov(true))},
                      Kind{"Rmsprop", with<o::RMSprop>(o::RMSpropOptions(0.01).centered(true).momentum(0.5))},
                      Kind{"Adagrad", with<o::Adagrad>(o::AdagradOptions(0.01).lr_decay(0.1))}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(Checkpoint, OptimizerStateByName) {
  Net net(1);
  auto optimizer = adamw(net);
  train(net, optimizer, 0, 3);
  const auto state = optimizer_state_dict(net, optimizer);
  EXPECT_EQ(state.type, "AdamW");
  EXPECT_EQ(state.counters.at("out.weight").at("step"), 3);
  EXPECT_EQ(state.tensors["out.weight.exp_avg"].sizes(), net->out->weight.sizes());
  EXPECT_EQ(std::get<double>(state.groups.at(0).options.at("lr")), 0.01);
}

TEST(Checkpoint, UnknownOptimizersAreNamed) {
  const TempFolder folder;
  Net net(1);
  torch::optim::LBFGS optimizer(net->parameters());
  const auto message = message_of<NotSupported>([&] { save(net, optimizer, folder / "ckpt"); });
  EXPECT_NE(message.find("LBFGS"), std::string::npos) << message;
  EXPECT_FALSE(fs::exists(folder / "ckpt"));
}

TEST(Checkpoint, TheOptimizerMustBeTheModels) {
  const TempFolder folder;
  Net net(1), other(1);
  auto optimizer = adamw(other);
  EXPECT_THROW(save(net, optimizer, folder / "ckpt"), InvalidArgument);
  EXPECT_THROW(save(net, folder / "ckpt", {.step = -1}), InvalidArgument);
}

TEST(Checkpoint, AnOptimizerOfOtherGroupsIsRefused) {
  const TempFolder folder;
  Net net(1);
  auto optimizer = adamw(net);
  train(net, optimizer, 0, 1);
  save(net, optimizer, folder / "ckpt");
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
  auto message = message_of<CheckpointError>([&] { load(net, sgd, folder / "ckpt"); });
  EXPECT_NE(message.find("AdamW"), std::string::npos) << message;
  torch::optim::AdamW part(std::vector<torch::Tensor>{net->row}, torch::optim::AdamWOptions(0.01));
  message = message_of<CheckpointError>([&] { load(net, part, folder / "ckpt"); });
  EXPECT_NE(message.find("'out.weight'"), std::string::npos) << message;

  save(net, folder / "ckpt");
  message = message_of<CheckpointError>([&] { load(net, optimizer, folder / "ckpt"); });
  EXPECT_NE(message.find("without an optimizer"), std::string::npos) << message;
}

// One saved checkpoint, damaged in a way; load must say `expected` and change nothing.
class CheckpointFault : public ::testing::Test {
 protected:
  CheckpointFault() : optimizer_(adamw(net_)) {
    train(net_, optimizer_, 0, 1);
    save(net_, optimizer_, path_, {.step = 1});
  }

  void expect_refused(const std::string& expected) {
    Net other(2);
    auto fresh = adamw(other);
    train(other, fresh, 5, 6);
    const auto before = full_state_dict(other);
    const auto message = message_of<CheckpointError>([&] { load(other, fresh, path_); });
    EXPECT_NE(message.find(expected), std::string::npos) << "got: " << message << "\nexpected: " << expected;
    expect_equal(full_state_dict(other), before);
    EXPECT_EQ(optimizer_state_dict(other, fresh).counters.at("row").at("step"), 1);
  }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  void flip(const std::string& name, size_t byte) {
    auto bytes = testing::slurp(file(name));
    bytes.at(byte) ^= 4;
    testing::spill(file(name), bytes);
  }

  const TempFolder folder_;
  const std::string path_ = folder_ / "ckpt";
  Net net_{1};
  torch::optim::AdamW optimizer_;
};

TEST_F(CheckpointFault, MissingFile) {
  fs::remove(file(kFile));
  expect_refused(kFile);
}
TEST_F(CheckpointFault, TruncatedFile) {
  fs::resize_file(file(kFile), fs::file_size(file(kFile)) - 1);
  expect_refused("it was cut off");
}
TEST_F(CheckpointFault, LongerFile) {
  fs::resize_file(file(kFile), fs::file_size(file(kFile)) + 1);
  expect_refused("expected");
}
TEST_F(CheckpointFault, MissingIndex) {
  fs::remove(file("index.json"));
  expect_refused("index.json");
}
TEST_F(CheckpointFault, DamagedIndex) {
  flip("index.json", fs::file_size(file("index.json")) / 2);
  expect_refused("is damaged");
}
TEST_F(CheckpointFault, NoCheckpoint) {
  fs::remove_all(path_);
  expect_refused("there is no checkpoint");
}
TEST_F(CheckpointFault, EveryByteOfTheHeader) {
  const auto whole = testing::slurp(file(kFile));
  const size_t header = static_cast<unsigned char>(whole[0]) + 256u * static_cast<unsigned char>(whole[1]) + 8;
  Net other(2);
  auto fresh = adamw(other);
  const auto before = full_state_dict(other);
  for (size_t byte = 0; byte < header; byte += byte < 300 ? 1 : 17) {
    flip(kFile, byte);
    EXPECT_THROW(load(other, fresh, path_), CheckpointError) << "byte " << byte;
    testing::spill(file(kFile), whole);
  }
  expect_equal(full_state_dict(other), before);
  EXPECT_NO_THROW(load(other, fresh, path_));
}
TEST_F(CheckpointFault, DamagedData) {
  flip(kFile, fs::file_size(file(kFile)) - 3);
  expect_refused("is damaged");
}
TEST_F(CheckpointFault, AnotherModel) {
  torch::nn::Linear other(17, 5);
  const auto message = message_of<CheckpointError>([&] { load(other, path_); });
  EXPECT_NE(message.find("of another model"), std::string::npos) << message;
  EXPECT_NE(message.find("missing from it: 'bias', 'weight'"), std::string::npos) << message;
  EXPECT_NE(message.find("only in it: "), std::string::npos) << message;
  EXPECT_NE(message.find("and 4 more"), std::string::npos) << message;
}
TEST_F(CheckpointFault, AnotherShapeOrDType) {
  Net wide(1);
  wide->mean.set_data(torch::zeros({6}, torch::kDouble));
  const auto message = message_of<CheckpointError>([&] { load(wide, path_); });
  EXPECT_NE(message.find("'mean' is F64[6] here, F32[5] in it"), std::string::npos) << message;
}

}  // namespace
}  // namespace fsdp
