#include "chorale/base/shared_object.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "chorale/base/error.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale {
namespace {

using testing::HasSubstr;

constexpr SharedObject kNone{"nosuch", 1, "apt-get install libnosuch-dev", "apt-get install libnosuch1", false};

TEST(SharedObject, OneThatWasNotBuiltSaysWhatToInstall) {
  const Availability found = shared_object_availability(kNone);
  EXPECT_FALSE(found.yes);
  EXPECT_EQ(found.reason, "chorale_nosuch.so was not built; apt-get install libnosuch-dev and build again");
  EXPECT_THROW(load_shared_object(kNone), StateError);
}

TEST(SharedObject, OneThatCannotBeLoadedSaysWhyAndWhatToInstall) {
  const TemporaryFolder folder;
  folder.write("chorale_nosuch.so", "not a shared object");
  setenv("CHORALE_MODULES", folder.path().c_str(), 1);
  const Availability found = shared_object_availability(kNone);
  unsetenv("CHORALE_MODULES");
  EXPECT_FALSE(found.yes);
  EXPECT_THAT(found.reason, HasSubstr("chorale_nosuch.so"));
  EXPECT_THAT(found.reason, HasSubstr("; apt-get install libnosuch1"));
}

}  // namespace
}  // namespace chorale
