// Ranks of a fabric as threads of one process, each on a "host" of its own.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "chorale/base/shared_object.h"
#include "chorale/transport/fabric/fabric.h"

namespace chorale::transport {

inline Deadline soon() { return within(std::chrono::seconds(20)); }
FabricOptions test_options(int rank);

using MakeBuilder = std::function<std::unique_ptr<FabricBuilder>(int rank)>;
// All connected.
std::vector<std::unique_ptr<Fabric>> connect_ranks(int size, const MakeBuilder& make);
// The same over tls or ucx, with these options and their own rank each.
std::vector<std::unique_ptr<Fabric>> connect_ranks_over(const std::string& fabric, int size,
                                                        const FabricOptions& options = test_options(0));
inline std::vector<std::unique_ptr<Fabric>> connect_tls_ranks(int size,
                                                              const FabricOptions& options = test_options(0)) {
  return connect_ranks_over("tls", size, options);
}

inline constexpr const char* kFabricNames[] = {"tls", "ucx"};
#define CHORALE_SKIP_WITHOUT_FABRIC(name)                                              \
  do {                                                                                 \
    const Availability found_ = shared_object_availability(kUcxObject);                \
    if (std::string_view(name) == "ucx" && !found_.yes) GTEST_SKIP() << found_.reason; \
  } while (false)

// Two ranks.
class FabricPair : public testing::Test {
 protected:
  Fabric& a() { return *fabrics_[0]; }
  Fabric& b() { return *fabrics_[1]; }
  std::vector<std::unique_ptr<Fabric>> fabrics_;
};

// Waits until it is not pending.
void await_end(Fabric& fabric, const TransferHandle& transfer, Deadline deadline = soon());
// Waits until it is not pending, and expects that it is done.
void await_done(Fabric& fabric, const TransferHandle& transfer, Deadline deadline = soon());
// Waits until life(peer) has this state, and returns it.
Life await_life(Fabric& fabric, int peer, Life::State state, Deadline deadline = soon());

std::vector<std::byte> pattern(size_t bytes, uint64_t seed);
inline Envelope envelope(uint64_t number) { return {{number, number + 1, 3, 4, 5, ~number}}; }

}  // namespace chorale::transport
