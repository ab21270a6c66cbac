#include "chorale/base/optional_parts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

namespace chorale {
namespace {

TEST(OptionalParts, ALibraryThatIsThereIsFound) {
  const Availability found = has_library("libc.so.6", "");
  EXPECT_TRUE(found.yes);
  EXPECT_EQ(found.reason, "");
}

TEST(OptionalParts, AMissingLibraryIsNamedWithWhatToInstall) {
  const Availability found = has_library("libnosuch.so.1", "apt-get install nosuch");
  EXPECT_FALSE(found.yes);
  EXPECT_EQ(found.reason, "libnosuch.so.1 not found; apt-get install nosuch");
}

TEST(OptionalParts, EveryRowSaysYesOrWhyNot) {
  for (const OptionalPart& part : optional_parts()) {
    const Availability found = part.available();
    EXPECT_EQ(found.yes, found.reason.empty()) << part.name << ": " << found.reason;
    EXPECT_FALSE(part.gives.empty()) << part.name;
  }
}

TEST(OptionalParts, NcclIsNotOfferedWhereNothingUsesIt) {
  std::map<std::string_view, bool> there;
  for (const OptionalPart& part : optional_parts()) there[part.name] = part.available().yes;
  EXPECT_LE(there.at("NCCL"), there.at("CUDA"));
}

}  // namespace
}  // namespace chorale
