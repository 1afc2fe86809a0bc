#include <gtest/gtest.h>

#include "processes.h"

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  int exit_code = 0;
  if (fsdp::testing::run_body_if_rank(exit_code)) {
    return exit_code;
  }
  return RUN_ALL_TESTS();
}
