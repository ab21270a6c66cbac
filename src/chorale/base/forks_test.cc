#include "chorale/base/forks.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

namespace chorale {
namespace {

TEST(Forks, AMarkIsForeignInAChildAndItsChildrenAndNotInTheParent) {
  const base::ForkMark mark;
  EXPECT_FALSE(mark.is_foreign());
  const pid_t child = fork();
  if (child == 0) {
    const base::ForkMark own;
    if (!mark.is_foreign() || own.is_foreign()) _exit(1);
    const pid_t grandchild = fork();
    if (grandchild == 0) _exit(mark.is_foreign() && own.is_foreign() ? 0 : 1);
    int status = 1;
    waitpid(grandchild, &status, 0);
    _exit(status == 0 ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(mark.is_foreign());
}

}  // namespace
}  // namespace chorale
