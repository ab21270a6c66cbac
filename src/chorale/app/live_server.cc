#include "chorale/app/live_server.h"

#include <httplib.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

#include "chorale/base/deadline.h"
#include "chorale/base/error.h"
#include "chorale/report/page.h"

namespace chorale::app {
namespace {

using namespace std::chrono_literals;

constexpr auto kLookEvery = 500ms;  // at the files of the run
constexpr auto kRequestTime = 5s;   // from the connection to the end of its request
constexpr auto kWriteTime = 5s;     // without that a byte of the answer is taken
constexpr int kMostConnections = LiveServer::kMostStreams + 64;

// One connection, for one request. The library's own waits for each byte anew, and has no limit for all of them.
class Connection final : public httplib::Stream {
 public:
  explicit Connection(socket_t socket) : socket_(socket), until_(within(kRequestTime)) {}

  bool is_readable() const override { return begin_ < end_ || is_ready(POLLIN, until_); }
  bool is_writable() const override { return is_ready(POLLOUT, within(kWriteTime)); }
  ssize_t read(char* to, size_t size) override {
    if (begin_ == end_) {
      if (!is_ready(POLLIN, until_)) return -1;
      const ssize_t found = recv(socket_, bytes_.data(), bytes_.size(), 0);
      if (found <= 0) return found;
      begin_ = 0;
      end_ = static_cast<size_t>(found);
    }
    const size_t taken = std::min(size, end_ - begin_);
    std::copy_n(bytes_.data() + begin_, taken, to);
    begin_ += taken;
    return static_cast<ssize_t>(taken);
  }
  ssize_t write(const char* from, size_t size) override {
    return is_writable() ? send(socket_, from, size, MSG_NOSIGNAL | MSG_DONTWAIT) : -1;
  }
  void get_remote_ip_and_port(std::string& ip, int& port) const override { ip = "127.0.0.1", port = 0; }
  void get_local_ip_and_port(std::string& ip, int& port) const override { ip = "127.0.0.1", port = 0; }
  socket_t socket() const override { return socket_; }

  // Called by another thread: the one that reads from the socket then sees its end.
  void drop() const { ::shutdown(socket_, SHUT_RDWR); }

 private:
  bool is_ready(short events, Deadline until) const {
    pollfd state{socket_, events, 0};
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until.left());
    return poll(&state, 1, static_cast<int>(left.count())) > 0;
  }

  const socket_t socket_;
  const Deadline until_;
  std::array<char, 4096> bytes_;
  size_t begin_ = 0, end_ = 0;
};

// Connections less the streams, which have a limit of their own; the oldest first. When there are too many, the oldest
// goes: a client that is slow to ask, or to read its answer, loses its place, not the next one that comes.
class Arrivals {
 public:
  void add(const Connection& connection) {
    const std::lock_guard lock(mutex_);
    found_.push_back(&connection);
  }
  void remove(const Connection& connection) {
    const std::lock_guard lock(mutex_);
    found_.remove(&connection);
  }
  void drop_oldest() {
    const std::lock_guard lock(mutex_);
    if (!found_.empty()) found_.front()->drop();
  }

 private:
  std::mutex mutex_;
  std::list<const Connection*> found_;
};

// A thread for each connection, made when it is needed. When there are as many as there may be, the one that accepts
// waits, and the slowest request is dropped.
class Workers : public httplib::TaskQueue {
 public:
  explicit Workers(Arrivals& arrivals) : arrivals_(arrivals) {}
  void enqueue(std::function<void()> task) override {
    std::unique_lock lock(mutex_);
    while (busy_ == kMostConnections) {
      arrivals_.drop_oldest();
      changed_.wait_for(lock, 100ms);
    }
    ++busy_;
    tasks_.push_back(std::move(task));
    if (threads_.size() < static_cast<size_t>(busy_)) threads_.emplace_back([this] { work(); });
    changed_.notify_all();
  }
  void shutdown() override {
    {
      const std::lock_guard lock(mutex_);
      ending_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return ending_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
      --busy_;
      changed_.notify_all();
    }
  }

  Arrivals& arrivals_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  int busy_ = 0;  // connections, with those that wait for a thread
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

// The library's server with connections of ours.
class Server final : public httplib::Server {
 public:
  Arrivals arrivals;

  // Called while this thread answers a request whose answer has no end.
  void stays() { arrivals.remove(*current_); }

 private:
  bool process_and_close_socket(socket_t socket) override {
    Connection connection(socket);
    current_ = &connection;
    arrivals.add(connection);
    bool closed = false;
    const bool fine = process_request(connection, true, closed, nullptr);
    arrivals.remove(connection);
    ::shutdown(socket, SHUT_RDWR);
    ::close(socket);
    return fine;
  }

  static thread_local const Connection* current_;
};
thread_local const Connection* Server::current_ = nullptr;

bool is_loopback_name(std::string_view host) {
  const size_t colon = host.rfind(':');
  // The port may be another one: that of a tunnel. The colons of [::1] are no port.
  if (colon != std::string_view::npos && host.find(']', colon) == std::string_view::npos) host = host.substr(0, colon);
  return host == "127.0.0.1" || host == "localhost" || host == "[::1]";
}

}  // namespace

struct LiveServer::State {
  explicit State(const std::filesystem::path& run) : reader(run) { look(); }

