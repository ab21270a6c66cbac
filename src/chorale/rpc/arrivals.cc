// What an agent does with what comes: requests are passed on, answers go to the calls that wait for them, and a worker
// that has gone fails what waits for it.
#include <algorithm>

#include "chorale/base/log.h"
#include "chorale/comm/flight_file.h"
#include "chorale/rpc/agent.h"
#include "chorale/rpc/core.h"
#include "chorale/trace/trace.h"

namespace chorale::rpc {

Job Core::sort(Arrival arrival) {
  const int from = arrival.from;
  if (!arrival.message) {
    if (from >= 0) {
      const std::string reason =
          concat("[rpc] worker '", roster_.known(from).name, "' (", from, ") is gone: ", arrival.reason);
      const uint64_t ticket = arrival.ticket;
      if (!note_gone(from, ticket, reason)) return {};
      return {[this, from, ticket, reason] { drop_gone(from, ticket, reason); }, false};
    }
    return {[this, reason = arrival.reason] { fail_all(-1, concat("[rpc] nothing moves any more: ", reason)); }, false};
  }
  Message& message = *arrival.message;
  if (!is_request(message.kind)) return sort_answer(from, std::move(message));
  served_.fetch_add(1, std::memory_order_relaxed);
  const uint64_t chain = message.chain;
  switch (message.kind) {
    case MessageKind::kUserDelete:
    case MessageKind::kForkRequest:
    case MessageKind::kChildAccept:
    case MessageKind::kCleanup:
    case MessageKind::kGather:
    case MessageKind::kHello:
      return {[this, from, shared = std::make_shared<Message>(std::move(message))] { serve(from, std::move(*shared)); },
              true, false, chain};
    default: {
      const bool of_backward = message.kind == MessageKind::kGradient || message.kind == MessageKind::kMark ||
                               message.kind == MessageKind::kSettle || message.kind == MessageKind::kAbort;
      return {[this, from, shared = std::make_shared<Message>(std::move(message))] { serve(from, std::move(*shared)); },
              false, of_backward, chain};
    }
  }
}

bool Core::note_gone(int worker, uint64_t ticket, const std::string& reason) {
  if (membership_) {
    post_.drop_link(worker, ticket);
    if (!roster_.remove(worker, ticket)) return false;
  }
  const std::lock_guard lock(mutex_);
  gone_[worker] = reason;
  return true;
}

void Core::drop_gone(int worker, uint64_t ticket, const std::string& reason) {
  fail_all(worker, reason + flight_of(worker, reason));
  fail_gatherings(worker, reason);
  references_.forget_worker(worker);
  contexts_.forget_worker(worker, membership_ ? ((ticket + 1) << kBitsPerTicket) - 1 : UINT64_MAX);
  control_numbers_.forget({worker, ticket});
  if (membership_) membership_->forget(roster_.known(worker), ticket);
  note_change();
}

// Where the last calls can be read, if some of them were waiting for this worker.
std::string Core::flight_of(int worker, const std::string& reason) {
  {
    const std::lock_guard lock(mutex_);
    if (std::none_of(pending_.begin(), pending_.end(), [&](const auto& entry) { return entry.second.to == worker; }))
      return {};
  }
  const std::string path = comm::write_flight(own_, log_.json(own_, roster_.all(), reason) + "\n");
  return path.empty() ? path : concat("; the last calls: ", path);
}

Job Core::sort_answer(int from, Message message) {
  Pending pending;
  bool is_late = false, counts = false;
  {
    const std::lock_guard lock(mutex_);
    const auto found = pending_.find(message.id);
    if (found == pending_.end()) {
      const auto late = late_.find(message.id);
      if (late == late_.end() || late->second.to != from) return {};
      is_late = true;
      pending.answered = std::move(late->second.answered);
      pending.passed = std::move(late->second.passed);
      pending.context = late->second.context;
      late_.erase(late);
    } else {
      if (found->second.to != from) {
        log_warning(concat("[rpc] worker ", from, " answered a call of worker ", found->second.to));
        return {};
      }
      pending = std::move(found->second);
      pending_.erase(found);
      if (pending.limit.count() > 0) timer_.take_back(pending.end, message.id);
      // What a user has put behind a future may begin other calls. An answer to a barrier does not.
      counts = pending.future && pending.answered;
      if (counts) ++answering_;
    }
  }
  log_.leave(pending.logged, &message);
  if (trace::enabled()) [[unlikely]]
    trace_counts();
  std::exception_ptr error;
  Reader reader(message.payload, {});
  if (message.kind == MessageKind::kRefused) {
    try {
      const auto taken = reader.number<uint64_t>();
      if (pending.passed) pending.passed->take(taken);
      if (reader.left() > 0) error = error_in(reader);
    } catch (const InvalidArgument&) {
      error = std::current_exception();
    }
  } else {
    if (pending.passed) pending.passed->take_all();
    if (message.kind == MessageKind::kError) error = error_in(reader);
  }
  if (pending.context != 0 && (error || is_late)) contexts_.answered(pending.context, from, 0);
  if (!pending.answered) return {};
  const bool of_backward = pending.of_backward && !message.payload.empty();
  const bool is_short = !of_backward && (!pending.future || !pending.future->has_callbacks());
  return {[this, from, is_late, counts, error, context = pending.context,
           shared = std::make_shared<Message>(std::move(message)), answered = std::move(pending.answered)] {
            struct Done {
              Core& core;
              bool counts;
              ~Done() {
                if (counts) core.done_answering();
                core.note_change();
              }
            } const done{*this, counts};
            if (error) {
              answered({}, error);
            } else {
              if (!is_late) {
                contexts_.received({shared->context, shared->hop}, from, shared->tensors,
                                   dist_autograd::Contexts::Came::kAnswer);
                if (context != 0) contexts_.answered(context, from, shared->report);
              }
              answered(std::move(*shared), nullptr);
            }
          },
          is_short, of_backward, 0, true};
}

void Core::done_answering() {
  const std::lock_guard lock(mutex_);
  --answering_;
}

void Core::trace_counts() {
  const AgentInfo info = agent_of(*this).debug();
  const auto now = trace::Clock::now();
  trace::record({.name = "rpc",
                 .rank = trace::rank(),
                 .start = now,
                 .end = now,
                 .kind = trace::Kind::kCounts,
                 .counts = {{"calls in flight", info.own_calls},
                            {"calls served", info.served_calls},
                            {"queued", info.queued},
                            {"references held", static_cast<int64_t>(info.references.users)},
                            {"references owned", static_cast<int64_t>(info.references.owners)}}});
}

std::exception_ptr Core::error_in(Reader reader) {
  try {
    const auto kind = reader.number<uint8_t>();
    CHORALE_CHECK(kind < kRpcErrorKinds, "[rpc] there is no error of kind ", int{kind});
    const auto worker = reader.number<int32_t>();
    return error_of(static_cast<RpcErrorKind>(kind), worker, read<std::string>(reader));
  } catch (const InvalidArgument&) {
    return std::current_exception();
  }
}

}  // namespace chorale::rpc
