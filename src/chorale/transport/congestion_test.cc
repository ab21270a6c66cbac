#include "chorale/transport/congestion.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <vector>

#include "chorale/base/error.h"
#include "chorale/transport/fabric/fabric_test_util.h"
#include "chorale/transport/socket.h"

namespace chorale::transport {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::Field;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StrEq;

TEST(CongestionControl, OnlyBbrAndOnlyToPrivateAddressesIsReplaced) {
  EXPECT_THAT(better_congestion_controls("bbr", true), ElementsAre(StrEq("cubic"), StrEq("reno")));
  EXPECT_THAT(better_congestion_controls("bbr2", true), testing::SizeIs(2));
  EXPECT_THAT(better_congestion_controls("bbr", false), IsEmpty());
  EXPECT_THAT(better_congestion_controls("dctcp", true), IsEmpty());
  EXPECT_THAT(better_congestion_controls("cubic", true), IsEmpty());
}

TEST(CongestionControl, PrivateAddressesAreKnown) {
  for (const char* address : {"10.0.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.1", "192.168.3.4", "100.64.0.1",
                              "169.254.1.1", "127.0.0.1", "::1", "fe80::1%eth0", "fd12:3456::1"}) {
    EXPECT_TRUE(is_private_address(address)) << address;
  }
  for (const char* address : {"11.0.0.1", "9.255.255.255", "172.15.0.1", "172.32.0.1", "192.169.0.1", "100.128.0.1",
                              "8.8.8.8", "2001:db8::1", "fec0::1", "node1", "", "0.0.0.0"}) {
    EXPECT_FALSE(is_private_address(address)) << address;
  }
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

// Whatever the system's is, sockets of this host are without BBR's timers; and accepted ones have what the listener
// has.
TEST(CongestionControl, OfASocketIsChosenBeforeItIsConnected) {
  const Socket listener = listen_at(Endpoint::tcp("127.0.0.1", 0));
  choose_congestion_control(listener.descriptor(), "127.0.0.1", "");
  EXPECT_THAT(congestion_control_of(listener.descriptor()), testing::Not(testing::StartsWith("bbr")));
  EXPECT_EQ(congestion_control_of(listener.descriptor()), usual_congestion_control("127.0.0.1"));
  choose_congestion_control(listener.descriptor(), "127.0.0.1", "reno");
  int prepared = -1;
  const Socket client = connect_to(endpoint_of(listener), soon(), [&](int descriptor) {
    prepared = descriptor;
    choose_congestion_control(descriptor, "127.0.0.1", "reno");
  });
  Socket server;
  while (!server) server = accept_at(listener);
  EXPECT_EQ(prepared, client.descriptor());
  EXPECT_EQ(congestion_control_of(client.descriptor()), "reno");
  EXPECT_EQ(congestion_control_of(server.descriptor()), "reno");
  EXPECT_THAT(tcp_listeners(), Contains(testing::AllOf(Field(&Listener::descriptor, listener.descriptor()),
                                                       Field(&Listener::address, "127.0.0.1"))));
  EXPECT_THAT(tcp_listeners(), testing::Not(Contains(Field(&Listener::descriptor, client.descriptor()))));
}

// Looks at all connections of tls, and at those of UCX that its peers have opened.
class CongestionOfFabric : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override { CHORALE_SKIP_WITHOUT_FABRIC(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(Fabrics, CongestionOfFabric, testing::ValuesIn(kFabricNames),
                         [](const auto& one) { return std::string(one.param); });

TEST_P(CongestionOfFabric, IsTheOneThatWasNamed) {
  const auto count = [] {
    int found = 0;
    for (int descriptor = 0; descriptor < 1024; ++descriptor) found += congestion_control_of(descriptor) == "reno";
    return found;
  };
  FabricOptions options = test_options(0);
  options.congestion = "reno";
  const bool is_tls = std::string_view(GetParam()) == "tls";
  const int before = count();
  const auto fabrics = connect_ranks_over(GetParam(), 2, options);
  // Two ends each: of the control connection and those for short and bulk data; UCX has its listeners and, of each
  // connection, at least the end that was accepted.
  EXPECT_GE(count() - before, is_tls ? 2 * (1 + 2 * (1 + options.streams)) : 2 + 2 + 1);
  options.congestion = "astrology";
  EXPECT_THROW(connect_ranks_over(GetParam(), 2, options), InvalidArgument);
}

}  // namespace
}  // namespace chorale::transport
