#include "chorale/transport/store/store_server.h"

#include <algorithm>
#include <asio/buffer.hpp>
#include <asio/generic/stream_protocol.hpp>
#include <asio/io_context.hpp>
#include <asio/posix/stream_descriptor.hpp>
#include <asio/read.hpp>
#include <asio/steady_timer.hpp>
#include <asio/write.hpp>
#include <atomic>
#include <list>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "chorale/base/comm_error.h"
#include "chorale/base/descriptors.h"
#include "chorale/base/error.h"
#include "chorale/base/log.h"
#include "chorale/transport/fabric/control_channel.h"
#include "chorale/transport/security/refusals.h"
#include "chorale/transport/store/store_protocol.h"
#include "chorale/transport/store/store_table.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;
using StreamSocket = asio::generic::stream_protocol::socket;

}  // namespace

// Everything below runs in the server's thread, except construction and destruction.
class StoreServer::Impl {
 public:
  Impl(const Endpoint& endpoint, std::optional<Secret> secret, Limits limits)
      : secret_(std::move(secret)), limits_(limits), listener_(listen_at(endpoint)), endpoint_(endpoint_of(listener_)) {
    allow_many_descriptors();
    acceptor_.assign(listener_.descriptor());
    accept_next();
    thread_ = std::thread([this] { context_.run(); });
  }

  ~Impl() {
    context_.stop();
    thread_.join();
    waiting_.clear();  // sessions need the context to go
    acceptor_.release();
  }

  const Endpoint& endpoint() const { return endpoint_; }
  int clients() const { return clients_.load(); }

 private:
  class Session;
  using SessionPtr = std::shared_ptr<Session>;

  void accept_next();
  void welcome(Socket socket);
  // Runs a request, or leaves the session waiting for a key.
  void serve(const SessionPtr& session);
  void wait_for(const std::string& key, const SessionPtr& session);
  void stop_waiting(const Session& session);
  void key_appeared(const std::string& key);
  StoreReply run_call(const StoreRequest& request);
  void carry_out(const std::vector<std::string>& will);

  const std::optional<Secret> secret_;
  const Digest id_ = random_bytes();
  const Limits limits_;
  StoreTable table_;
  std::map<std::string, std::vector<SessionPtr>, std::less<>> waiting_;  // by the key each waits for at the moment
  std::list<std::weak_ptr<Session>> strangers_;                          // the oldest first
  std::atomic<int> clients_ = 0;                                         // proved and connected

  asio::io_context context_{1};
  Socket listener_;
  Endpoint endpoint_;
  Refusals refusals_{"store", endpoint_.text()};
  asio::posix::stream_descriptor acceptor_{context_};
  asio::steady_timer accept_pause_{context_};
  std::thread thread_;
};

// One connection. It has at most one request and one reply in memory: a client that sends a second request before it
// has read the answer to the first breaks the protocol and is closed. While a request waits for a key, the next header
// is being read, so that a client that leaves is noticed.
class StoreServer::Impl::Session : public std::enable_shared_from_this<Session> {
 public:
  Session(Impl& server, Socket socket)
      : server_(server),
        peer_(socket.peer()),
        socket_(server.context_, asio::generic::stream_protocol(0, 0), socket.release()),
        timer_(server.context_),
        handshake_(server.secret_, kStorePurpose) {}

  void start() {
    close_after(server_.limits_.handshake, "no handshake in time");
    read(kHelloBytes, [this] {
      spoke_ = true;
      write(handshake_.challenge(buffer_), [this] {
        read(kProofBytes, [this] {
          // From here on it is no stranger, which others might push out while the answer is on its way.
          const std::string answer = handshake_.answer(buffer_);
          macs_ = handshake_.macs();
          ++server_.clients_;
          write(answer, [this] {
            timer_.cancel();
            read_request();
          });
        });
      });
    });
  }

  void reply(const StoreReply& reply) {
    request_.reset();
    waits_for.clear();
    std::string message = encode(reply);
    if (message.size() > kMaxStoreMessageBytes) {
      message = encode(StoreReply{StoreStatus::kInvalid, 0, {"[store] the answer is too large; ask for fewer keys"}});
    }
    replying_ = true;
    close_after(server_.limits_.reply, "does not read its reply");
    write(message_header(macs_->sending, message) + message, [this] {
      replying_ = false;
      timer_.cancel();
    });
  }

  // After a timeout of its own the request is answered with what is missing.
  void answer_timeout_after(std::chrono::milliseconds time) {
    timer_.expires_after(time);
    timer_.async_wait([this, self = shared_from_this()](const asio::error_code& error) {
      if (error || !request_ || closed_) return;
      server_.stop_waiting(*this);
      reply({StoreStatus::kTimeout, 0, server_.table_.missing(request_->words)});
    });
  }

