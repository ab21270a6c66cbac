// How a rank of `chorale run --elastic` finds the others.
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/elastic/elastic.h"
#include "chorale/transport/launcher_variables.h"
#include "chorale/transport/store/prefix_store.h"
#include "chorale/transport/store/tcp_store.h"

namespace chorale::elastic {

std::optional<Seat> Seat::from_environment() {
  const auto board = config::env("CHORALE_ELASTIC_FD");
  if (!board) return std::nullopt;
  const transport::LauncherVariables found = transport::find_launcher_variables();
  const auto own = config::env("CHORALE_ELASTIC_STORE");
  CHORALE_CHECK(own && found.rank,
                "[elastic] CHORALE_ELASTIC_FD is set, but not CHORALE_ELASTIC_STORE and RANK: all three come from "
                "chorale run --elastic");
  const auto secret = transport::Secret::from_environment();
  const auto reach = [secret](const std::string& place, Deadline deadline) -> std::shared_ptr<transport::Store> {
    return std::make_shared<transport::PrefixStore>(
        transport::elastic_prefix(transport::restart_count()),
        std::make_shared<transport::TcpStore>(transport::Endpoint::parse(place), secret, deadline));
  };
  return Seat{reach(*own, within(std::chrono::seconds(30))),
              transport::EpochBoard::attach(std::stoi(*board)),
              *found.rank,
              reach,
              transport::Endpoint::parse(*own).host,
              secret};
}

transport::Secret secret_of_epoch(const transport::Secret& job, int64_t epoch) {
  const std::string number = std::to_string(epoch);
  return transport::Secret::from_bytes(
      transport::view(transport::hmac_sha256(job.bytes(), {"epoch of an elastic job ", number})));
}

}  // namespace chorale::elastic
