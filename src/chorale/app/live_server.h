// The page of a run while it trains: a small web server for the browsers of this machine.
//
// It listens on 127.0.0.1 only and answers only requests that were addressed to this machine by its loopback names: a
// page of somebody else whose name was made to point here (DNS rebinding) gets nothing. It knows two addresses, / and
// /events, and opens no file that a request names. Connections are bounded, each has one request and a few seconds to
// make it; when there are too many, the one that has taken longest goes. More than kMostStreams pages are told to come
// back later.
#pragma once

#include <filesystem>
#include <memory>

namespace chorale::app {

class LiveServer {
 public:
  static constexpr int kMostStreams = 64;

  // Port 0: any that is free. Throws InvalidArgument if the run is no folder, StateError if the port is taken.
  LiveServer(const std::filesystem::path& run, int port);
  ~LiveServer();
  LiveServer(const LiveServer&) = delete;
  LiveServer& operator=(const LiveServer&) = delete;

  int port() const;
  // Answers requests until stop(), which any thread may call.
  void serve();
  void stop();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace chorale::app