  void close(const std::string& why) {
    if (std::exchange(closed_, true)) return;
    if (proved()) --server_.clients_;
    if (!why.empty()) server_.refusals_.add(peer_, why);
    server_.stop_waiting(*this);
    asio::error_code ignored;
    socket_.close(ignored);
    timer_.cancel();
    server_.carry_out(std::exchange(will, {}));
  }

  bool closed() const { return closed_; }
  const std::string& peer() const { return peer_; }
  bool spoke() const { return spoke_; }  // it said hello as ranks do
  bool proved() const { return macs_.has_value(); }
  const std::optional<StoreRequest>& request() const { return request_; }

  std::string waits_for;          // a key, while the request waits; the server sets it
  std::vector<std::string> will;  // empty, or what is set when this connection ends

 private:
  void read_request() {
    read(kMessageHeaderBytes, [this] {
      if (request_ || replying_) return close("a request before the reply to the one before");
      const uint32_t bytes = message_bytes(buffer_);
      if (bytes > kMaxStoreMessageBytes) return close(concat("announces a message of ", bytes, " bytes"));
      const std::string mac(message_mac(buffer_));
      read(bytes, [this, mac] {
        if (!macs_->receiving.check_next(buffer_, mac)) return close("a message with a wrong MAC");
        request_ = decode_request(buffer_);
        if (!request_) return close("a message that is no request");
        server_.serve(shared_from_this());
        if (!closed_) read_request();
      });
    });
  }

  // Reads into buffer_. An end of the connection after the handshake is nothing special.
  template <class Next>
  void read(size_t bytes, Next next) {
    buffer_.resize(bytes);
    asio::async_read(
        socket_, asio::buffer(buffer_),
        [this, self = shared_from_this(), next](const asio::error_code& error, size_t) { go_on(error, next); });
  }

  template <class Next>
  void write(std::string bytes, Next next) {
    output_ = std::move(bytes);
    asio::async_write(
        socket_, asio::buffer(output_),
        [this, self = shared_from_this(), next](const asio::error_code& error, size_t) { go_on(error, next); });
  }

  template <class Next>
  void go_on(const asio::error_code& error, const Next& next) {
    if (closed_) return;
    if (error) return close(proved() ? "" : "left before the handshake was done");
    try {
      next();
    } catch (const Error& problem) {  // of the handshake
      close(problem.what());
    }
  }

  void close_after(std::chrono::milliseconds time, std::string why) {
    timer_.expires_after(time);
    timer_.async_wait([this, self = shared_from_this(), why = std::move(why)](const asio::error_code& error) {
      if (!error) close(why);
    });
  }

  Impl& server_;
  const std::string peer_;
  StreamSocket socket_;
  asio::steady_timer timer_;  // of the handshake, of a wait, or of a reply
  ServerHandshake handshake_;
  std::optional<SessionMacs> macs_;
  std::string buffer_;
  std::string output_;
  std::optional<StoreRequest> request_;
  bool spoke_ = false;
  bool replying_ = false;
  bool closed_ = false;
};

void StoreServer::Impl::accept_next() {
  acceptor_.async_wait(asio::posix::descriptor_base::wait_read, [this](const asio::error_code& error) {
    if (error) return;
    try {
      // A flood of strangers does not keep those that are in from being served.
      constexpr int kAtOnce = 32;
      for (int i = 0; i < kAtOnce; ++i) {
        Socket socket = accept_at(listener_);
        if (!socket) break;
        welcome(std::move(socket));
      }
      accept_next();
    } catch (const CommError& problem) {  // no descriptors or no memory: later there may be
      log_warning(concat("[store] ", problem.what()));
      accept_pause_.expires_after(100ms);
      accept_pause_.async_wait([this](const asio::error_code&) { accept_next(); });
    }
  });
}

void StoreServer::Impl::welcome(Socket socket) {
  strangers_.remove_if([](const std::weak_ptr<Session>& other) {
    const SessionPtr live = other.lock();
    return !live || live->closed() || live->proved();
  });
  if (strangers_.size() >= limits_.strangers) {
    // The silent ones go first: a rank says hello at once, and would be pushed out of its handshake by a flood from its
    // own host.
    std::vector<std::string> peers;
    std::vector<std::list<std::weak_ptr<Session>>::iterator> places;
    for (const bool spoke : {false, true}) {
      if (!peers.empty()) break;
      for (auto at = strangers_.begin(); at != strangers_.end(); ++at) {
        const SessionPtr session = at->lock();
        if (session->spoke() != spoke) continue;
        peers.push_back(session->peer());
        places.push_back(at);
      }
    }
    const auto dropped = places[stranger_to_drop(peers)];
    dropped->lock()->close("more strangers came");
    strangers_.erase(dropped);
  }
  const auto session = std::make_shared<Session>(*this, std::move(socket));
  strangers_.push_back(session);
  session->start();
}

