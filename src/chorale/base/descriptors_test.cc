#include "chorale/base/descriptors.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

namespace chorale {
namespace {

// The test's own 0, 1 and 2 are needed.
int in_a_child(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body() ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  return status;
}
bool is_open(int number) { return fcntl(number, F_GETFD) >= 0; }

TEST(Descriptors, WhatIsKeptIsMovedAboveTheStandardOnes) {
  EXPECT_EQ(in_a_child([] {
              for (const int number : {0, 1, 2}) close(number);
              const int made = above_standard(open("/dev/null", O_RDONLY | O_CLOEXEC));
              return made > 2 && fcntl(made, F_GETFD) == FD_CLOEXEC && !is_open(0) && !is_open(1) && !is_open(2);
            }),
            0);
  EXPECT_EQ(above_standard(-1), -1);
  EXPECT_EQ(above_standard(7), 7);
}

TEST(Descriptors, ClosedOnesBecomeTheNullDevice) {
  EXPECT_EQ(in_a_child([] {
              close(0);
              close(2);
              open_standard_descriptors();
              return is_open(0) && is_open(1) && is_open(2) && write(2, "x", 1) == 1 && fcntl(2, F_GETFD) == 0;
            }),
            0);
}

TEST(Descriptors, NothingIsOpenedAtTheirNumbersWhileTheyAreHeld) {
  EXPECT_EQ(in_a_child([] {
              close(0);
              close(1);
              int made = -1;
              {
                const StandardDescriptorsHeld held;
                made = open("/dev/null", O_RDONLY);
              }
              return made > 2 && !is_open(0) && !is_open(1) && is_open(2);
            }),
            0);
}

}  // namespace
}  // namespace chorale
