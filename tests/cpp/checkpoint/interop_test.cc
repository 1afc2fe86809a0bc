// Halves of tests/python/test_checkpoint_format.py, which runs them by name with FSDP_TEST_FOLDER set.
#include <cstdlib>
#include <iostream>

#include <gtest/gtest.h>

#include <fsdp/fsdp.h>

#include "checkpoint/safetensors.h"
#include "net.h"
#include "support/ranks.h"

namespace fsdp {
namespace {

std::string folder() {
  const char* value = std::getenv("FSDP_TEST_FOLDER");
  if (value == nullptr) {
    throw InvalidArgument("FSDP_TEST_FOLDER is not set");
  }
  return value;
}

TEST(InteropThreads, DISABLED_Write) {
  testing::run_ranks(3, [](int rank) {
    auto model = fully_shard(testing::Net(1));
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.25));
    testing::train(model, optimizer, 0, 2, rank, 3);
    save(model, optimizer, folder() + "/ckpt", {.step = 2, .metadata = {{"k", "v"}}});
    // The same values as text, for the other side to compare with.
    const auto full = full_state_dict(model);
    if (rank == 0) {
      for (const auto& item : full) {
        std::cout << "value " << item.key() << ' ' << item.value().to(torch::kDouble).sum().item<double>() << '\n';
      }
    }
  });
}

// Prints what is in a file that another library wrote.
TEST(Interop, DISABLED_Read) {
  const auto header = checkpoint::read_header(checkpoint::File::open(folder() + "/theirs.safetensors"));
  for (const auto& t : header.tensors) {
    std::cout << "tensor " << t.name << ' ' << checkpoint::dtype_name(t.dtype) << ' ' << c10::Join(",", t.shape)
              << '\n';
  }
}

}  // namespace
}  // namespace fsdp