void StoreServer::Impl::serve(const SessionPtr& session) {
  const StoreRequest& request = *session->request();
  try {
    if (request.call == StoreCall::kGet || request.call == StoreCall::kWait) {
      for (const std::string& key : request.words) check_store_key(key);
      const std::vector<std::string> missing = table_.missing(request.words);
      if (!missing.empty()) return wait_for(missing.front(), session);
    }
    const StoreReply reply = run_call(request);
    if (request.call == StoreCall::kWill) session->will = request.words;
    session->reply(reply);
  } catch (const InvalidArgument& problem) {
    session->reply({StoreStatus::kInvalid, 0, {problem.what()}});
  }
}

void StoreServer::Impl::wait_for(const std::string& key, const SessionPtr& session) {
  waiting_[key].push_back(session);
  const bool first = session->waits_for.empty();
  session->waits_for = key;
  const int64_t limit_ms = session->request()->number;
  if (first && limit_ms >= 0)
    session->answer_timeout_after(std::min<std::chrono::milliseconds>(limit_ms * 1ms, 24h * 365));
}

void StoreServer::Impl::stop_waiting(const Session& session) {
  const auto entry = waiting_.find(session.waits_for);
  if (entry == waiting_.end()) return;
  std::erase_if(entry->second, [&](const SessionPtr& other) { return other.get() == &session; });
  if (entry->second.empty()) waiting_.erase(entry);
}

void StoreServer::Impl::key_appeared(const std::string& key) {
  auto entry = waiting_.extract(key);
  if (!entry) return;
  for (const SessionPtr& session : entry.mapped()) serve(session);
}

StoreReply StoreServer::Impl::run_call(const StoreRequest& request) {
  const auto& words = request.words;
  StoreReply reply;
  switch (request.call) {
    case StoreCall::kSet:
      table_.set(words[0], words[1]);
      key_appeared(words[0]);
      break;
    case StoreCall::kGet:
      reply.words.push_back(*table_.find(words[0]));
      break;
    case StoreCall::kWait:
      break;
    case StoreCall::kContains:
      check_store_key(words[0]);
      reply.number = table_.find(words[0]) ? 1 : 0;
      break;
    case StoreCall::kAdd:
      reply.number = table_.add(words[0], request.number);
      key_appeared(words[0]);
      break;
    case StoreCall::kCompareSet:
      reply.words.push_back(table_.compare_set(words[0], words[1], words[2]));
      if (table_.find(words[0])) key_appeared(words[0]);
      break;
    case StoreCall::kRemove:
      reply.number = table_.remove(words[0]) ? 1 : 0;
      break;
    case StoreCall::kKeys:
      reply.words = table_.keys(words[0]);
      break;
    case StoreCall::kCount:
      reply.number = table_.count();
      break;
    case StoreCall::kWho:
      reply.words.emplace_back(view(id_));
      break;
    case StoreCall::kWill:
      check_store_key(words[0]);
      check_store_value(words[0], words[1]);
      break;  // the session keeps it
  }
  return reply;
}

void StoreServer::Impl::carry_out(const std::vector<std::string>& will) {
  if (will.empty()) return;
  table_.set(will[0], will[1]);
  key_appeared(will[0]);
}

StoreServer::StoreServer(const Endpoint& endpoint, std::optional<Secret> secret, Limits limits) {
  CHORALE_CHECK(secret || endpoint.is_unix(), "[store] a server at ", endpoint.text(),
                " needs the job's secret: set CHORALE_SECRET_FILE on every node, or start the ranks with chorale run");
  const StandardDescriptorsHeld held;  // Asio's own descriptors are not ours to move
  impl_ = std::make_unique<Impl>(endpoint, std::move(secret), limits);
}

StoreServer::~StoreServer() = default;

const Endpoint& StoreServer::endpoint() const { return impl_->endpoint(); }

int StoreServer::clients() const { return impl_->clients(); }

void StoreServer::wait_for_clients_to_leave(Deadline deadline) const {
  while (clients() > 0 && !deadline.passed()) std::this_thread::sleep_for(2ms);
}

}  // namespace chorale::transport
