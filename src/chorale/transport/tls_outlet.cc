#include "chorale/transport/tls_outlet.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <utility>

#include "chorale/base/comm_error.h"

namespace chorale::transport {
namespace {

// Then others have their turn.
constexpr int kFramesPerTurn = 8;

}  // namespace

TlsOutlet::TlsOutlet(TlsStream stream, IoLoop& loop, Produce produce, Broken broken)
    : stream_(std::move(stream)), loop_(loop), produce_(std::move(produce)), broken_(std::move(broken)) {
  loop_.watch(stream_.descriptor(), 0, *this);
}

template <class Action>
void TlsOutlet::guarded(const Action& action) {
  std::string why;
  {
    const std::lock_guard lock(mutex_);
    if (is_closed_) return;
    try {
      action();
      return;
    } catch (const CommError& error) {
      why = error.what();
      is_closed_ = true;
      loop_.forget(stream_.descriptor());
    }
  }
  broken_(why);
}

void TlsOutlet::watch_room(bool wanted) {
  if (waits_for_room_ == wanted) return;
  waits_for_room_ = wanted;
  loop_.change(stream_.descriptor(), wanted ? uint32_t{EPOLLOUT} : 0, *this);
}

void TlsOutlet::send(const Frame& frame, std::span<const std::byte> body) {
  guarded([&] {
    const Frame sealed = seal(frame);
    stream_.write(std::as_bytes(std::span(&sealed, 1)), body);
    if (!waits_for_room_) watch_room(!stream_.flush());
  });
}

void TlsOutlet::produce_and_flush() {
  for (int frames = 0; frames < kFramesPerTurn; ++frames) {
    if (!stream_.flush()) break;
    if (!produce_ || !produce_(stream_)) return watch_room(false);
  }
  watch_room(true);
}

void TlsOutlet::pump() {
  guarded([&] {
    if (!waits_for_room_) produce_and_flush();
  });
}

void TlsOutlet::on_ready(uint32_t events) {
  guarded([&] {
    if ((events & (EPOLLERR | EPOLLHUP)) != 0) throw CommError("the connection to " + stream_.peer() + " broke");
    produce_and_flush();
  });
}

void TlsOutlet::flush(Deadline deadline) {
  bool done = false;
  while (!done && !deadline.passed()) {
    int descriptor = -1;
    done = true;
    guarded([&] {
      descriptor = stream_.descriptor();
      done = stream_.flush();
    });
    pollfd state{descriptor, POLLOUT, 0};
    if (!done) poll(&state, 1, 10);
  }
}

void TlsOutlet::end() {
  guarded([&] { shutdown(stream_.descriptor(), SHUT_WR); });
}

void TlsOutlet::close() {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(is_closed_, true)) loop_.forget(stream_.descriptor());
  stream_.close();
}

}  // namespace chorale::transport
