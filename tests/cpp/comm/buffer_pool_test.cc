#include "base/buffer_pool.h"

#include <cstring>
#include <optional>
#include <vector>

#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include "base/huge_pages.h"

namespace fsdp::base {
namespace {

constexpr int64_t kLarge = kHugeBuffer;

at::Tensor take(const BufferPool& pool, int64_t bytes) { return pool.take(bytes, at::TensorOptions(at::kByte)); }

TEST(BufferPool, KeepsALargeBufferForTheNext) {
  const BufferPool pool;
  auto first = take(pool, 2 * kLarge);
  void* const at = first.data_ptr();
  first.reset();
  EXPECT_EQ(pool.kept_bytes(), 2 * kLarge);
  const auto smaller = pool.take(kLarge * 3 / 2 / 2, at::TensorOptions(at::kHalf));
  EXPECT_EQ(smaller.data_ptr(), at);
  EXPECT_EQ(smaller.scalar_type(), at::kHalf);
  EXPECT_EQ(pool.kept_bytes(), 0);
  std::memset(smaller.data_ptr(), 1, smaller.nbytes());
}

TEST(BufferPool, BuffersInUseAreDifferentMemory) {
  const BufferPool pool;
  std::vector<at::Tensor> buffers;
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 4; ++i) buffers.push_back(take(pool, kLarge + 1000 * i).fill_(i));
    for (int i = 0; i < 4; ++i) {
      EXPECT_TRUE(buffers[static_cast<size_t>(i)].eq(i).all().item<bool>());
      EXPECT_EQ(reinterpret_cast<uintptr_t>(buffers[static_cast<size_t>(i)].data_ptr()) % 64, 0u);
    }
    buffers.clear();
  }
}

TEST(BufferPool, HoldsNoMoreThanWasOnceInUse) {
  const BufferPool pool;
  std::optional<at::Tensor> one = take(pool, kLarge), two = take(pool, kLarge);
  one.reset();
  two.reset();
  EXPECT_EQ(pool.kept_bytes(), 2 * kLarge);
  const auto larger = take(pool, 2 * kLarge - 4096);  // fits none of them
  EXPECT_LE(pool.kept_bytes() + larger.nbytes(), static_cast<size_t>(2 * kLarge));
  const auto more = take(pool, 3 * kLarge);  // more than ever
  EXPECT_EQ(pool.kept_bytes(), 0);
}

TEST(BufferPool, ALargeOneIsNotSpentOnLittle) {
  const BufferPool pool;
  take(pool, 4 * kLarge).reset();
  const auto little = take(pool, kLarge);
  EXPECT_EQ(pool.kept_bytes() + static_cast<int64_t>(little.nbytes()), kLarge);  // it went instead
}

TEST(BufferPool, SmallBuffersAreNotKept) {
  const BufferPool pool;
  take(pool, kLarge - 1).reset();
  EXPECT_EQ(take(pool, 0).numel(), 0);
  EXPECT_EQ(pool.kept_bytes(), 0);
}

TEST(BufferPool, ABufferMayOutliveIt) {
  std::optional<BufferPool> pool(std::in_place);
  const auto buffer = take(*pool, kLarge);
  pool.reset();
  EXPECT_TRUE(buffer.fill_(7).eq(7).all().item<bool>());
}

}  // namespace
}  // namespace fsdp::base
