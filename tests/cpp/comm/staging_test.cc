#include "comm/staging.h"

#include <cstring>
#include <optional>
#include <vector>

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include "base/huge_pages.h"

namespace fsdp::comm {
namespace {

constexpr int64_t kLarge = base::kHugeBuffer;

at::Tensor take(const Staging& staging, int64_t bytes) { return staging.take(bytes, at::TensorOptions(at::kByte)); }

TEST(Staging, KeepsALargeBufferForTheNext) {
  const Staging staging;
  auto first = take(staging, 2 * kLarge);
  void* const at = first.data_ptr();
  first.reset();
  EXPECT_EQ(staging.kept_bytes(), 2 * kLarge);
  const auto smaller = staging.take(kLarge * 3 / 2 / 2, at::TensorOptions(at::kHalf));
  EXPECT_EQ(smaller.data_ptr(), at);
  EXPECT_EQ(smaller.scalar_type(), at::kHalf);
  EXPECT_EQ(staging.kept_bytes(), 0);
  std::memset(smaller.data_ptr(), 1, smaller.nbytes());
}

TEST(Staging, BuffersInUseAreDifferentMemory) {
  const Staging staging;
  std::vector<at::Tensor> buffers;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 4; ++i) buffers.push_back(take(staging, kLarge + 1000 * i).fill_(i));
    for (int i = 0; i < 4; ++i) {
      EXPECT_TRUE(buffers[static_cast<size_t>(i)].eq(i).all().item<bool>());
      EXPECT_EQ(reinterpret_cast<uintptr_t>(buffers[static_cast<size_t>(i)].data_ptr()) % 64, 0u);
    }
    buffers.clear();
  }
}

TEST(Staging, HoldsNoMoreThanWasOnceInUse) {
  const Staging staging;
  std::optional<at::Tensor> one = take(staging, kLarge), two = take(staging, kLarge);
  one.reset();
  two.reset();
  EXPECT_EQ(staging.kept_bytes(), 2 * kLarge);
  const auto larger = take(staging, 2 * kLarge - 4096);  // fits none of them
  EXPECT_LE(staging.kept_bytes() + larger.nbytes(), static_cast<size_t>(2 * kLarge));
  const auto more = take(staging, 3 * kLarge);  // more than ever
  EXPECT_EQ(staging.kept_bytes(), 0);
}

TEST(Staging, ALargeOneIsNotSpentOnLittle) {
  const Staging staging;
  take(staging, 4 * kLarge).reset();
  const auto little = take(staging, kLarge);
  EXPECT_EQ(staging.kept_bytes() + static_cast<int64_t>(little.nbytes()), kLarge);  // it went instead
}

TEST(Staging, SmallBuffersAreNotKept) {
  const Staging staging;
  take(staging, kLarge - 1).reset();
  EXPECT_EQ(take(staging, 0).numel(), 0);
  EXPECT_EQ(staging.kept_bytes(), 0);
}

TEST(Staging, ABufferMayOutliveIt) {
  std::optional<Staging> staging(std::in_place);
  const auto buffer = take(*staging, kLarge);
  staging.reset();
  EXPECT_TRUE(buffer.fill_(7).eq(7).all().item<bool>());
}

}  // namespace
}  // namespace fsdp::comm
