#include "chorale/transport/fabric/control_mesh.h"

#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <optional>
#include <sstream>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/transport/fabric/control_frame.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr auto kGoodbyeTime = 500ms;
constexpr int kTicksPerKeepAlive = 16;
constexpr int kTicksPerHeartbeat = 2;
// A peer that is stopped for long must not get its connection filled; after so many heartbeats that it did not answer
// the kernel alone asks whether its host is there.
constexpr int kMaxUnanswered = 64;
constexpr size_t kMaxUnsentBytes = 1 << 20;
constexpr size_t kMaxEarlyNotices = 1024;

std::string seconds_text(Clock::duration time) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(1) << std::chrono::duration<double>(time).count() << " s";
  return std::move(text).str();
}

// What the other host has acknowledged so far, and whether anything that was sent to it is not.
struct Acknowledged {
  uint64_t bytes;
  bool all;
};
Acknowledged acknowledged_by(int descriptor) {
  tcp_info info{};
  socklen_t size = sizeof info;
  getsockopt(descriptor, IPPROTO_TCP, TCP_INFO, &info, &size);
  return {info.tcpi_bytes_acked, info.tcpi_unacked == 0};
}

// The kernel asks an idle connection's host four times in the keep-alive, once a second at most, and gives up then.
void ask_when_idle(int descriptor, Clock::duration keep_alive) {
  const auto quarter = std::chrono::duration_cast<std::chrono::seconds>(keep_alive / 4).count();
  const int seconds = static_cast<int>(std::clamp<int64_t>(quarter, 1, 3600)), count = 3;
  setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
  setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
  setsockopt(descriptor, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
}

}  // namespace

class ControlMesh::Peer final : public IoLoop::Handler {
 public:
  Peer(ControlMesh& mesh, int rank, TlsStream stream) : mesh_(mesh), rank_(rank), stream_(std::move(stream)) {
    heard_ = Clock::now();
    life_.address = stream_.peer().substr(0, stream_.peer().rfind(':'));
    ask_when_idle(stream_.descriptor(), mesh.keep_alive_);
  }

  void start() {
    mesh_.loop_.watch(stream_.descriptor(), EPOLLIN, *this);
    // The handshake may have read the first notice too.
    if (stream_.holds_input()) mesh_.loop_.again(*this, EPOLLIN);
  }

  void on_ready(uint32_t events) override {
    std::vector<std::string> notices;
    {
      const std::lock_guard lock(mutex_);
      if (ending_) return;
      try {
        if ((events & EPOLLOUT) != 0) flush();
        read(notices);
      } catch (const Error& error) {
        end(Life::State::kLost, error.what());
      }
    }
    for (const std::string& notice : notices) mesh_.deliver(rank_, notice);
  }

  void send(ControlKind kind, std::string_view body) {
    const std::lock_guard lock(mutex_);
    send_locked(kind, body);
  }

  // Looks at the clock; `beats` says whether a heartbeat is due.
  void tick(bool beats, std::string_view status) {
    {
      const std::lock_guard lock(mutex_);
      if (!ending_) watch_life();
      if (!ending_ && beats && unanswered_ < kMaxUnanswered) {
        ++unanswered_;
        send_locked(ControlKind::kStatus, status);
      }
    }
    finish();
  }
  Life life() const {
    const std::lock_guard lock(mutex_);
    Life life = life_;
    if (life.state == Life::State::kSilent) {
      life.text = concat("silent for ", seconds_text(Clock::now() - heard_), ": stopped by a signal or a debugger?");
    }
    return life;
  }

  void suspect(const std::string& why) {
    {
      const std::lock_guard lock(mutex_);
      if (!suspected_) suspected_ = {Clock::now(), why};
    }
    mesh_.loop_.post([this] { finish(); });
  }

  void lose(const std::string& why) {
    const std::lock_guard lock(mutex_);
    if (gone_) return;
    send_locked(ControlKind::kAccuse, std::string_view(why).substr(0, kMaxNoticeBytes));
    ending_.reset();
    end(Life::State::kLost, why);
    ending_->at_once = true;
  }

  bool has_ended() const {
    const std::lock_guard lock(mutex_);
    return ending_.has_value();
  }

 private:
  struct Ending {
    Clock::time_point since;
    Life::State state;
    std::string text;
    bool at_once = false;
    bool accuses = false;
  };

  Clock::duration grace() const { return std::clamp<Clock::duration>(mesh_.keep_alive_ / 4, 50ms, 500ms); }

