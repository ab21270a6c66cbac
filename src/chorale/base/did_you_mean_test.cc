#include "chorale/base/did_you_mean.h"

#include <gtest/gtest.h>

namespace chorale {
namespace {

TEST(DidYouMean, NamesWhatIsNearAndNothingElse) {
  const std::vector<std::string> options = {"--epochs", "--grace", "--lr", "--weight-decay", "--log-every"};
  EXPECT_EQ(did_you_mean("--ephocs", options), "; did you mean '--epochs'?");
  EXPECT_EQ(did_you_mean("--weigth-decay", options), "; did you mean '--weight-decay'?");
  EXPECT_EQ(did_you_mean("--lernrate", options), "; did you mean '--lr'?");
  EXPECT_EQ(did_you_mean("--learning-rate", options), "; did you mean '--lr'?");
  EXPECT_EQ(did_you_mean("--frobnicate", options), "");
  EXPECT_EQ(did_you_mean("--fdsp", {"--dp", "--fsdp"}), "; did you mean '--fsdp'?") << "two letters are exchanged";
  EXPECT_EQ(did_you_mean("", options), "");
  EXPECT_EQ(did_you_mean("--", options), "");
}

}  // namespace
}  // namespace chorale
