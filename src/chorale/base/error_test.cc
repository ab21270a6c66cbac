#include "chorale/base/error.h"

#include <gtest/gtest.h>

#include "chorale/base/log.h"
#include "chorale/testing/message_test_util.h"

namespace chorale {
namespace {

TEST(Error, EachMacroRaisesItsKindWithThePartsJoined) {
  EXPECT_EQ(message_of<InvalidArgument>([] { CHORALE_CHECK(false, "size ", 3, " is not ", 2.5); }),
            "size 3 is not 2.5");
  EXPECT_EQ(message_of<StateError>([] { CHORALE_CHECK_STATE(1 > 2, "too early"); }), "too early");
  const std::string internal = message_of<InternalError>([] { CHORALE_INVARIANT(false, "count ", 1); });
  EXPECT_NE(internal.find("error_test.cc:"), std::string::npos) << internal;
  EXPECT_NE(internal.find("count 1; please report this"), std::string::npos) << internal;
}

TEST(Error, EveryKindIsAnError) {
  EXPECT_THROW(CHORALE_CHECK(false, ""), Error);
  EXPECT_THROW(CHORALE_CHECK_STATE(false, ""), Error);
  EXPECT_THROW(CHORALE_INVARIANT(false, ""), Error);
}

TEST(Error, APassedCheckEvaluatesItsConditionOnceAndItsPartsNever) {
  int conditions = 0, parts = 0;
  CHORALE_CHECK(++conditions, "part ", ++parts);
  EXPECT_EQ(conditions, 1);
  EXPECT_EQ(parts, 0);
}

TEST(Error, TheMacrosAreOneStatement) {
  bool reached = false;
  if (reached)
    CHORALE_CHECK(false, "not here");
  else
    reached = true;
  EXPECT_TRUE(reached);
}

TEST(Log, LinesNameTheRankOnceItIsKnown) {
  testing::internal::CaptureStderr();
  log_warning("before");
  log_as("rank 3");
  log_warning("after");
  const std::string lines = testing::internal::GetCapturedStderr();
  EXPECT_NE(lines.find(" warning: before\n"), std::string::npos) << lines;
  EXPECT_NE(lines.find(" rank 3 warning: after\n"), std::string::npos) << lines;
}

}  // namespace
}  // namespace chorale