  void end(Life::State state, const std::string& text) {
    if (ending_) return;
    ending_ = Ending{Clock::now(), state, text};
    mesh_.loop_.forget(stream_.descriptor());
    stream_.close();
    mesh_.events_.add();
    mesh_.loop_.post([this] { finish(); });
  }

  void flush() {
    const bool done = stream_.flush();
    if (done == waits_for_room_) {
      waits_for_room_ = !done;
      mesh_.loop_.change(stream_.descriptor(), done ? EPOLLIN : EPOLLIN | EPOLLOUT, *this);
    }
  }

  void send_locked(ControlKind kind, std::string_view body) {
    if (ending_ || stream_.unsent_bytes() > kMaxUnsentBytes) return;
    try {
      const std::string frame = encode_control_frame(kind, body);
      stream_.write(std::as_bytes(std::span(frame)));
      flush();
    } catch (const CommError&) {
      // Reading tells what happened to the peer, and its last words before that.
    }
  }

  void read(std::vector<std::string>& notices) {
    std::array<std::byte, 4096> bytes;
    do {
      const ptrdiff_t n = stream_.read(bytes);
      if (n == TlsStream::kEnd) return end(Life::State::kLost, "ended: killed, crashed or exited");
      if (n == 0) return;
      input_.append(reinterpret_cast<const char*>(bytes.data()), static_cast<size_t>(n));
      std::string_view rest = input_;
      while (const auto frame = take_control_frame(rest)) hear(*frame, notices);
      input_.erase(0, input_.size() - rest.size());
    } while (!ending_ && stream_.holds_input());
  }

  void hear(const ControlFrame& frame, std::vector<std::string>& notices) {
    heard_ = Clock::now();
    heard_at_ = mesh_.watched_;
    unanswered_ = 0;
    if (life_.state == Life::State::kSilent) {
      life_.state = Life::State::kConnected;
      mesh_.events_.add();
    }
    switch (frame.kind) {
      case ControlKind::kStatus:
        std::memcpy(life_.status.data(), frame.body.data(), frame.body.size());
        return;
      case ControlKind::kNotice:
        notices.emplace_back(frame.body);
        return;
      case ControlKind::kGoodbye:
        end(Life::State::kLeft, "left: its work is done, or it was told to end");
        return;
      case ControlKind::kDrop:
        end(Life::State::kLost, concat("dropped the connection: ", frame.body));
        return;
      case ControlKind::kAccuse:
        end(Life::State::kLost, concat("dropped the connection, because it got this from us: ", frame.body));
        ending_->accuses = ending_->at_once = true;
        return;
    }
  }

  void watch_life() {
    const Clock::duration now = mesh_.watched_;
    const Acknowledged acknowledged = acknowledged_by(stream_.descriptor());
    if (acknowledged.all || acknowledged.bytes != acknowledged_bytes_) {
      acknowledged_bytes_ = acknowledged.bytes;
      acknowledged_at_ = now;
    }
    // The last look at which all was well may have been a tick before what is not acknowledged was sent.
    if (now - acknowledged_at_ > mesh_.keep_alive_ + mesh_.keep_alive_ / kTicksPerKeepAlive) {
      end(Life::State::kLost, concat("unreachable: acknowledged nothing for ", seconds_text(now - acknowledged_at_),
                                     "; is its host down, or the network?"));
      ending_->at_once = true;
    } else if (suspected_ && Clock::now() - suspected_->first > mesh_.keep_alive_) {  // by then a dead host is known
      send_locked(ControlKind::kDrop, std::string_view(suspected_->second).substr(0, kMaxNoticeBytes));
      end(Life::State::kLost, suspected_->second);
    } else if (now - heard_at_ > mesh_.keep_alive_ && life_.state == Life::State::kConnected) {
      life_.state = Life::State::kSilent;
      mesh_.events_.add();
    }
  }

  // Announces the end when it is time to. It runs in the mesh's thread.
  void finish() {
    const bool drained = has_ended() && mesh_.owner_.drained(rank_);
    Life life;
    {
      const std::lock_guard lock(mutex_);
      if (!ending_ || gone_) return;
      if (!drained && !ending_->at_once && Clock::now() - ending_->since < grace()) return;
      gone_ = true;
      life = life_;
      life.state = ending_->state;
      life.text = ending_->text;
      life.accuses = ending_->accuses;
    }
    // A thread that sees the peer gone finds its transfers ended.
    mesh_.owner_.on_gone(rank_, life);
    {
      const std::lock_guard lock(mutex_);
      life_ = life;
    }
    mesh_.events_.add();
  }

