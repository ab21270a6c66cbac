#include "chorale/launch/control.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstring>
#include <future>
#include <string>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/testing/message_test_util.h"

namespace chorale::launch {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

std::string with_thanks(const std::string& request) { return concat("thanks for ", request); }

// A peer that connects by itself, to the place that Control gave to this process.
Descriptor stranger() {
  sockaddr_un place{};
  place.sun_family = AF_UNIX;
  const std::string name = concat("chorale-run-", getpid());
  std::memcpy(place.sun_path + 1, name.data(), name.size());
  Descriptor connection(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  EXPECT_EQ(connect(connection.get(), reinterpret_cast<const sockaddr*>(&place), bytes), 0);
  return connection;
}

TEST(Control, AnswersALineWithALine) {
  const Control control;
  auto answer = std::async(std::launch::async, [] { return ask_launcher(getpid(), "resize 3"); });
  pollfd wanted{control.descriptor(), POLLIN, 0};
  ASSERT_EQ(poll(&wanted, 1, 10'000), 1);
  control.answer(with_thanks);
  EXPECT_EQ(answer.get(), "thanks for resize 3");
}

TEST(Control, WhereNobodyListensThatIsSaid) {
  EXPECT_THAT(message_of<StateError>([] { ask_launcher(getpid(), "resize 3"); }), HasSubstr("is no launcher"));
}

// The launcher's own work goes on in between.
TEST(Control, AnswersEightATurn) {
  const Control control;
  std::vector<Descriptor> peers;
  for (int i = 0; i < 9; ++i) {
    peers.push_back(stranger());
    ASSERT_EQ(send(peers.back().get(), "a\n", 2, 0), 2);
  }
  int answers = 0;
  const auto count = [&](const std::string& request) { return concat(request, ++answers); };
  control.answer(count);
  EXPECT_EQ(answers, 8);
  control.answer(count);
  EXPECT_EQ(answers, 9);
}

// A peer that sends letter by letter has no more time than one that sends nothing.
TEST(Control, ALineHasOneDeadline) {
  const Control control;
  const Descriptor peer = stranger();
  std::promise<void> answered;
  auto over = answered.get_future();
  const auto slow = std::async(std::launch::async, [&] {
    for (int i = 0; i < 400 && over.wait_for(50ms) == std::future_status::timeout; ++i)
      if (send(peer.get(), "x", 1, MSG_NOSIGNAL) < 0) return;
  });
  std::string heard = "nothing";
  control.answer([&](const std::string& request) { return heard = request; });
  answered.set_value();
  EXPECT_LT(heard.size(), 100u);
}

}  // namespace
}  // namespace chorale::launch
