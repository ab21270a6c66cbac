#include "chorale/transport/fabric/fabric_test_util.h"

#include <gtest/gtest.h>

#include <future>

#include "chorale/transport/fabric/fabric_name.h"

namespace chorale::transport {

FabricOptions test_options(int rank) {
  FabricOptions options;
  options.rank = rank;
  options.secret = Secret::from_bytes("the secret of a test, which is long enough");
  return options;
}

std::vector<std::unique_ptr<Fabric>> connect_ranks(int size, const MakeBuilder& make) {
  std::vector<std::unique_ptr<FabricBuilder>> builders;
  std::vector<FabricAddress> addresses;
  for (int rank = 0; rank < size; ++rank) {
    builders.push_back(make(rank));
    addresses.push_back(builders.back()->address());
    addresses.back().host = static_cast<uint64_t>(rank) + 100;
  }
  std::vector<std::future<std::unique_ptr<Fabric>>> connecting;
  connecting.reserve(builders.size());
  for (auto& builder : builders) {
    connecting.push_back(std::async(std::launch::async, [&] { return builder->connect(addresses, soon()); }));
  }
  std::vector<std::unique_ptr<Fabric>> fabrics;
  fabrics.reserve(connecting.size());
  for (auto& one : connecting) fabrics.push_back(one.get());
  return fabrics;
}

std::vector<std::unique_ptr<Fabric>> connect_ranks_over(const std::string& fabric, int size,
                                                        const FabricOptions& options) {
  return connect_ranks(size, [&](int rank) {
    FabricOptions own = options;
    own.rank = rank;
    return make_fabric({fabric, ""}, own, "127.0.0.1");
  });
}

void await_end(Fabric& fabric, const TransferHandle& transfer, Deadline deadline) {
  while (true) {
    const uint32_t seen = fabric.events();
    if (!transfer->pending()) return;
    if (deadline.passed()) FAIL() << "still pending";
    fabric.await_event(seen, deadline);
  }
}

void await_done(Fabric& fabric, const TransferHandle& transfer, Deadline deadline) {
  await_end(fabric, transfer, deadline);
  EXPECT_EQ(transfer->state(), Transfer::State::kDone) << transfer->error;
}

Life await_life(Fabric& fabric, int peer, Life::State state, Deadline deadline) {
  while (true) {
    const uint32_t seen = fabric.events();
    Life life = fabric.life(peer);
    if (life.state == state || deadline.passed()) {
      EXPECT_EQ(life.state, state) << life.text;
      return life;
    }
    fabric.await_event(seen, deadline);
  }
}

std::vector<std::byte> pattern(size_t bytes, uint64_t seed) {
  std::vector<std::byte> made(bytes);
  uint64_t state = seed * 2654435761 + 1;
  for (std::byte& byte : made) {
    state = state * 6364136223846793005 + 1442695040888963407;
    byte = static_cast<std::byte>(state >> 56);
  }
  return made;
}

}  // namespace chorale::transport
