// The server against strangers and against clients that misbehave, and with many clients.
#include "chorale/transport/store/store_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <chrono>
#include <list>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/transport/fabric/control_channel.h"
#include "chorale/transport/security/refusals.h"
#include "chorale/transport/store/store_kinds_test_util.h"
#include "chorale/transport/store/store_protocol.h"
#include "chorale/transport/store/tcp_store.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

Deadline soon() { return within(20s); }

class StoreServerTest : public testing::Test {
 protected:
  TcpStore client() { return {server_.endpoint(), secret_, soon()}; }
  ControlChannel channel() {
    return ControlChannel::connect(server_.endpoint(), secret_, kStorePurpose, kMaxStoreMessageBytes, soon());
  }
  Socket stranger() { return connect_to(server_.endpoint(), soon()); }
  // A connection that has passed the handshake and may then send any bytes.
  std::pair<Socket, SessionMacs> proved() {
    Socket socket = stranger();
    ClientHandshake handshake(secret_, kStorePurpose);
    socket.send(handshake.hello(), soon());
    socket.send(handshake.answer(receive(socket, kChallengeBytes)), soon());
    SessionMacs macs = handshake.finish(receive(socket, kProofBytes));
    return {std::move(socket), macs};
  }
  static std::string receive(Socket& socket, size_t bytes) {
    std::string text(bytes, '\0');
    socket.receive(text, soon());
    return text;
  }
  static void expect_closed(Socket& socket) {
    std::string byte(1, '\0');
    EXPECT_THROW(socket.receive(byte, soon()), CommError);
  }
  // What the server logs while `attack` runs; afterwards it must still serve.
  std::string log_of(const std::function<void()>& attack) {
    testing::internal::CaptureStderr();
    attack();
    TcpStore friendly = client();
    const int64_t before = friendly.add("served", 0, soon());
    EXPECT_EQ(friendly.add("served", 1, soon()), before + 1);
    return testing::internal::GetCapturedStderr();
  }

  const std::optional<Secret> secret_ = Secret::generate();
  StoreServer server_{Endpoint::tcp("127.0.0.1", 0), secret_, {.handshake = 10s, .reply = 30s, .strangers = 8}};
};

TEST_F(StoreServerTest, AStrangerThatSendsGarbageIsRefusedAndLoggedWithItsAddress) {
  const std::string log = log_of([&] {
    Socket socket = stranger();
    socket.send("GET / HTTP/1.1\r\nHost: a.very.long.name.so.that.it.is.longer.than.a.hello\r\n\r\n", soon());
    expect_closed(socket);
  });
  EXPECT_THAT(log, AllOf(HasSubstr("refused 127.0.0.1:"), HasSubstr("at " + server_.endpoint().text()),
                         HasSubstr("no hello of ours")));
}

TEST_F(StoreServerTest, AWrongSecretIsRefusedOnBothSides) {
  const std::string log = log_of([&] {
    try {
      const TcpStore store(server_.endpoint(), Secret::generate(), soon());
      FAIL();
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr(server_.endpoint().text()), HasSubstr("CHORALE_SECRET_FILE")));
    }
  });
  EXPECT_THAT(log, AllOf(HasSubstr("refused 127.0.0.1:"), HasSubstr("does not know the secret")));
}

TEST_F(StoreServerTest, AReplayedConnectionIsRefused) {
  // Record what a good client says, then say it again.
  Socket good = stranger();
  ClientHandshake handshake(secret_, kStorePurpose);
  good.send(handshake.hello(), soon());
  const std::string proof = handshake.answer(receive(good, kChallengeBytes));
  good.send(proof, soon());
  receive(good, kProofBytes);
  const std::string log = log_of([&] {
    Socket replay = stranger();
    replay.send(handshake.hello() + proof, soon());
    receive(replay, kChallengeBytes);
    expect_closed(replay);
  });
  EXPECT_THAT(log, HasSubstr("does not know the secret"));
}

