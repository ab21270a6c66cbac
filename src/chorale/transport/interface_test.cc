#include "chorale/transport/interface.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/transport/environment_test_util.h"
#include "chorale/transport/host_identity.h"

namespace chorale::transport {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class InterfaceTest : public testing::Test {
 protected:
  ScratchEnvironment environment_;
};

TEST_F(InterfaceTest, LoopbackIsAmongThem) {
  for (const Interface& interface : interfaces()) {
    if (interface.name == "lo" && interface.address == "127.0.0.1") return;
  }
  FAIL();
}

TEST_F(InterfaceTest, AVariableChoosesByName) {
  for (const auto& [variable, value] :
       std::vector<std::pair<std::string, std::string>>{{"CHORALE_IFACE", "lo"},
                                                        {"GLOO_SOCKET_IFNAME", "no0,lo"},
                                                        {"NCCL_SOCKET_IFNAME", "l"},
                                                        {"NCCL_SOCKET_IFNAME", "=lo"}}) {
    environment_.set(variable, value);
    EXPECT_EQ(own_address("192.0.2.1"), "127.0.0.1") << variable;
    environment_.unset(variable);
  }
}

TEST_F(InterfaceTest, OursWinsOverGloosOverNccls) {
  environment_.set("NCCL_SOCKET_IFNAME", "no2");
  EXPECT_THROW(own_address(""), InvalidArgument);
  environment_.set("GLOO_SOCKET_IFNAME", "lo");
  EXPECT_EQ(own_address(""), "127.0.0.1");
  environment_.set("GLOO_SOCKET_IFNAME", "no1");
  environment_.set("CHORALE_IFACE", "lo");
  EXPECT_EQ(own_address(""), "127.0.0.1");
}

TEST_F(InterfaceTest, ANameThatIsNotThereIsAnErrorThatListsThoseThatAre) {
  for (const auto& [variable, value] : std::vector<std::pair<std::string, std::string>>{
           {"CHORALE_IFACE", "no9"}, {"CHORALE_IFACE", "l"}, {"NCCL_SOCKET_IFNAME", "=l"}}) {
    environment_.set(variable, value);
    try {
      own_address("");
      ADD_FAILURE();
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr(variable + "=" + value), HasSubstr("lo 127.0.0.1")));
    }
    environment_.unset(variable);
  }
}

TEST_F(InterfaceTest, AnExclusionLeavesTheOthersButLoopback) {
  const auto all = interfaces();
  const auto other = std::find_if(all.begin(), all.end(), [](const Interface& i) { return i.name != "lo"; });
  environment_.set("NCCL_SOCKET_IFNAME", "^no9");
  if (other == all.end()) {
    EXPECT_THROW(own_address(""), InvalidArgument);
  } else {
    EXPECT_EQ(own_address(""), other->address);
  }
}

TEST_F(InterfaceTest, AHostIsTheSameForAllItsProcesses) {
  EXPECT_EQ(host_identity(), host_identity());
  EXPECT_GE(host_identity().size(), 36U);
}

}  // namespace
}  // namespace chorale::transport
