// The main function of every layer's tests: GoogleTest under a watchdog.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "chorale/base/config.h"
#include "chorale/testing/watchdog_test_util.h"

namespace {

// Well above any test and below ctest's own limit, which would print no stacks. CHORALE_TEST_TIMEOUT_S overrides it.
std::chrono::seconds limit_of_a_test() {
  const auto text = chorale::config::env("CHORALE_TEST_TIMEOUT_S");
  return std::chrono::seconds(text ? std::stoi(*text) : 60);
}

class WatchdogListener : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo& test) override {
    watchdog_.start(std::string(test.test_suite_name()) + "." + test.name());
  }
  void OnTestEnd(const testing::TestInfo&) override { watchdog_.stop(); }

  chorale::Watchdog watchdog_{limit_of_a_test()};
};

// What a launcher or a user's shell may have set, and what changes what tests see. Ranks keep it: they are started on
// purpose with it, as tests that are otherwise disabled (tests/*.py) or by run_processes.
void forget_the_surroundings() {
  if (testing::GTEST_FLAG(also_run_disabled_tests) || chorale::config::env("CHORALE_TEST_RANK")) return;
  // As in tests/unittest_main.py.
  for (const char* name : {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                           "CHORALE_STORE", "CHORALE_DEBUG", "TORCH_DISTRIBUTED_DEBUG"})
    unsetenv(name);
  std::vector<std::string> names;  // copied first: unsetenv moves what environ points to
  for (char** variable = environ; *variable; ++variable) {
    const std::string_view text = *variable;
    for (const char* prefix : {"OMPI_COMM_WORLD_", "OMPI_MCA_ess_", "PMI_", "PMIX_", "MPI_LOCAL", "SLURM_"}) {
      if (text.starts_with(prefix)) names.emplace_back(text.substr(0, text.find('=')));
    }
  }
  for (const std::string& name : names) unsetenv(name.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  forget_the_surroundings();
  testing::UnitTest::GetInstance()->listeners().Append(new WatchdogListener);
  return RUN_ALL_TESTS();
}
