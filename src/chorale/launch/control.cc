#include "chorale/launch/control.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <tuple>

#include "chorale/base/deadline.h"
#include "chorale/base/error.h"

namespace chorale::launch {
namespace {

using namespace std::chrono_literals;

constexpr size_t kLongestMessage = 512;
constexpr int kAnswersAtOnce = 8;  // the launcher has other things to do
constexpr auto kPatience = 10s;    // of whoever asks

struct Address {
  sockaddr_un place{};
  socklen_t bytes = 0;
};
// The name is in the abstract namespace, so that nothing is left behind.
Address address_of(pid_t launcher) {
  const std::string name = concat("chorale-run-", launcher);
  Address address;
  address.place.sun_family = AF_UNIX;
  std::memcpy(address.place.sun_path + 1, name.data(), name.size());
  address.bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return address;
}

// Whether the other end belongs to this user or root, and is the process that was meant, where its number is known (a
// process of another namespace shows none).
bool is_ours(int connection, pid_t process = 0) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  return getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 &&
         (peer.uid == geteuid() || peer.uid == 0) && (process == 0 || peer.pid == 0 || peer.pid == process);
}

// SO_RCVTIMEO or SO_SNDTIMEO, of one call; 0 would be for ever.
void limit_calls(int connection, int option, Deadline::Clock::duration time) {
  const auto us = std::max<int64_t>(std::chrono::duration_cast<std::chrono::microseconds>(time).count(), 1);
  const timeval limit{.tv_sec = us / 1'000'000, .tv_usec = us % 1'000'000};
  setsockopt(connection, SOL_SOCKET, option, &limit, sizeof limit);
}

// Up to the end of a line, or what there is by then.
std::string line_from(int connection, Deadline deadline) {
  std::string text;
  char buffer[kLongestMessage];
  while (text.size() < kLongestMessage && text.find('\n') == std::string::npos && !deadline.passed()) {
    limit_calls(connection, SO_RCVTIMEO, deadline.left());
    const ssize_t got = recv(connection, buffer, sizeof buffer, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    text.append(buffer, static_cast<size_t>(got));
  }
  return text.substr(0, text.find('\n'));
}

void say(int connection, const std::string& line) {
  const std::string text = line + "\n";
  std::ignore = send(connection, text.data(), text.size(), MSG_NOSIGNAL);
}

}  // namespace

Control::Control() : listening_(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
  const Address address = address_of(getpid());
  const auto* place = reinterpret_cast<const sockaddr*>(&address.place);
  // Where there is none, the job cannot be resized, and says so to whoever asks.
  if (!listening_ || bind(listening_.get(), place, address.bytes) != 0 || listen(listening_.get(), 8) != 0)
    listening_.reset();
}

void Control::answer(const std::function<std::string(const std::string&)>& reply) const {
  for (int turn = 0; listening_ && turn < kAnswersAtOnce; ++turn) {
    const Descriptor connection(accept4(listening_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!connection) return;
    if (!is_ours(connection.get())) continue;
    // A short time: the launcher has other things to do.
    say(connection.get(), reply(line_from(connection.get(), within(200ms))));
  }
}

std::string ask_launcher(pid_t launcher, const std::string& request) {
  const Descriptor connection(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  limit_calls(connection.get(), SO_SNDTIMEO, kPatience);  // also of connect(), when many wait there
  const Address address = address_of(launcher);
  const int problem =
      connect(connection.get(), reinterpret_cast<const sockaddr*>(&address.place), address.bytes) == 0 ? 0 : errno;
  CHORALE_CHECK_STATE(problem != EAGAIN, "[resize] the launcher, process ", launcher, ", does not answer");
  CHORALE_CHECK_STATE(problem == 0 && is_ours(connection.get(), launcher), "[resize] process ", launcher,
                      " is no launcher of a job with --elastic on this host");
  say(connection.get(), request);
  const std::string answer = line_from(connection.get(), within(kPatience));
  CHORALE_CHECK_STATE(!answer.empty(), "[resize] the launcher, process ", launcher, ", does not answer");
  return answer;
}

}  // namespace chorale::launch