  ControlMesh& mesh_;
  const int rank_;
  mutable std::mutex mutex_;  // of all that follows
  TlsStream stream_;
  std::string input_;
  bool waits_for_room_ = false;
  Life life_;
  Clock::time_point heard_;
  // Times of the clock watched_ of the mesh: when the peer was heard, and when its host had acknowledged all or
  // something new.
  Clock::duration heard_at_{}, acknowledged_at_{};
  uint64_t acknowledged_bytes_ = 0;
  int unanswered_ = 0;  // heartbeats since anything was heard
  std::optional<std::pair<Clock::time_point, std::string>> suspected_;
  std::optional<Ending> ending_;
  bool gone_ = false;
};

ControlMesh::ControlMesh(std::map<int, TlsStream>&& streams, std::chrono::milliseconds keep_alive, Owner& owner)
    : keep_alive_(keep_alive), owner_(owner), last_tick_(Clock::now()) {
  for (auto& [rank, stream] : streams) peers_.emplace(rank, std::make_unique<Peer>(*this, rank, std::move(stream)));
}

ControlMesh::~ControlMesh() = default;

ControlMesh::Peer& ControlMesh::peer(int rank) const {
  const auto found = peers_.find(rank);
  CHORALE_CHECK(found != peers_.end(), "[fabric] rank ", rank, " is not on another host of this job");
  return *found->second;
}

void ControlMesh::start() {
  for (const auto& [rank, peer] : peers_) peer->start();
  loop_.start(keep_alive_ / kTicksPerKeepAlive, [this] { tick(); });
}

void ControlMesh::leave() {
  for (const auto& [rank, peer] : peers_) peer->send(ControlKind::kGoodbye, {});
  const Deadline deadline = within(std::min<Clock::duration>(keep_alive_, kGoodbyeTime));
  while (!deadline.passed()) {
    const uint32_t seen = events_.now();
    if (std::all_of(peers_.begin(), peers_.end(), [](const auto& entry) { return entry.second->has_ended(); })) break;
    events_.wait(seen, deadline);
  }
  loop_.stop();
}

void ControlMesh::tick() {
  const auto now = Clock::now();
  watched_ += std::min<Clock::duration>(now - last_tick_, keep_alive_ / kTicksPerKeepAlive * 2);
  last_tick_ = now;
  const bool beats = ticks_++ % kTicksPerHeartbeat == 0;
  std::array<uint64_t, 8> status;
  {
    const std::lock_guard lock(status_mutex_);
    status = status_;
  }
  const std::string_view body(reinterpret_cast<const char*>(status.data()), sizeof status);
  for (const auto& [rank, peer] : peers_) peer->tick(beats, body);
}

void ControlMesh::tell(std::span<const int> peers, std::string_view notice) {
  CHORALE_CHECK(notice.size() <= kMaxNoticeBytes, "[fabric] a notice of ", notice.size(), " bytes; at most ",
                kMaxNoticeBytes);
  for (const int rank : peers) peer(rank).send(ControlKind::kNotice, notice);
}

void ControlMesh::on_notice(std::function<void(int, std::string_view)> hear) {
  const std::lock_guard lock(hearing_);
  hear_ = std::move(hear);
  if (hear_ && !early_.empty()) loop_.post([this] { deliver_early(); });
}

void ControlMesh::deliver(int rank, const std::string& notice) {
  const std::lock_guard lock(hearing_);
  if (early_.size() < kMaxEarlyNotices) early_.emplace_back(rank, notice);
  if (hear_) deliver_locked();
}

void ControlMesh::deliver_early() {
  const std::lock_guard lock(hearing_);
  if (hear_) deliver_locked();
}

void ControlMesh::deliver_locked() {
  for (const auto& [rank, notice] : std::exchange(early_, {})) hear_(rank, notice);
}

void ControlMesh::set_status(const std::array<uint64_t, 8>& status) {
  const std::lock_guard lock(status_mutex_);
  status_ = status;
}

Life ControlMesh::life(int rank) const { return peer(rank).life(); }
void ControlMesh::suspect(int rank, const std::string& why) { peer(rank).suspect(why); }
void ControlMesh::lose(int rank, const std::string& why) { peer(rank).lose(why); }

}  // namespace chorale::transport
