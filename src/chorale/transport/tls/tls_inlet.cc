#include "chorale/transport/tls/tls_inlet.h"

#include <sys/epoll.h>

#include <algorithm>
#include <utility>

#include "chorale/base/comm_error.h"
#include "chorale/base/crc32c.h"
#include "chorale/base/error.h"

namespace chorale::transport {
namespace {

// After so many bytes others have their turn.
constexpr size_t kBytesPerTurn = 1 << 20;

}  // namespace

TlsInlet::TlsInlet(TlsStream stream, IoLoop& loop, int peer, Receiver& receiver, std::mutex& landing)
    : stream_(std::move(stream)), loop_(loop), peer_(peer), receiver_(receiver), landing_(landing) {
  loop_.watch(stream_.descriptor(), EPOLLIN, *this);
  // The handshake may have read the first message too: the kernel has nothing left to announce then.
  if (stream_.holds_input()) loop_.again(*this, EPOLLIN);
}

void TlsInlet::close() {
  if (std::exchange(is_closed_, true)) return;
  loop_.forget(stream_.descriptor());
  stream_.close();
}

void TlsInlet::on_ready(uint32_t) {
  if (is_closed_) return;
  try {
    size_t total = 0;
    do {
      const size_t n = read_some();
      if (n == 0 || is_closed_) return;
      total += n;
      if (total >= kBytesPerTurn) return loop_.again(*this, EPOLLIN);
    } while (message_ || head_done_ > 0 || stream_.holds_input());
  } catch (const CommError& error) {
    close();
    receiver_.on_end(peer_, error.what());
  } catch (const InvalidArgument& error) {
    close();
    receiver_.on_nonsense(peer_, error.what());
  }
}

size_t TlsInlet::read_some() { return message_ ? read_body() : read_head(); }

size_t TlsInlet::checked(ptrdiff_t n) {
  if (n != TlsStream::kEnd) return static_cast<size_t>(n);
  close();
  receiver_.on_end(peer_, "closed its connections: killed, crashed or exited");
  return 0;
}

size_t TlsInlet::read_head() {
  const size_t n = checked(stream_.read(std::span(head_).subspan(head_done_)));
  head_done_ += n;
  if (head_done_ < head_.size()) return n;
  head_done_ = 0;
  frame_ = parse_frame(head_);
  MessagePtr message = receiver_.on_frame(peer_, frame_);
  if (body_bytes(frame_) > 0) {
    message_ = std::move(message);
    body_done_ = 0;
    checksum_ = 0;
  } else if (message) {
    receiver_.on_body(peer_, frame_, message);
  }
  return n;
}

size_t TlsInlet::read_body() {
  std::array<std::byte, 16 << 10> thrown_away;
  const size_t left = body_bytes(frame_) - body_done_;
  size_t n = 0;
  {
    const std::lock_guard lock(landing_);
    std::byte* const to = message_->to;
    const auto into = to ? std::span(to + frame_.offset + body_done_, left)
                         : std::span(thrown_away).first(std::min(left, thrown_away.size()));
    n = checked(stream_.read(into));
    if (frame_.has_checksum != 0) checksum_ = crc32c(into.first(n), checksum_);
  }
  body_done_ += n;
  if (n == left) {
    if (frame_.has_checksum != 0) check_checksum(frame_.checksum, checksum_, peer_);
    receiver_.on_body(peer_, frame_, std::exchange(message_, nullptr));
  }
  return n;
}

}  // namespace chorale::transport
