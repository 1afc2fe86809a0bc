#include "mesh/launch.h"

#include <fsdp/error.h>
#include <gtest/gtest.h>

namespace fsdp::mesh {
namespace {

std::string refusal(const Environment& environment) {
  try {
    read_launch(environment);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

::testing::AssertionResult names(const std::string& text, const std::string& variable) {
  return text.rfind(variable, 0) == 0 ? ::testing::AssertionSuccess()
                                      : ::testing::AssertionFailure() << '"' << text << '"';
}

TEST(Launch, NothingWithoutALauncher) {
  EXPECT_FALSE(read_launch({}));
  EXPECT_FALSE(read_launch({{"MASTER_ADDR", "host"}, {"SLURM_NTASKS", "4"}}));
}

TEST(Launch, ReadsTorchrun) {
  Environment environment{{"RANK", "3"},           {"WORLD_SIZE", "8"},     {"LOCAL_RANK", "1"},
                          {"MASTER_ADDR", "node"}, {"MASTER_PORT", "1234"}, {"OMPI_COMM_WORLD_RANK", "0"}};
  auto launch = read_launch(environment).value();
  EXPECT_EQ(launch.launcher, "torchrun");
  EXPECT_EQ(launch.rank, 3);
  EXPECT_EQ(launch.world_size, 8);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.address, "node");
  EXPECT_EQ(launch.port, 1234);
  EXPECT_FALSE(launch.store_is_hosted);
  environment["TORCHELASTIC_USE_AGENT_STORE"] = "True";
  EXPECT_TRUE(read_launch(environment)->store_is_hosted);
}

TEST(Launch, TorchrunMustBeComplete) {
  EXPECT_TRUE(names(refusal({{"RANK", "0"}}), "WORLD_SIZE"));
  EXPECT_TRUE(names(refusal({{"WORLD_SIZE", "2"}}), "RANK"));
  EXPECT_TRUE(names(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}}), "MASTER_ADDR"));
  EXPECT_TRUE(names(refusal({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "node"}}), "MASTER_PORT"));
  EXPECT_EQ(read_launch({{"RANK", "0"}, {"WORLD_SIZE", "1"}})->address, "");
}

TEST(Launch, RefusesWhatIsNotANumberOrOutOfRange) {
  EXPECT_TRUE(names(refusal({{"RANK", "one"}, {"WORLD_SIZE", "2"}}), "RANK"));
  EXPECT_TRUE(names(refusal({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}), "RANK"));
  EXPECT_TRUE(names(refusal({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), "RANK"));
  Environment environment{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "70000"}};
  EXPECT_TRUE(names(refusal(environment), "MASTER_PORT"));
  environment["MASTER_PORT"] = "29500x";
  EXPECT_TRUE(names(refusal(environment), "MASTER_PORT"));
}

TEST(Launch, ReadsOpenMpi) {
  Environment environment{{"OMPI_COMM_WORLD_RANK", "1"},
                          {"OMPI_COMM_WORLD_SIZE", "2"},
                          {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                          {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
                          {"PMIX_NAMESPACE", "12345"}};
  const auto launch = read_launch(environment).value();
  EXPECT_EQ(launch.launcher, "Open MPI");
  EXPECT_EQ(launch.rank, 1);
  EXPECT_EQ(launch.world_size, 2);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.address, "127.0.0.1");
  EXPECT_EQ(launch.port, read_launch(environment)->port);
  environment["PMIX_NAMESPACE"] = "12346";
  EXPECT_NE(launch.port, read_launch(environment)->port);
  environment["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1";  // another host has the other rank
  EXPECT_TRUE(names(refusal(environment), "MASTER_ADDR"));
  environment["MASTER_ADDR"] = "node";
  environment["MASTER_PORT"] = "5000";
  EXPECT_EQ(read_launch(environment)->port, 5000);
}

TEST(Launch, ReadsPmi) {
  const auto launch =
      read_launch({{"PMI_RANK", "2"}, {"PMI_SIZE", "3"}, {"MPI_LOCALRANKID", "2"}, {"MPI_LOCALNRANKS", "3"}}).value();
  EXPECT_EQ(launch.launcher, "PMI");
  EXPECT_EQ(launch.rank, 2);
  EXPECT_EQ(launch.world_size, 3);
  EXPECT_EQ(launch.local_rank, 2);
  EXPECT_EQ(launch.address, "127.0.0.1");
  EXPECT_TRUE(names(refusal({{"PMI_RANK", "0"}}), "PMI_SIZE"));
}

TEST(Launch, ReadsSlurm) {
  Environment environment{{"SLURM_PROCID", "3"},
                          {"SLURM_NTASKS", "4"},
                          {"SLURM_LOCALID", "1"},
                          {"SLURM_NNODES", "1"},
                          {"SLURM_JOB_ID", "77"}};
  const auto launch = read_launch(environment).value();
  EXPECT_EQ(launch.launcher, "Slurm");
  EXPECT_EQ(launch.rank, 3);
  EXPECT_EQ(launch.world_size, 4);
  EXPECT_EQ(launch.local_rank, 1);
  EXPECT_EQ(launch.address, "127.0.0.1");
  environment["SLURM_NNODES"] = "2";
  EXPECT_TRUE(names(refusal(environment), "MASTER_ADDR"));
  environment.erase("SLURM_NTASKS");
  EXPECT_TRUE(names(refusal(environment), "SLURM_NTASKS"));
}

}  // namespace
}  // namespace fsdp::mesh
