#include "chorale/transport/congestion.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/transport/fabric_test_util.h"
#include "chorale/transport/socket.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

TEST(CongestionControl, OnlyBbrAndOnlyNearbyIsReplaced) {
  EXPECT_THAT(better_congestion_controls("bbr", 100us), ElementsAre(testing::StrEq("cubic"), testing::StrEq("reno")));
  EXPECT_THAT(better_congestion_controls("bbr2", 100us), testing::SizeIs(2));
  EXPECT_THAT(better_congestion_controls("bbr", 20ms), IsEmpty());
  EXPECT_THAT(better_congestion_controls("bbr", std::chrono::microseconds::max()), IsEmpty());
  EXPECT_THAT(better_congestion_controls("dctcp", 100us), IsEmpty());
  EXPECT_THAT(better_congestion_controls("cubic", 100us), IsEmpty());
}

TEST(CongestionControl, ThatTheKernelDoesNotKnowIsRefusedWithThoseThatItAllows) {
  try {
    checked_congestion_control("astrology");
    FAIL() << "it was taken";
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), testing::AllOf(HasSubstr("CHORALE_CONGESTION is 'astrology'"), HasSubstr("reno")));
  }
  EXPECT_EQ(checked_congestion_control("reno"), "reno");
  EXPECT_EQ(checked_congestion_control(""), "");
}

// Whatever the system's is, a connection on this host ends without BBR's timers.
TEST(CongestionControl, OfAConnectionIsChosen) {
  const Socket listener = listen_at(Endpoint::tcp("127.0.0.1", 0));
  Socket client = connect_to(endpoint_of(listener), soon());
  Socket server;
  while (!server) server = accept_at(listener);
  client.send("x", soon());
  std::string byte(1, '\0');
  server.receive(byte, soon());
  EXPECT_THAT(tcp_connections(), testing::IsSupersetOf({client.descriptor(), server.descriptor()}));
  EXPECT_THAT(tcp_connections(), testing::Not(testing::Contains(listener.descriptor())));
  choose_congestion_control(client.descriptor(), "");
  EXPECT_THAT(congestion_control_of(client.descriptor()), testing::Not(testing::StartsWith("bbr")));
  choose_congestion_control(client.descriptor(), "reno");
  EXPECT_EQ(congestion_control_of(client.descriptor()), "reno");
}

// All connections of a fabric: those of tls, and those that UCX has opened.
class CongestionOfFabric : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { CHORALE_SKIP_WITHOUT_FABRIC(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Fabrics, CongestionOfFabric, testing::ValuesIn(kFabricNames),
                         [](const auto& one) { return std::string(one.param); });

TEST_P(CongestionOfFabric, IsTheOneThatWasNamed) {
  const std::vector<int> before = tcp_connections();
  FabricOptions options = test_options(0);
  options.congestion = "reno";
  const auto fabrics = connect_ranks_over(GetParam(), 2, options);
  int found = 0;
  for (int descriptor : tcp_connections()) {
    if (std::find(before.begin(), before.end(), descriptor) != before.end()) continue;
    EXPECT_EQ(congestion_control_of(descriptor), "reno");
    ++found;
  }
  // Both ends of the control connection, and at least one more connection.
  EXPECT_GE(found, 4);
  options.congestion = "astrology";
  EXPECT_THROW(connect_ranks_over(GetParam(), 2, options), InvalidArgument);
}

}  // namespace
}  // namespace chorale::transport