TEST_F(StoreServerTest, ASilentConnectionIsClosedAfterTheHandshakesTime) {
  for (const size_t sent : {size_t{0}, size_t{5}, kHelloBytes}) {
    const StoreServer hasty(Endpoint::tcp("127.0.0.1", 0), secret_, {.handshake = 100ms, .reply = 30s, .strangers = 8});
    const std::string log = log_of([&] {
      Socket socket = connect_to(hasty.endpoint(), soon());
      socket.send(ClientHandshake(secret_, kStorePurpose).hello().substr(0, sent), soon());
      if (sent == kHelloBytes) receive(socket, kChallengeBytes);
      expect_closed(socket);
    });
    EXPECT_THAT(log, AllOf(HasSubstr("refused 127.0.0.1:"), HasSubstr("no handshake in time"))) << sent;
  }
}

TEST_F(StoreServerTest, TooManySilentStrangersPushEachOtherOutNotTheRanks) {
  std::vector<Socket> strangers;
  const std::string log = log_of([&] {
    for (int i = 0; i < 12; ++i) strangers.push_back(stranger());
    for (int i = 0; i < 5; ++i) client().count(soon());
  });
  EXPECT_THAT(log, HasSubstr("more strangers came"));
}

TEST_F(StoreServerTest, ALengthBeyondTheBoundIsRefusedBeforeItIsAllocated) {
  const std::string log = log_of([&] {
    auto [socket, macs] = proved();
    socket.send(std::string(kMessageHeaderBytes, '\xff'), soon());
    expect_closed(socket);
  });
  EXPECT_THAT(log, HasSubstr("announces a message of 4294967295 bytes"));
}

TEST_F(StoreServerTest, AMessageThatWasChangedRepeatedOrIsNoRequestIsRefused) {
  const std::string request = encode(StoreRequest{StoreCall::kSet, 0, {"stolen", "x"}});
  const auto attempt = [&](const std::function<void(Socket&, MessageMac&)>& send) {
    return log_of([&] {
      auto [socket, macs] = proved();
      send(socket, macs.sending);
      expect_closed(socket);
    });
  };
  EXPECT_THAT(attempt([&](Socket& socket, MessageMac& mac) {
                std::string bytes = message_header(mac, request) + request;
                bytes.back() = 'y';
                socket.send(bytes, soon());
              }),
              HasSubstr("wrong MAC"));
  EXPECT_FALSE(client().contains("stolen", soon()));
  EXPECT_THAT(attempt([&](Socket& socket, MessageMac& mac) {
                const std::string count = encode(StoreRequest{StoreCall::kCount, 0, {}});
                const std::string bytes = message_header(mac, count) + count;
                socket.send(bytes, soon());
                const std::string header = receive(socket, kMessageHeaderBytes);
                receive(socket, message_bytes(header));
                socket.send(bytes, soon());
              }),
              HasSubstr("wrong MAC"));
  EXPECT_THAT(attempt([&](Socket& socket, MessageMac& mac) {
                socket.send(message_header(mac, "nonsense") + "nonsense", soon());
              }),
              HasSubstr("no request"));
}

TEST_F(StoreServerTest, ASecondRequestBeforeTheReplyIsRefused) {
  const std::string log = log_of([&] {
    auto [socket, macs] = proved();
    const std::string request = encode(StoreRequest{StoreCall::kGet, -1, {"never"}});
    for (int i = 0; i < 2; ++i) socket.send(message_header(macs.sending, request) + request, soon());
    expect_closed(socket);
  });
  EXPECT_THAT(log, HasSubstr("a request before the reply"));
}

TEST_F(StoreServerTest, AClientThatDoesNotReadDelaysNobody) {
  TcpStore friendly = client();
  friendly.set("large", std::string(kMaxStoreValueBytes, 'x'), soon());
  std::vector<ControlChannel> slow;
  for (int i = 0; i < 4; ++i) {
    slow.push_back(channel());
    slow.back().send(encode(StoreRequest{StoreCall::kGet, -1, {"large"}}), soon());
  }
  const auto start = Deadline::Clock::now();
  for (int i = 0; i < 100; ++i) friendly.add("n", 1, soon());
  EXPECT_LT(Deadline::Clock::now() - start, 15s);  // not the 30 s that a reply may take
  EXPECT_EQ(decode_reply(slow[0].receive(soon()))->words[0].size(), kMaxStoreValueBytes);  // late, but whole
}

