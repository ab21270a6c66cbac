#include "chorale/transport/socket.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/transport/fabric/control_channel.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;

TEST(Endpoint, TextAndParseAreInverse) {
  for (const char* text : {"node1:29500", "10.0.0.1:1", "[fe80::1]:65535", "unix:a/name"}) {
    EXPECT_EQ(Endpoint::parse(text).text(), text);
  }
  EXPECT_EQ(Endpoint::parse("[::1]:80").host, "::1");
}

TEST(Endpoint, WhatIsNoEndpointIsRefused) {
  for (const char* text :
       {"", "node1", "node1:", ":80", "node1:65536", "node1:-1", "node1:8o", "::1:80", "[]:80", "unix:"}) {
    EXPECT_THROW(Endpoint::parse(text), InvalidArgument) << text;
  }
}

TEST(Socket, AReceiveThatGetsNothingEndsAtItsDeadline) {
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair), 0);
  Socket here(pair[0], "there"), there(pair[1], "here");
  std::string byte(1, '\0');
  EXPECT_THROW(here.receive(byte, within(20ms)), CommError);
  there.send("x", within(1s));
  here.receive(byte, within(1s));
  EXPECT_EQ(byte, "x");
  EXPECT_THROW(here.send(std::string(64 << 20, 'x'), within(20ms)), CommError);  // nobody reads
}

TEST(Socket, LocalHostsAreKnown) {
  EXPECT_TRUE(is_local_host("127.0.0.1"));
  EXPECT_TRUE(is_local_host("localhost"));
  EXPECT_FALSE(is_local_host("192.0.2.1"));  // reserved for documentation
  EXPECT_FALSE(is_local_host("no.such.host.invalid"));
}

TEST(ControlChannel, ServesOtherConnectionsThanTheStores) {
  const Secret secret = Secret::generate();
  const Socket listener = listen_at(Endpoint::tcp("127.0.0.1", 0));
  std::thread client([&] {
    auto channel = ControlChannel::connect(endpoint_of(listener), secret, "keep-alive", 100, within(5s));
    channel.send("ping", within(5s));
    EXPECT_EQ(channel.receive(within(5s)), "pong");
    EXPECT_THROW(channel.send(std::string(101, 'x'), within(5s)), InvalidArgument);
  });
  Socket accepted;
  while (!(accepted = accept_at(listener))) std::this_thread::sleep_for(1ms);
  auto channel = ControlChannel::accept(std::move(accepted), secret, "keep-alive", 100, within(5s));
  EXPECT_EQ(channel.receive(within(5s)), "ping");
  channel.send("pong", within(5s));
  client.join();
}

}  // namespace
}  // namespace chorale::transport
