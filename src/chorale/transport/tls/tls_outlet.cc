#include "chorale/transport/tls/tls_outlet.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "chorale/base/comm_error.h"

namespace chorale::transport {
namespace {

// After so many frames others have their turn.
constexpr int kFramesPerTurn = 8;

}  // namespace

TlsOutlet::TlsOutlet(TlsStream stream, IoLoop& loop, std::shared_ptr<Chaos> chaos, Produce produce, Broken broken)
    : stream_(std::move(stream)),
      loop_(loop),
      chaos_(std::move(chaos)),
      produce_(std::move(produce)),
      broken_(std::move(broken)) {
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
    write(frame, body);
    if (!waits_for_room_) watch_room(!flush_now());
  });
}

void TlsOutlet::write(const Frame& frame, std::span<const std::byte> body) {
  Frame sealed = seal(frame);
  if (chaos_) return write_with_faults(sealed, body);
  stream_.write(std::as_bytes(std::span(&sealed, 1)), body);
}

void TlsOutlet::write_with_faults(Frame& frame, std::span<const std::byte> body) {
  const bool is_data = !body.empty() && (frame.kind == FrameKind::kEager || frame.kind == FrameKind::kChunk);
  const Chaos::Write fault = chaos_->before_write(kFrameBytes + body.size(), is_data);
  const auto head = std::as_writable_bytes(std::span(&frame, 1));
  if (fault.reset) {
    const linger reset{1, 0};
    setsockopt(stream_.descriptor(), SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    stream_.close();
    throw CommError("the connection to " + stream_.peer() + " was reset on purpose");
  }
  if (fault.corrupt_control) chaos_->flip(head);
  std::vector<std::byte> copy;
  if (fault.corrupt_payload) {
    copy.assign(body.begin(), body.end());
    chaos_->flip(copy);
    body = copy;
  }
  most_bytes_ = std::min(fault.most, most_bytes_);
  stream_.write(head, body);
}

bool TlsOutlet::flush_now() { return stream_.flush(std::exchange(most_bytes_, SIZE_MAX)); }

void TlsOutlet::produce_and_flush() {
  for (int frames = 0; frames < kFramesPerTurn; ++frames) {
    if (!flush_now()) break;
    if (!produce_ || !produce_(*this)) return watch_room(false);
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