TEST_F(StoreServerTest, AClientThatDoesNotReadItsReplyIsDroppedAfterAWhile) {
  StoreServer server(Endpoint::tcp("127.0.0.1", 0), secret_, {.handshake = 10s, .reply = 100ms, .strangers = 8});
  TcpStore friendly(server.endpoint(), secret_, soon());
  friendly.set("large", std::string(kMaxStoreValueBytes, 'x'), soon());
  auto slow = ControlChannel::connect(server.endpoint(), secret_, kStorePurpose, kMaxStoreMessageBytes, soon());
  testing::internal::CaptureStderr();
  slow.send(encode(StoreRequest{StoreCall::kGet, -1, {"large"}}), soon());
  for (const Deadline deadline = soon(); server.clients() > 1 && !deadline.passed();) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(server.clients(), 1);
  EXPECT_THROW(slow.receive(soon()), CommError);
  EXPECT_THAT(testing::internal::GetCapturedStderr(), HasSubstr("does not read its reply"));
  EXPECT_EQ(friendly.count(soon()), 1);
}

TEST_F(StoreServerTest, AClientMayLeaveInTheMiddleOfAWait) {
  for (int i = 0; i < 3; ++i) {
    ControlChannel leaving = channel();
    leaving.send(encode(StoreRequest{StoreCall::kWait, -1, {"a", "b"}}), soon());
  }
  ControlChannel staying = channel();
  staying.send(encode(StoreRequest{StoreCall::kWait, -1, {"a", "b"}}), soon());
  TcpStore store = client();
  store.set("a", "", soon());
  store.remove("a", soon());
  store.set("b", "", soon());  // now a is missing again
  EXPECT_THROW(staying.receive(within(50ms)), CommError);
  store.set("a", "", soon());
  EXPECT_EQ(decode_reply(staying.receive(soon()))->status, StoreStatus::kOk);
}

TEST_F(StoreServerTest, AThousandClientsWaitAtOnceAndAreAllServed) {
  constexpr int kClients = 1000;
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_max < 2 * kClients + 100) GTEST_SKIP() << "only " << limit.rlim_max << " descriptors";
  std::vector<ControlChannel> clients;
  for (int i = 0; i < kClients; ++i) {
    clients.push_back(channel());
    clients.back().send(encode(StoreRequest{StoreCall::kGet, -1, {"go"}}), soon());
  }
  TcpStore starter = client();
  starter.set("go", "now", soon());
  for (ControlChannel& waiting : clients) EXPECT_EQ(decode_reply(waiting.receive(soon()))->words.at(0), "now");
  for (ControlChannel& active : clients) active.send(encode(StoreRequest{StoreCall::kAdd, 1, {"n"}}), soon());
  for (ControlChannel& active : clients) active.receive(soon());
  EXPECT_EQ(starter.get("n", soon()), "1000");
}

TEST(StoreServer, ALostServerIsAnErrorThatNamesIt) {
  const Secret secret = Secret::generate();
  auto server = std::make_unique<StoreServer>(Endpoint::tcp("127.0.0.1", 0), secret);
  const std::string address = server->endpoint().text();
  TcpStore store(server->endpoint(), secret, soon());
  std::thread waiting([&] {
    try {
      store.get("never", soon());
      ADD_FAILURE();
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), AllOf(HasSubstr("get 'never'"), HasSubstr(address)));
    }
  });
  std::this_thread::sleep_for(50ms);
  server.reset();
  waiting.join();
  EXPECT_THROW(store.set("a", "", within(100ms)), CommError);
}

TEST(StoreServer, AClientMayStartFirst) {
  const Secret secret = Secret::generate();
  const Endpoint endpoint = scratch_unix_endpoint();
  std::thread early([&] { EXPECT_EQ(TcpStore(endpoint, secret, soon()).add("n", 1, soon()), 1); });
  std::this_thread::sleep_for(50ms);
  StoreServer server(endpoint, secret);
  early.join();
}

