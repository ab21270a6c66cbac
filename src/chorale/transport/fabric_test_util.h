// Ranks of a fabric as threads of one process, each on a "host" of its own.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <vector>

#include "chorale/transport/fabric.h"

namespace chorale::transport {

inline Deadline soon() { return within(std::chrono::seconds(20)); }
FabricOptions test_options(int rank);

using MakeBuilder = std::function<std::unique_ptr<FabricBuilder>(int rank)>;
// All connected.
std::vector<std::unique_ptr<Fabric>> connect_ranks(int size, const MakeBuilder& make);
std::vector<std::unique_ptr<Fabric>> connect_tls_ranks(int size, const FabricOptions& options = test_options(0));

// Waits until it is not pending.
void await_end(Fabric& fabric, const TransferHandle& transfer, Deadline deadline = soon());
// And expects it to be done.
void await_done(Fabric& fabric, const TransferHandle& transfer, Deadline deadline = soon());
// Waits until life(peer) has this state, and returns it.
Life await_life(Fabric& fabric, int peer, Life::State state, Deadline deadline = soon());

std::vector<std::byte> pattern(size_t bytes, uint64_t seed);

}  // namespace chorale::transport
