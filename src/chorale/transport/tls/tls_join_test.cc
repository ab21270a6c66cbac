// Which connections get in.
#include "chorale/transport/tls/tls_join.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <future>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/transport/fabric/fabric_test_util.h"
#include "chorale/transport/tls/tls_fabric.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

FabricOptions options(int rank, const char* secret = "the secret of a test, which is long enough") {
  FabricOptions made = test_options(rank);
  made.secret = Secret::from_bytes(secret);
  return made;
}

Endpoint place(const TlsJoin& join) { return Endpoint::parse(join.endpoint().substr(0, join.endpoint().find('#'))); }
std::string token(const TlsJoin& join) { return join.endpoint().substr(join.endpoint().find('#') + 1); }

// Rank 0 waits for rank 1, which comes after the strangers.
class TlsJoinTest : public testing::Test {
 protected:
  // What rank 0 logs; both ranks must get connected in the end.
  std::string log_of(const std::function<void()>& attack) {
    testing::internal::CaptureStderr();
    auto waiting = std::async(std::launch::async, [&] { return zero_.meet(addresses_, 3, soon()); });
    attack();
    const auto met = one_.meet(addresses_, 3, soon());
    EXPECT_EQ(met.at(0).size(), 3U);
    EXPECT_EQ(waiting.get().at(1).size(), 3U);
    return testing::internal::GetCapturedStderr();
  }
  Socket stranger() const { return connect_to(place(zero_), soon()); }
  static void expect_closed(Socket& socket) {
    std::string byte(1, '\0');
    EXPECT_THROW(while (true) socket.receive(byte, soon()), CommError);
  }

  TlsJoin zero_{options(0), "127.0.0.1"};
  TlsJoin one_{options(1), "127.0.0.1"};
  const std::vector<FabricAddress> addresses_{{1, zero_.endpoint(), {}}, {2, one_.endpoint(), {}}};
};

TEST_F(TlsJoinTest, GarbageIsRefused) {
  const std::string log = log_of([&] {
    Socket socket = stranger();
    socket.send("GET / HTTP/1.1\r\nHost: example\r\n\r\n", soon());
    expect_closed(socket);
  });
  EXPECT_THAT(log, AllOf(HasSubstr("refused 127.0.0.1:"), HasSubstr("at " + place(zero_).text()),
                         HasSubstr("no rank of this job")));
}

TEST_F(TlsJoinTest, AWrongSecretIsRefusedOnBothSides) {
  const std::string log = log_of([&] {
    TlsJoin wrong(options(1, "another secret, which is long enough, too"), "127.0.0.1");
    const std::vector<FabricAddress> addresses{{1, zero_.endpoint(), {}}, {2, wrong.endpoint(), {}}};
    try {
      wrong.meet(addresses, 3, soon());
      FAIL() << "a wrong secret got in";
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("is that rank 0"), HasSubstr("the same secret")));
      EXPECT_EQ(error.failure().peer, 0);
    }
    // One that knows all but the secret.
    TlsStream thief = TlsStream::client(stranger(), *options(1, "another secret, which is long enough, too").secret,
                                        {token(zero_), token(one_), 1, 0, 0});
    EXPECT_THROW(while (thief.handshake() != TlsStream::Step::kDone) std::this_thread::yield(), CommError);
  });
  EXPECT_THAT(log, AllOf(HasSubstr("refused 127.0.0.1:"), HasSubstr("a wrong secret?")));
}

TEST_F(TlsJoinTest, AHalfOpenConnectionDelaysNobody) {
  std::vector<Socket> silent;
  log_of([&] {
    for (int i = 0; i < 200; ++i) silent.push_back(stranger());
  });
}

// A recorded first message is worth nothing: the answer to it cannot be understood without the secret.
TEST_F(TlsJoinTest, AReplayDoesNotTakeTheRanksPlace) {
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, pair), 0);
  TlsStream recorded =
      TlsStream::client(Socket(pair[0], "a recorder"), *options(1).secret, {token(zero_), token(one_), 1, 0, 0});
  EXPECT_EQ(recorded.handshake(), TlsStream::Step::kNeedsInput);
  std::string hello(4096, '\0');
  const ssize_t bytes = read(pair[1], hello.data(), hello.size());
  ASSERT_GT(bytes, 100);
  hello.resize(static_cast<size_t>(bytes));
  close(pair[1]);
  Socket thief = stranger();
  log_of([&] {
    thief.send(hello, soon());
    std::string answer(1, '\0');
    thief.receive(answer, soon());
  });
  expect_closed(thief);
}

TEST_F(TlsJoinTest, ARankOfAnotherJobAtTheSamePlaceIsRefused) {
  log_of([&] {
    const std::vector<FabricAddress> addresses{{1, place(zero_).text() + "#0123456789abcdef", {}},
                                               {2, one_.endpoint(), {}}};
    TlsJoin other(options(1), "127.0.0.1");
    EXPECT_THROW(other.meet(addresses, 3, soon()), CommError);
  });
}

// A second process that has read where rank 0 listens, and says that it is rank 1, is not the rank 1 of this meeting.
TEST_F(TlsJoinTest, AnotherProcessThanTheOneThatTookTheSeatIsRefused) {
  const std::string log = log_of([&] {
    TlsJoin other(options(1), "127.0.0.1");
    const std::vector<FabricAddress> addresses{{1, zero_.endpoint(), {}}, {2, other.endpoint(), {}}};
    EXPECT_THROW(other.meet(addresses, 3, soon()), CommError);
  });
  EXPECT_THAT(log, AllOf(HasSubstr("refused 127.0.0.1:"), HasSubstr("no rank of this job that is expected")));
}

TEST_F(TlsJoinTest, TheTokenNamesTheProcess) {
  EXPECT_THAT(token(zero_), HasSubstr(concat("-", getpid(), "-")));
  EXPECT_NE(token(zero_), token(one_));  // two joins of one process are two
}

TEST(TlsJoin, RanksThatDoNotComeAreNamed) {
  TlsJoin zero(options(0), "127.0.0.1");
  try {
    zero.meet({{1, zero.endpoint(), {}}, {1, "-", {}}, {2, "10.0.0.7:1#a", {}}}, 3, within(50ms));
    FAIL() << "connected to nobody";
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), HasSubstr("rank 0 is not connected to rank 2 (10.0.0.7:1#a) in time"));
  }
}

TEST(TlsJoin, NeedsASecretAndOneAddress) {
  FabricOptions open;
  EXPECT_THROW(make_tls_fabric(open, "127.0.0.1"), InvalidArgument);
  EXPECT_THROW(make_tls_fabric(options(0), "0.0.0.0"), InvalidArgument);
}

TEST(StreamIdentity, HasOneSpelling) {
  const StreamIdentity identity{"00ff-1-2", "7-3-4", 12, 3, 1};
  EXPECT_EQ(StreamIdentity::parse(identity.text()), identity);
  EXPECT_EQ(identity.text(), "chorale-fabric-2 00ff-1-2 7-3-4 12 3 1");
  for (const char* wrong : {"", "chorale-fabric-2", "chorale-fabric-2 00ff 7 12 3", "chorale-fabric-2 00ff 7 12 3 1 ",
                            "chorale-fabric-2 00ff 7 012 3 1", "chorale-fabric-2 00ff 7 -1 3 1", "other 00ff 7 12 3 1",
                            "chorale-fabric-1 00ff 12 3 1", "chorale-fabric-2 00ff 7 12 3 99999999999"}) {
    EXPECT_FALSE(StreamIdentity::parse(wrong)) << wrong;
  }
}

}  // namespace
}  // namespace chorale::transport
