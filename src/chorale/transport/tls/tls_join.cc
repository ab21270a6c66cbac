#include "chorale/transport/tls/tls_join.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/transport/congestion.h"
#include "chorale/transport/shm/peer_process.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;

constexpr auto kHandshakeTime = 5s;
// The pause between two looks whether the ranks have changed, for a rank that does not get through to a peer.
constexpr auto kLookForEnd = 500ms;
// Strangers that may be there beside those that are expected.
constexpr size_t kMaxStrangers = 64;
// A flood of strangers may push a rank out of the queue; a wrong secret does not get better.
constexpr int kAttempts = 3;

const Secret& checked(const std::optional<Secret>& secret) {
  CHORALE_CHECK(secret,
                "[tls] connections between hosts need the job's secret: set CHORALE_SECRET_FILE on every node, "
                "or start the ranks with chorale run");
  return *secret;
}

// Random, and of this process since its start: no other process has it, and none that comes later has its number.
std::string new_token() {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  const Digest random = random_bytes();
  for (const char byte : view(random).substr(0, 8)) {
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  const shm::ProcessId& process = shm::this_process();
  return concat(text, "-", process.pid, "-", process.start_time);
}

struct Place {
  Endpoint endpoint;
  std::string token;
};
Place place_of(const FabricAddress& address) {
  const size_t mark = address.endpoint.rfind('#');
  CHORALE_CHECK(mark != std::string::npos, "[tls] expected HOST:PORT#TOKEN, not '", address.endpoint, "'");
  return {Endpoint::parse(std::string_view(address.endpoint).substr(0, mark)), address.endpoint.substr(mark + 1)};
}

}  // namespace

struct TlsJoin::Visitor {
  TlsStream stream;
  Deadline limit;
  // The rank of a peer that we connect to; otherwise -1 until the handshake is done.
  int peer = -1;
  int index = -1;
  int attempt = 1;
  short waits_for = POLLIN;
};

TlsJoin::TlsJoin(const FabricOptions& options, const std::string& own_address)
    : rank_(options.rank),
      secret_(checked(options.secret)),
      congestion_(checked_congestion_control(options.congestion)),
      is_over_(options.is_over),
      token_(new_token()),
      listener_(listen_at(Endpoint::tcp(own_address, 0))),
      endpoint_(concat(endpoint_of(listener_).text(), "#", token_)),
      refusals_("tls", endpoint_of(listener_).text()) {
  allow_many_descriptors();
  choose_congestion_control(listener_.descriptor(), own_address, congestion_);
}

TlsJoin::~TlsJoin() = default;

bool TlsJoin::expects(const StreamIdentity& identity) const {
  if (identity.to_token != token_ || identity.to != rank_ || identity.from <= rank_ ||
      identity.from >= static_cast<int>(addresses_.size()) || identity.stream >= streams_ ||
      addresses_[static_cast<size_t>(identity.from)].host == addresses_[static_cast<size_t>(rank_)].host ||
      identity.from_token != tokens_[static_cast<size_t>(identity.from)]) {
    return false;
  }
  const auto peer = met_.find(identity.from);
  return peer == met_.end() || !peer->second.contains(identity.stream);
}

void TlsJoin::check_over() const {
  if (is_over_ && is_over_())
    throw CommError(concat("[tls] rank ", rank_, ": the ranks have changed while they connected"),
                    CommFailure{rank_, -1, {}, -1});
}

void TlsJoin::visit(int peer, int stream, int attempt, Deadline deadline) {
  const Place place = place_of(addresses_[static_cast<size_t>(peer)]);
  const StreamIdentity identity{place.token, token_, rank_, peer, stream};
  const auto prepare = [&](int descriptor) { choose_congestion_control(descriptor, place.endpoint.host, congestion_); };
  Socket socket;
  while (!socket) {
    check_over();
    const Deadline next_look = is_over_ ? deadline.earlier(within(kLookForEnd)) : deadline;
    try {
      socket = connect_to(place.endpoint, next_look, prepare);
    } catch (const CommError&) {
      if (deadline.passed() || !next_look.passed()) throw;
    }
  }
  const auto visitor =
      visitors_.insert(visitors_.end(), {TlsStream::client(std::move(socket), secret_, identity),
                                         deadline.earlier(within(kHandshakeTime)), peer, stream, attempt});
  if (!go_on(*visitor, deadline)) visitors_.erase(visitor);
}

void TlsJoin::welcome(Deadline deadline) {
  while (Socket socket = accept_at(listener_)) {
    if (visitors_.size() >= left_ + kMaxStrangers) {
      std::vector<std::list<Visitor>::iterator> strangers;
      std::vector<std::string> peers;
      for (auto visitor = visitors_.begin(); visitor != visitors_.end(); ++visitor) {
        if (visitor->peer >= 0) continue;
        strangers.push_back(visitor);
        peers.push_back(visitor->stream.peer());
      }
      const auto dropped = strangers[stranger_to_drop(peers)];
      refusals_.add(dropped->stream.peer(), "more strangers came");
      visitors_.erase(dropped);
    }
    visitors_.push_back({TlsStream::server(std::move(socket), secret_, [this](const auto& id) { return expects(id); }),
                         deadline.earlier(within(kHandshakeTime))});
  }
}

