#include <algorithm>
#include <stdexcept>

#include "chorale/base/comm_error.h"
#include "chorale/testing/fuzz_test_util.h"
#include "chorale/transport/security/handshake.h"

namespace chorale::transport {
namespace {

// No connection gets in without the secret, whatever it says: as a client a hello and a proof, as a server a challenge
// and a proof.
CHORALE_FUZZ(Handshake, {ClientHandshake(Secret::generate(), "store").hello() + std::string(kProofBytes, 'p'),
                         std::string(kChallengeBytes + kProofBytes, 'c')}) {
  const std::optional<Secret> secret = Secret::from_bytes("the secret of this job");
  const auto is_refused = [](const auto& attempt) {
    try {
      attempt();
    } catch (const CommError&) {
      return true;
    }
    return false;
  };
  const bool as_client = is_refused([&] {
    ServerHandshake server(secret, "store");
    server.challenge(input.substr(0, kHelloBytes));
    server.answer(input.substr(std::min(input.size(), kHelloBytes)));
  });
  const bool as_server = is_refused([&] {
    ClientHandshake client(secret, "store");
    client.answer(input.substr(0, kChallengeBytes));
    client.finish(input.substr(std::min(input.size(), kChallengeBytes)));
  });
  if (!as_client || !as_server) throw std::logic_error("a stranger got in");
}

}  // namespace
}  // namespace chorale::transport
