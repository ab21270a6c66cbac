#include "chorale/comm/engine.h"

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/device/shared_pages.h"
#include "chorale/trace/trace.h"

namespace chorale::comm {

CachingAllocator& RankContext::scratch() {
  if (!scratch_) scratch_ = std::make_shared<CachingAllocator>(shared_pages());
  return *scratch_;
}

std::shared_ptr<RankContext> RankContext::inner() {
  auto context = std::make_shared<RankContext>();
  scratch();
  context->scratch_ = scratch_;
  context->core_each = core_each;
  context->checksum = checksum;
  context->chaos = chaos;
  return context;
}

void Engine::enlist() {
  const std::lock_guard lock(context_->mutex);
  context_->engines.push_back(this);
}
void Engine::delist() { std::erase(context_->engines, this); }

void Engine::note(Operation& operation) const {
  const auto elems = [&](const auto& chunks) {
    std::vector<int64_t> counts;
    for (const Chunk& chunk : chunks) counts.push_back(static_cast<int64_t>(chunk.bytes / size_of(operation.dtype)));
    return counts;
  };
  const bool any = operation.kind == CallKind::kRecv && operation.peer < 0;
  const std::string name(any ? "recvAnySource" : name_of(operation.kind));
  operation.completed = trace::Clock::now();
  trace::record({.name = concat(backend(), ":", name),
                 .rank = membership_.members[static_cast<size_t>(membership_.rank)],
                 .start = operation.issued,
                 .end = operation.completed,
                 .async = true,
                 .shapes = std::move(operation.shapes),
                 .kind = trace::Kind::kCall,
                 .traffic = trace::Traffic{.call = name,
                                           .dtype = concat(operation.dtype),
                                           .group = membership_.name,
                                           .ranks = membership_.members,
                                           .in_elems = elems(operation.give),
                                           .out_elems = elems(operation.take)}});
}

void Engine::complete(Operation& operation, std::exception_ptr error) {
  if (!error) {
    try {
      for (const auto& action : operation.finish) action();
    } catch (...) {
      error = std::current_exception();
    }
  }
  operation.finish.clear();
  if (operation.traced) [[unlikely]]
    note(operation);
  operation.error = error;
  operation.state.store(error ? Operation::State::kFailed : Operation::State::kDone, std::memory_order_release);
}

namespace {

// Callbacks run once, in order, without the lock: they may start calls of their own.
void tell(std::unique_lock<std::mutex>& lock, Operation& operation) {
  while (!operation.then.empty()) {
    const auto callbacks = std::exchange(operation.then, {});
    lock.unlock();
    for (const auto& callback : callbacks) callback();
    lock.lock();
  }
  operation.told = true;
}

void progress_others(Engine& engine) {
  for (Engine* other : engine.context().engines) {
    if (other != &engine && !other->idle()) other->progress();
  }
}

// Polls come often; who is late is looked for seldom.
bool look_is_due(Operation& operation) {
  constexpr std::chrono::milliseconds kInterval{5};
  const auto now = Deadline::Clock::now();
  if (now < std::max(operation.looked, operation.issued) + kInterval) return false;
  operation.looked = now;
  return true;
}

}  // namespace

void wait(Engine& engine, Operation& operation, Deadline deadline) {
  const bool traced = operation.traced;
  const auto start = traced ? trace::Clock::now() : trace::Clock::time_point{};
  std::unique_lock lock(engine.context().mutex);
  for (int64_t rounds = 0; operation.pending(); ++rounds) {
    engine.progress();
    if (!operation.pending()) break;
    if (rounds % 64 == 63) progress_others(engine);
    engine.wait_a_little(lock, operation, rounds, deadline);
  }
  if (traced) [[unlikely]] {
    const Membership& who = engine.membership();
    trace::record({.name = concat(engine.backend(), ":wait"),
                   .rank = who.members[static_cast<size_t>(who.rank)],
                   .start = start,
                   .end = trace::Clock::now(),
                   .kind = trace::Kind::kComm,
                   .traffic = trace::Traffic{.call = "wait", .dtype = concat(operation.dtype), .group = who.name}});
  }
  if (!operation.told) tell(lock, operation);
  if (operation.error) std::rethrow_exception(operation.error);
}

bool poll(Engine& engine, Operation& operation) {
  std::unique_lock lock(engine.context().mutex);
  if (operation.pending()) {
    engine.progress();
    progress_others(engine);
    if (operation.pending() && look_is_due(operation)) engine.look(operation);
  }
  if (operation.pending()) return false;
  if (!operation.told) tell(lock, operation);
  return true;
}

}  // namespace chorale::comm
