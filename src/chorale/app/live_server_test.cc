#include "chorale/app/live_server.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <httplib.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "chorale/base/error.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::app {
namespace {

using testing::HasSubstr;
using namespace std::chrono_literals;

// A server of a run of one step, in a thread of its own.
class Live : public testing::Test {
 protected:
  Live() {
    add_step(1, 2.5);
    server_ = std::make_unique<LiveServer>(folder_.path(), 0);
    thread_ = std::thread([this] { server_->serve(); });
    client_ = std::make_unique<httplib::Client>("127.0.0.1", server_->port());
    client_->set_read_timeout(10s);
  }
  ~Live() override {
    server_->stop();
    thread_.join();
  }
  void add_step(int step, double loss) const {
    std::ofstream(folder_ / "metrics.jsonl", std::ios::app)
        << "{\"kind\":\"train\",\"step\":" << step << ",\"loss\":" << loss << "}\n";
  }
  int status_of(const std::string& path, const httplib::Headers& headers = {}) {
    const auto result = client_->Get(path, headers);
    return result ? result->status : -1;
  }

  const TemporaryFolder folder_;
  std::unique_ptr<LiveServer> server_;
  std::thread thread_;
  std::unique_ptr<httplib::Client> client_;
};

TEST_F(Live, ThePageHasWhatIsThereSoFar) {
  const auto result = client_->Get("/");
  ASSERT_TRUE(result);
  EXPECT_EQ(result->status, 200);
  EXPECT_THAT(result->body, HasSubstr("data-mode=\"live\""));
  EXPECT_THAT(result->body, HasSubstr("\"loss\": [2.5]"));
}

TEST_F(Live, EventsTellOfEachChange) {
  std::string received;
  bool added = false;
  client_->Get("/events", [&](const char* data, size_t size) {
    received.append(data, size);
    if (!added && received.find("\"loss\": [2.5]") != std::string::npos) {
      add_step(2, 1.5);
      added = true;
    }
    return received.find("\"loss\": [2.5, 1.5]") == std::string::npos;  // false: enough
  });
  EXPECT_THAT(received, HasSubstr("event: run\ndata: {"));
  EXPECT_THAT(received, HasSubstr("\"loss\": [2.5, 1.5]"));
}

TEST_F(Live, OnlyLoopbackNamesAreAnswered) {
  for (const char* host : {"localhost", "localhost:8642", "127.0.0.1:1", "[::1]", "[::1]:8642"})
    EXPECT_EQ(status_of("/", {{"Host", host}}), 200) << host;
  for (const char* host :
       {"evil.example", "evil.example:8642", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::1"})
    EXPECT_EQ(status_of("/", {{"Host", host}}), 403) << host;
  EXPECT_EQ(status_of("/events", {{"Host", "evil.example"}}), 403);
}

TEST_F(Live, NoFileCanBeAskedFor) {
  for (const char* path : {"/metrics.jsonl", "/../metrics.jsonl", "/..%2f..%2fetc/passwd", "//etc/passwd",
                           "/events/../../etc/passwd", "/%00"})
    EXPECT_THAT(status_of(path), testing::AnyOf(400, 404)) << path;
  for (const auto& result : {client_->Post("/", "x", "text/plain"), client_->Delete("/events"), client_->Put("/")})
    EXPECT_TRUE(!result || result->status >= 400);
}

TEST_F(Live, TooManyPagesAreToldToComeBackAndOthersAreStillServed) {
  std::atomic<int> open = 0;
  std::atomic<bool> enough = false;
  std::vector<std::thread> pages;
  pages.reserve(static_cast<size_t>(LiveServer::kMostStreams));
  for (int i = 0; i < LiveServer::kMostStreams; ++i) {
    pages.emplace_back([&] {
      httplib::Client page("127.0.0.1", server_->port());
      page.set_read_timeout(10s);
      bool counted = false;
      page.Get("/events", [&](const char*, size_t) {
        if (!std::exchange(counted, true)) ++open;
        return !enough;
      });
    });
  }
  while (open < LiveServer::kMostStreams) std::this_thread::sleep_for(1ms);
  EXPECT_EQ(status_of("/events"), 503);
  EXPECT_EQ(status_of("/"), 200);
  enough = true;
  for (std::thread& page : pages) page.join();
}

// Enough slow clients to fill every place, and some more: it is a slow client that loses its place.
TEST_F(Live, SlowRequestsDoNotKeepThePageFromOthers) {
  std::vector<int> slow;
  for (int i = 0; i < 200; ++i) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(server_->port()));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    slow.push_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(::connect(slow.back(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
    ASSERT_EQ(::send(slow.back(), "GET / HT", 8, MSG_NOSIGNAL), 8);
  }
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(status_of("/"), 200);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);  // less than a slow request has
  for (const int socket : slow) ::close(socket);
}

TEST_F(Live, AConnectionIsForOneRequestWhichHasToComeSoon) {
  client_->set_keep_alive(true);
  const auto result = client_->Get("/");
  ASSERT_TRUE(result);
  EXPECT_EQ(result->get_header_value("Connection"), "close");
}

TEST_F(Live, APortThatIsTakenIsRefused) { EXPECT_THROW(LiveServer(folder_.path(), server_->port()), StateError); }

TEST(LiveServer, RefusesWhatIsNoFolder) { EXPECT_THROW(LiveServer("/nonexistent", 0), InvalidArgument); }

TEST(LiveServer, ARunWithoutAStepYetHasAPage) {
  const TemporaryFolder folder;
  LiveServer server(folder.path(), 0);
  std::thread thread([&] { server.serve(); });
  const auto result = httplib::Client("127.0.0.1", server.port()).Get("/");
  ASSERT_TRUE(result);
  EXPECT_THAT(result->body, HasSubstr("\"loss\": []"));
  server.stop();
  thread.join();
}

}  // namespace
}  // namespace chorale::app
