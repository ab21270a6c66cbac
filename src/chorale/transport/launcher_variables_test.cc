#include "chorale/transport/launcher_variables.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/transport/environment_test_util.h"

namespace chorale::transport {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class LauncherVariablesTest : public testing::Test {
 protected:
  void set(const std::vector<std::pair<std::string, std::string>>& variables) {
    for (const auto& [name, value] : variables) environment_.set(name, value);
  }
  static std::string error() {
    return message_of([] { find_launcher_variables(); });
  }
  static void expect(int rank, int size, std::optional<int> local_rank, std::optional<int> local_size) {
    const LauncherVariables found = find_launcher_variables();
    EXPECT_EQ(found.rank, rank);
    EXPECT_EQ(found.world_size, size);
    EXPECT_EQ(found.local_rank, local_rank);
    EXPECT_EQ(found.local_size, local_size);
  }
  ScratchEnvironment environment_;
};

TEST_F(LauncherVariablesTest, WithoutALauncherNothingIsKnown) {
  const LauncherVariables found = find_launcher_variables();
  EXPECT_FALSE(found.rank || found.world_size || found.local_rank || found.local_size || found.master_addr);
}

TEST_F(LauncherVariablesTest, EachLauncherIsUnderstood) {
  set({{"PMI_RANK", "3"}, {"PMI_SIZE", "8"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "2"}});
  expect(3, 8, 1, 2);
  set({{"OMPI_COMM_WORLD_RANK", "3"},
       {"OMPI_COMM_WORLD_SIZE", "8"},
       {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
       {"OMPI_COMM_WORLD_LOCAL_SIZE", "8"},
       {"OMPI_MCA_ess_base_jobid", "77"}});
  expect(3, 8, 1, 8);
  EXPECT_EQ(find_launcher_variables().job, "openmpi-77");
}

TEST_F(LauncherVariablesTest, SlurmsFirstNodeAndJobGiveThePlaceOfTheStore) {
  set({{"SLURM_PROCID", "3"}, {"SLURM_NTASKS", "8"}, {"SLURM_LOCALID", "1"}, {"SLURM_JOB_ID", "123456"}});
  EXPECT_FALSE(find_launcher_variables().rank);  // a batch script
  set({{"SLURM_STEP_ID", "0"}, {"SLURM_STEP_NUM_NODES", "2"}});
  for (const auto& [list, first] : std::vector<std::pair<std::string, std::string>>{
           {"n1", "n1"}, {"n1,n2", "n1"}, {"gpu[03-07,9],n1", "gpu03"}, {"gpu[5,7]", "gpu5"}, {"gpu[11]", "gpu11"}}) {
    set({{"SLURM_STEP_NODELIST", list}});
    expect(3, 8, 1, std::nullopt);
    EXPECT_EQ(find_launcher_variables().master_addr, first);
    EXPECT_EQ(find_launcher_variables().master_port, 20000 + 123456 % 20000);
  }
  set({{"MASTER_ADDR", "login"}, {"MASTER_PORT", "1234"}, {"SLURM_STEP_NUM_NODES", "1"}});
  expect(3, 8, 1, 8);
  EXPECT_EQ(find_launcher_variables().master_addr, "login");
  EXPECT_EQ(find_launcher_variables().master_port, 1234);
}

TEST_F(LauncherVariablesTest, TorchrunsComeFirstAndAgreementIsFine) {
  set({{"RANK", "3"},
       {"WORLD_SIZE", "8"},
       {"OMPI_COMM_WORLD_RANK", "3"},
       {"OMPI_COMM_WORLD_SIZE", "8"},
       {"OMPI_COMM_WORLD_LOCAL_RANK", "1"}});
  expect(3, 8, std::nullopt, std::nullopt);
}

TEST_F(LauncherVariablesTest, AContradictionIsAnErrorThatShowsBoth) {
  set({{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"PMI_RANK", "3"}, {"PMI_SIZE", "4"}});
  EXPECT_THAT(error(), AllOf(HasSubstr("WORLD_SIZE=8"), HasSubstr("PMI_SIZE=4")));
  environment_.unset("PMI_SIZE");
  set({{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "5"}, {"SLURM_NTASKS", "8"}});
  EXPECT_THAT(error(), AllOf(HasSubstr("RANK=3"), HasSubstr("SLURM_PROCID=5")));
}

TEST_F(LauncherVariablesTest, ALauncherStartedByAnotherIsNoContradiction) {
  set({{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"RANK", "9"}, {"WORLD_SIZE", "16"}});
  EXPECT_NE(error(), "no error");
  for (const char* marker : {"CHORALE_STORE", "TORCHELASTIC_RUN_ID"}) {
    environment_.set(marker, "x");
    expect(9, 16, std::nullopt, std::nullopt);
    environment_.unset(marker);
  }
  environment_.unset("RANK");
  environment_.unset("WORLD_SIZE");
  set({{"OMPI_COMM_WORLD_RANK", "9"}, {"OMPI_COMM_WORLD_SIZE", "16"}});
  expect(9, 16, std::nullopt, std::nullopt);
}

TEST_F(LauncherVariablesTest, WhatIsNoNumberIsRefusedWithItsName) {
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"}) {
    set({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
    for (const char* text : {"x", "1x", " 1", "99999999999"}) {
      environment_.set(name, text);
      EXPECT_THAT(error(), AllOf(HasSubstr(name), HasSubstr(concat("is '", text, "'; it takes a whole number from "))));
    }
    environment_.unset(name);
  }
  environment_.set("MASTER_PORT", "65536");
  EXPECT_THAT(error(), HasSubstr("MASTER_PORT is '65536'; it takes a whole number from 0 to 65535"));
}

}  // namespace
}  // namespace chorale::transport
