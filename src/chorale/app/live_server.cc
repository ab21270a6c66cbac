#include "chorale/app/live_server.h"

#include <httplib.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/report/page.h"

namespace chorale::app {
namespace {

using namespace std::chrono_literals;

constexpr auto kLookEvery = 500ms;  // at the files of the run
constexpr int kOtherWorkers = 4;    // beside those that a stream keeps
constexpr size_t kMostWaiting = 8;  // connections that were accepted and have no worker yet

// Threads that answer connections. When all are busy, the one that accepts waits: the library's own pool would accept
// connections without end.
class Workers : public httplib::TaskQueue {
 public:
  explicit Workers(int count) {
    for (int i = 0; i < count; ++i) threads_.emplace_back([this] { work(); });
  }
  void enqueue(std::function<void()> task) override {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return tasks_.size() < kMostWaiting; });
    tasks_.push_back(std::move(task));
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
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ending_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const std::function<void()> task = std::move(tasks_.front());
      tasks_.pop_front();
      changed_.notify_all();
      lock.unlock();
      task();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  bool ending_ = false;
  std::vector<std::thread> threads_;
};

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

  httplib::Server server;
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
  httplib::Server& server = state_->server;
  server.new_task_queue = [] { return new Workers(kMostStreams + kOtherWorkers); };
  server.set_payload_max_length(1024);
  server.set_read_timeout(5s);
  server.set_write_timeout(5s);
  // Without SO_REUSEPORT, which the library sets: a second server would share the port and take half of the requests.
  server.set_socket_options([](int socket) {
    const int yes = 1;
    ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
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
