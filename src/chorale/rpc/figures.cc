#include "chorale/rpc/figures.h"

#include <nlohmann/json.hpp>

#include "chorale/rpc/core.h"

namespace chorale::rpc {

WorkerFigures figures_of(const Agent& agent) {
  const AgentInfo info = agent.debug();
  WorkerFigures figures{.name = agent.info().name,
                        .queued = info.queued,
                        .served = info.served_calls,
                        .owned_references = static_cast<int64_t>(info.references.owners),
                        .held_references = static_cast<int64_t>(info.references.users),
                        .threads = info.threads,
                        .pairs = {}};
  figures.pairs.reserve(info.calls.size());
  for (const CallFigures& pair : info.calls)
    figures.pairs.push_back({agent.core()->roster().known(pair.worker).name, pair.calls, pair.failed, pair.in_flight,
                             pair.bytes_sent, pair.bytes_received, pair.p50_us, pair.p99_us});
  return figures;
}

WorkerFigures own_figures() { return figures_of(here()); }

std::string metrics_lines(const WorkerFigures& figures, int64_t step, double seconds) {
  using nlohmann::json;
  std::string lines;
  for (const PairFigures& pair : figures.pairs) {
    lines += json{{"kind", "calls"},
                  {"step", step},
                  {"seconds", seconds},
                  {"from", figures.name},
                  {"to", pair.to},
                  {"calls", pair.calls},
                  {"failed", pair.failed},
                  {"in_flight", pair.in_flight},
                  {"sent_bytes", pair.bytes_sent},
                  {"received_bytes", pair.bytes_received},
                  {"p50_us", pair.p50_us},
                  {"p99_us", pair.p99_us}}
                 .dump() +
             "\n";
  }
  lines += json{{"kind", "worker"},
                {"step", step},
                {"seconds", seconds},
                {"name", figures.name},
                {"queued", figures.queued},
                {"served", figures.served},
                {"owned_references", figures.owned_references},
                {"held_references", figures.held_references},
                {"threads", figures.threads}}
               .dump() +
           "\n";
  return lines;
}

}  // namespace chorale::rpc
