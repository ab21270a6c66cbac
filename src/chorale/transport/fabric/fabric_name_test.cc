#include "chorale/transport/fabric/fabric_name.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/testing/environment_test_util.h"
#include "chorale/testing/message_test_util.h"

namespace chorale::transport {
namespace {

TEST(FabricName, ADeviceOfUcxMayHaveColonsOfItsOwn) {
  EXPECT_EQ(parse_fabric("ucx:mlx5_0:1"), (FabricName{"ucx", "mlx5_0:1"}));
  EXPECT_EQ(parse_fabric("ucx"), (FabricName{"ucx", ""}));
  EXPECT_EQ(parse_fabric("mpi"), (FabricName{"mpi", ""}));
}

TEST(FabricName, WrongNamesAreErrorsThatSayWhichThereAre) {
  for (const char* wrong : {"", "gloo", "TLS", "tls:eth0", "mpi:", "ucx:"}) {
    EXPECT_THROW(parse_fabric(wrong), InvalidArgument) << wrong;
  }
  try {
    parse_fabric("infiniband");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_STREQ(error.what(), "[fabric] 'infiniband' is no fabric; there are tls, ucx, ucx:DEVICE and mpi");
  }
}

TEST(FabricName, AWrongVariableIsNamed) {
  const EnvironmentVariable variable("CHORALE_FABRIC", "pigeon");
  EXPECT_EQ(message_of<InvalidArgument>([] { choose_fabric(""); }),
            "[fabric] CHORALE_FABRIC: 'pigeon' is no fabric; there are tls, ucx, ucx:DEVICE and mpi");
  EXPECT_EQ(choose_fabric("ucx").kind, "ucx");
}

}  // namespace
}  // namespace chorale::transport