bool TlsJoin::go_on(Visitor& visitor, Deadline deadline) {
  const bool is_stranger = visitor.peer < 0;
  try {
    switch (visitor.stream.handshake()) {
      case TlsStream::Step::kNeedsInput:
        visitor.waits_for = POLLIN;
        return true;
      case TlsStream::Step::kNeedsOutput:
        visitor.waits_for = POLLOUT;
        return true;
      case TlsStream::Step::kDone:
        break;
    }
  } catch (const CommError& error) {
    if (is_stranger) {
      refusals_.add(visitor.stream.peer(), error.what());
    } else if (visitor.attempt == kAttempts || deadline.passed()) {
      throw CommError(concat(error.what(), "; is that rank ", visitor.peer,
                             " of this job, and has every rank the same secret (CHORALE_SECRET_FILE)?"),
                      CommFailure{rank_, visitor.peer, {}, -1});
    } else {
      visit(visitor.peer, visitor.index, visitor.attempt + 1, deadline);
    }
    return false;
  }
  const StreamIdentity& identity = visitor.stream.identity();
  // Two may have come with the same identity at the same time.
  if (is_stranger && !expects(identity)) {
    refusals_.add(visitor.stream.peer(), concat("stream ", identity.stream, " of rank ", identity.from, " twice"));
    return false;
  }
  met_[is_stranger ? identity.from : visitor.peer].emplace(identity.stream, std::move(visitor.stream));
  --left_;
  return false;
}

std::string TlsJoin::missing() const {
  std::string ranks;
  for (size_t peer = 0; peer < addresses_.size(); ++peer) {
    if (addresses_[peer].host == addresses_[static_cast<size_t>(rank_)].host) continue;
    const auto found = met_.find(static_cast<int>(peer));
    if (found != met_.end() && static_cast<int>(found->second.size()) == streams_) continue;
    ranks += concat(ranks.empty() ? "" : ", ", peer, " (", addresses_[peer].endpoint, ")");
  }
  return ranks;
}

std::map<int, std::vector<TlsStream>> TlsJoin::meet(const std::vector<FabricAddress>& addresses, int streams,
                                                    Deadline deadline) {
  const auto own = static_cast<size_t>(rank_);
  CHORALE_CHECK(rank_ >= 0 && own < addresses.size(), "[tls] rank ", rank_, " among ", addresses.size(), " addresses");
  addresses_ = addresses;
  streams_ = streams;
  tokens_.resize(addresses_.size());
  for (size_t peer = 0; peer < addresses_.size(); ++peer) {
    if (addresses_[peer].host == addresses_[own].host) continue;
    tokens_[peer] = place_of(addresses_[peer]).token;
    left_ += static_cast<size_t>(streams);
  }
  for (int peer = 0; peer < rank_; ++peer) {
    if (addresses_[static_cast<size_t>(peer)].host == addresses_[own].host) continue;
    for (int stream = 0; stream < streams; ++stream) visit(peer, stream, 1, deadline);
  }
  std::vector<pollfd> states;
  while (left_ > 0) {
    states.assign(1, {listener_.descriptor(), POLLIN, 0});
    for (const Visitor& visitor : visitors_) states.push_back({visitor.stream.descriptor(), visitor.waits_for, 0});
    poll(states.data(), states.size(), 20);
    check_over();
    if (deadline.passed()) {
      throw CommError(concat("[tls] rank ", rank_, " is not connected to rank ", missing(),
                             " in time; are they up, and does a firewall let them through? CHORALE_IFACE names the "
                             "interface to use"),
                      CommFailure{rank_, -1, {}, -1});
    }
    // Retries are added at the end, and have their turn the next time.
    auto visitor = visitors_.begin();
    for (size_t i = 1; i < states.size(); ++i) {
      bool keep = !visitor->limit.passed();
      if (!keep && visitor->peer < 0) refusals_.add(visitor->stream.peer(), "no handshake in time");
      if (!keep && visitor->peer >= 0) visit(visitor->peer, visitor->index, visitor->attempt, deadline);
      if (keep && states[i].revents != 0) keep = go_on(*visitor, deadline);
      visitor = keep ? std::next(visitor) : visitors_.erase(visitor);
    }
    if (states[0].revents != 0) welcome(deadline);
  }
  visitors_.clear();
  listener_ = Socket();
  std::map<int, std::vector<TlsStream>> result;
  for (auto& [peer, found] : met_) {
    for (auto& [index, stream] : found) result[peer].push_back(std::move(stream));
  }
  return result;
}

}  // namespace chorale::transport