TEST(StoreServer, NoServerIsAnErrorAtTheDeadline) {
  const auto start = Deadline::Clock::now();
  try {
    const TcpStore store(Endpoint::tcp("127.0.0.1", 1), Secret::generate(), within(100ms));
    FAIL();
  } catch (const CommError& error) {
    EXPECT_THAT(error.what(), AllOf(HasSubstr("127.0.0.1:1"), HasSubstr("refused")));
  }
  EXPECT_LT(Deadline::Clock::now() - start, 5s);
}

TEST(StoreServer, ListensOnlyWhereItIsTold) {
  EXPECT_THROW(StoreServer(Endpoint::tcp("0.0.0.0", 0), Secret::generate()), InvalidArgument);
  EXPECT_THROW(StoreServer(Endpoint::tcp("::", 0), Secret::generate()), InvalidArgument);
  const StoreServer server(Endpoint::tcp("127.0.0.1", 0), Secret::generate());
  EXPECT_EQ(server.endpoint().host, "127.0.0.1");
  EXPECT_THROW(StoreServer(server.endpoint(), Secret::generate()), CommError);  // taken
}

TEST(StoreServer, WithoutASecretThereIsNoTcp) {
  EXPECT_THROW(StoreServer(Endpoint::tcp("127.0.0.1", 0), std::nullopt), InvalidArgument);
  EXPECT_THROW(TcpStore(Endpoint::tcp("127.0.0.1", 1), std::nullopt, soon()), InvalidArgument);
}

// A stranger that opens connections faster than the server drops them pushes ranks out in the middle of their
// handshake.
TEST_F(StoreServerTest, RanksGetInThroughAFloodOfStrangers) {
  std::atomic<bool> ending = false;
  std::atomic<int> opened = 0;
  testing::internal::CaptureStderr();
  std::thread flood([&] {
    std::list<Socket> held;
    while (!ending) {
      held.push_back(stranger());
      ++opened;
      if (held.size() > 1200) held.pop_front();
    }
  });
  while (opened < 1100) std::this_thread::sleep_for(1ms);
  std::vector<std::thread> ranks;
  ranks.reserve(8);
  for (int rank = 0; rank < 8; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        for (int i = 0; i < 5; ++i) client().set(concat(rank, "/", i), "x", soon());
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
      }
    });
  }
  for (auto& rank : ranks) rank.join();
  ending = true;
  flood.join();
  testing::internal::GetCapturedStderr();
  EXPECT_EQ(client().count(soon()), 40);
}

TEST_F(StoreServerTest, AnotherServerAtTheSamePlaceIsAnotherStore) {
  auto first = std::make_unique<StoreServer>(Endpoint::tcp("127.0.0.1", 0), secret_);
  const Endpoint place = first->endpoint();
  TcpStore store(place, secret_, soon());
  store.set("a", "b", soon());
  first.reset();
  const StoreServer second(place, secret_);
  for (int i = 0; i < 3; ++i) EXPECT_THROW(store.contains("a", soon()), StoreLost);
  EXPECT_FALSE(TcpStore(place, secret_, soon()).contains("a", soon()));
}

TEST(Strangers, TheAddressThatHoldsMostLosesItsOldest) {
  EXPECT_EQ(stranger_to_drop({"10.0.0.1:5", "10.0.0.2:5", "10.0.0.2:6"}), 1u);
  EXPECT_EQ(stranger_to_drop({"10.0.0.1:5", "10.0.0.2:5"}), 0u);
  EXPECT_EQ(stranger_to_drop({"[fe80::1]:5", "[fe80::2]:7", "[fe80::1]:6", "[fe80::2]:9", "[fe80::2]:1"}), 1u);
}

TEST_F(StoreServerTest, WhatIsWantedAtTheEndOfAConnectionIsSetThen) {
  TcpStore other = client();
  {
    const StoreWill will(server_.endpoint(), secret_, "gone", "for good", soon());
    EXPECT_FALSE(other.contains("gone", soon()));
  }
  EXPECT_EQ(other.get("gone", soon()), "for good");
  EXPECT_THROW(StoreWill(server_.endpoint(), secret_, "", "x", soon()), InvalidArgument);
}

}  // namespace
}  // namespace chorale::transport
