// What an agent does, as lines of a run's metrics.jsonl: the page of the run (`chorale report`, `chorale watch`) then
// shows the calls of each pair of workers, what is queued and which references are alive.
//
//   rpc::AgentOptions options{.serves = {rpc::remote<rpc::own_figures>}};
//   log << rpc::metrics_lines(rpc::figures_of(agent), step, seconds)
//       << rpc::metrics_lines(agent.call<rpc::own_figures>("server"), step, seconds);
#pragma once

#include <string>
#include <vector>

#include "chorale/rpc/agent.h"

namespace chorale::rpc {

// Calls of one worker by another, so far.
struct PairFigures {
  std::string to;
  int64_t calls = 0, failed = 0, in_flight = 0, bytes_sent = 0, bytes_received = 0;
  double p50_us = 0, p99_us = 0;  // from the call to its answer; within an eighth
  CHORALE_MESSAGE(PairFigures, to, calls, failed, in_flight, bytes_sent, bytes_received, p50_us, p99_us)
};
// The figures of one worker, now.
struct WorkerFigures {
  std::string name;
  int64_t queued = 0, served = 0;                     // requests of others: those that wait for a thread, and all
  int64_t owned_references = 0, held_references = 0;  // values that live here; references to values of others
  int64_t threads = 0;
  std::vector<PairFigures> pairs;
  CHORALE_MESSAGE(WorkerFigures, name, queued, served, owned_references, held_references, threads, pairs)
};

WorkerFigures figures_of(const Agent& agent);
// The same of the worker that is called.
WorkerFigures own_figures();

// A line for each pair and one for the worker (docs/usage/reports.md), each with its end.
std::string metrics_lines(const WorkerFigures& figures, int64_t step, double seconds);

}  // namespace chorale::rpc
