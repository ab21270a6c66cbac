// A rank of a job whose ranks are on different nodes: tests/fabric_test.py starts several, cuts cables and stops ranks.
#include <gtest/gtest.h>

#include <chrono>
#include <iostream>
#include <map>
#include <string>

#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/transport/fabric/fabric.h"
#include "chorale/transport/fabric/fabric_name.h"
#include "chorale/transport/fabric/fabric_test_util.h"
#include "chorale/transport/store/rendezvous.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

int number(const char* name) { return std::stoi(config::env(name).value()); }

// The clock is the same for all processes of this machine.
void say(const std::string& text) {
  const double now = std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  std::cout << concat(std::fixed, now, " ", text, "\n") << std::flush;
}

std::unique_ptr<Fabric> connect(const RendezvousResult& job) {
  FabricOptions options;
  options.rank = job.rank;
  options.secret = Secret::from_environment();
  options.keep_alive = std::chrono::milliseconds(number("KEEP_ALIVE_MS"));
  const auto builder = make_fabric(choose_fabric(""), options, job.address);
  const auto key = [](int rank) { return concat("fabric ", rank); };
  const FabricAddress own = builder->address();
  job.store->set(key(job.rank), concat(own.endpoint, "\n", own.data), soon());
  std::vector<FabricAddress> addresses;
  addresses.reserve(static_cast<size_t>(job.world_size));
  for (int rank = 0; rank < job.world_size; ++rank) {
    const std::string text = job.store->get(key(rank), soon());
    const size_t end = text.find('\n');
    addresses.push_back({static_cast<uint64_t>(rank), text.substr(0, end), text.substr(end + 1)});
  }
  return builder->connect(addresses, soon());
}

// Messages of one size with one peer, whose words differ from place to place, from sender to sender and from one
// exchange to the next.
struct Exchange {
  Exchange(size_t bytes, int own_rank, int peer_rank)
      : own(own_rank), peer(peer_rank), data(bytes / sizeof(uint64_t)), into(data.size()) {}
  void start(Fabric& fabric) {
    for (size_t i = 0; i < data.size(); ++i) data[i] = word(own, i);
    std::fill(into.begin(), into.end(), 0);
    sent = fabric.send(peer, 1, {}, std::as_bytes(std::span(data)));
    received = fabric.receive(peer, 1, std::as_writable_bytes(std::span(into)));
  }
  bool pending() const { return sent->pending() || received->pending(); }
  bool fine() const {
    if (sent->state() != Transfer::State::kDone || received->state() != Transfer::State::kDone) return false;
    size_t right = 0;
    while (right < into.size() && into[right] == word(peer, right)) ++right;
    EXPECT_EQ(right, into.size()) << "exchange " << done << " with rank " << peer;
    return right == into.size();
  }

  const int own, peer;
  std::vector<uint64_t> data, into;
  TransferHandle sent, received;
  int done = 0;

 private:
  uint64_t word(int sender, size_t i) const {
    return (static_cast<uint64_t>(sender + 1) << 48) + (static_cast<uint64_t>(done) << 40) + i;
  }
};

// Exchanges messages with every peer, EXCHANGES times, or until the peer is gone. Says what it notices of their lives.
TEST(RankOfAFabric, DISABLED_ExchangesMessages) {
  const RendezvousResult job = rendezvous("env://", {.timeout = 20s});
  const auto fabric = connect(job);
  const int count = number("EXCHANGES");
  std::map<int, Exchange> exchanges;
  std::map<int, Life::State> lives;
  for (int peer = 0; peer < job.world_size; ++peer) {
    if (peer == job.rank) continue;
    lives[peer] = Life::State::kConnected;
    const auto bytes = static_cast<size_t>(number("EXCHANGE_BYTES"));
    exchanges.try_emplace(peer, bytes, job.rank, peer).first->second.start(*fabric);
  }
  say("connected");
  while (!exchanges.empty()) {
    const uint32_t seen = fabric->events();
    for (auto& [peer, state] : lives) {
      const Life life = fabric->life(peer);
      if (std::exchange(state, life.state) == life.state) continue;
      const char* const names[] = {"connected", "silent", "left", "lost"};
      say(concat("rank ", peer, " is ", names[static_cast<int>(life.state)], ": ", life.text));
    }
    for (auto it = exchanges.begin(); it != exchanges.end();) {
      auto& [peer, exchange] = *it;
      if (exchange.pending()) {
        ++it;
        continue;
      }
      const bool fine = exchange.fine();
      if (fine && ++exchange.done < count) {
        exchange.start(*fabric);
        ++it;
      } else if (!fine && lives[peer] != Life::State::kLeft && lives[peer] != Life::State::kLost) {
        ++it;  // the transfers of a peer that goes end before its life() says so
      } else {
        say(concat("rank ", peer, ": ", exchange.done, " exchanges", fine ? "" : ", then a failure"));
        it = exchanges.erase(it);
      }
    }
    fabric->await_event(seen, within(100ms));
  }
}

}  // namespace
}  // namespace chorale::transport