  // The newest data, once it is not number `seen` any more; none after `patience`, or when the server ends.
  struct News {
    int64_t number = 0;
    std::shared_ptr<const std::string> data;
  };
  News wait_for_news(int64_t seen, std::chrono::milliseconds patience) {
    std::unique_lock lock(mutex);
    changed.wait_for(lock, patience, [&] { return ending || number != seen; });
    return number != seen ? News{number, data} : News{};
  }

  void look() {
    const bool is_new = reader.refresh();
    if (!is_new && data) return;
    const report::RunReader* const runs[] = {&reader};
    auto now = std::make_shared<const std::string>(report::page_data(runs));
    const std::lock_guard lock(mutex);
    data = std::move(now);
    ++number;
    changed.notify_all();
  }
  void keep_looking() {
    std::unique_lock lock(mutex);
    while (!changed.wait_for(lock, kLookEvery, [&] { return ending; })) {
      lock.unlock();
      look();
      lock.lock();
    }
  }

  void stream(httplib::Response& response);

  report::RunReader reader;  // used by the thread that looks
  std::mutex mutex;          // guards what follows
  std::condition_variable changed;
  std::shared_ptr<const std::string> data;
  int64_t number = 0;  // of the data
  bool serving = false, ending = false;
  int streams = 0;

  Server server;
  int port = 0;
};

// Server-sent events: the whole data with each, at most one in kLookEvery. On the loopback that is cheaper than a
// second way to describe a run.
void LiveServer::State::stream(httplib::Response& response) {
  {
    const std::lock_guard lock(mutex);
    if (streams >= kMostStreams) {
      response.status = 503;
      response.set_header("Retry-After", "10");
      response.set_content("Too many pages are open; close one.\n", "text/plain");
      return;
    }
    ++streams;
  }
  server.stays();
  response.set_chunked_content_provider(
      "text/event-stream",
      [this, seen = int64_t{0}](size_t, httplib::DataSink& sink) mutable {
        const News news = wait_for_news(seen, 1000ms);
        if (const std::lock_guard lock(mutex); ending) return false;
        // A comment now and then shows whether the page is still there.
        const std::string text = news.data ? "event: run\ndata: " + *news.data + "\n\n" : ":\n\n";
        if (news.data) seen = news.number;
        return sink.write(text.data(), text.size());
      },
      [this](bool) {
        const std::lock_guard lock(mutex);
        --streams;
      });
}

LiveServer::LiveServer(const std::filesystem::path& run, int port) : state_(std::make_unique<State>(run)) {
  Server& server = state_->server;
  server.new_task_queue = [&server] { return new Workers(server.arrivals); };
  server.set_payload_max_length(1024);
  // The socket has no SO_REUSEPORT, which the library sets: a second server would share the port and half the requests.
  int listener = -1;
  server.set_socket_options([&listener](int socket) {
    const int yes = 1;
    ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    listener = socket;
  });
  server.set_default_headers({{"Cache-Control", "no-store"},
                              {"X-Content-Type-Options", "nosniff"},
                              {"Content-Security-Policy", "frame-ancestors 'none'"}});
  server.set_pre_routing_handler([](const httplib::Request& request, httplib::Response& response) {
    if (is_loopback_name(request.get_header_value("Host"))) return httplib::Server::HandlerResponse::Unhandled;
    response.status = 403;
    response.set_content("This page answers to localhost only.\n", "text/plain");
    return httplib::Server::HandlerResponse::Handled;
  });
  server.Get("/", [this](const httplib::Request&, httplib::Response& response) {
    const State::News news = state_->wait_for_news(0, 0ms);
    response.set_content(report::page(*news.data, report::Mode::kLive), "text/html; charset=utf-8");
  });
  server.Get("/events", [this](const httplib::Request&, httplib::Response& response) { state_->stream(response); });
  if (port == 0) {
    state_->port = server.bind_to_any_port("127.0.0.1");
  } else if (server.bind_to_port("127.0.0.1", port)) {
    state_->port = port;
  }
  CHORALE_CHECK_STATE(state_->port > 0, "[watch] cannot listen on 127.0.0.1:", port,
                      ": another program does; choose another --port, or 0 for any that is free");
  server.set_socket_options(nullptr);
  // The library lets five wait to be accepted: the next would try again after a second, and then after three.
  CHORALE_CHECK_STATE(::listen(listener, kMostConnections) == 0, "[watch] cannot listen on 127.0.0.1:", state_->port,
                      ": ", std::strerror(errno));
}

LiveServer::~LiveServer() = default;

int LiveServer::port() const { return state_->port; }

void LiveServer::serve() {
  {
    const std::lock_guard lock(state_->mutex);
    if (state_->ending) return;
    state_->serving = true;
  }
  std::thread looking([this] { state_->keep_looking(); });
  state_->server.listen_after_bind();
  {
    const std::lock_guard lock(state_->mutex);
    state_->serving = false;
  }
  stop();
  looking.join();
}

void LiveServer::stop() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->ending = true;
  }
  state_->changed.notify_all();
  const auto is_serving = [&] {
    const std::lock_guard lock(state_->mutex);
    return state_->serving;
  };
  // The library forgets a stop that comes before it has begun to listen.
  while (is_serving() && !state_->server.is_running()) std::this_thread::sleep_for(1ms);
  state_->server.stop();
}

}  // namespace chorale::app
