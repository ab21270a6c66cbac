#include "chorale/comm/failure.h"

#include <unistd.h>

#include <algorithm>
#include <iostream>
#include <utility>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/comm/rank_context.h"

namespace chorale::comm {

void raise_when_sure(Operation& operation, const CallFailed& reason) {
  if (!operation.patience) operation.patience = within(kUnsurePatience);
  if (!reason.unsure || operation.patience->passed()) throw CallFailed(reason);
}

void raise_in_child(std::string_view call, const Membership& membership, const RankContext& context) {
  throw StateError(
      concat("[", call, "] process ", getpid(), " is a forked child of ", who_is_this(membership), ", process ",
             context.made.pid(),
             ": a group belongs to the process that made it; start a program of its own (exec, or Python's "
             "start method 'spawn'), which can make a group of its own"));
}

void raise_difference(const Membership& membership, std::span<const Fingerprint> prints) {
  // Ranks by the call they made, in the order of their first rank.
  std::vector<std::pair<Fingerprint, std::vector<int>>> camps;
  for (int rank = 0; rank < membership.size(); ++rank) {
    const Fingerprint& print = prints[static_cast<size_t>(rank)];
    if (kind_of(print) == CallKind::kNone) continue;
    auto camp = std::find_if(camps.begin(), camps.end(), [&](const auto& other) { return other.first == print; });
    if (camp == camps.end()) camp = camps.insert(camps.end(), {print, {}});
    camp->second.push_back(rank);
  }
  std::string text(kDifferentCalls);
  for (const auto& [print, ranks] : camps) {
    text += ranks.size() > 1 ? " ranks" : " rank";
    for (size_t r = 0; r < ranks.size(); ++r) text += concat(r > 0 ? ", " : " ", membership.global(ranks[r]));
    text += concat(": ", describe(membership, print), ";");
  }
  text += " all ranks must make the same calls in the same order";
  // The smallest camp is the odd one out; of equal ones the later.
  auto odd = camps.begin();
  for (auto camp = camps.begin(); camp != camps.end(); ++camp) {
    if (camp->second.size() <= odd->second.size()) odd = camp;
  }
  throw CallFailed{text, membership.global(odd->second.front())};
}

void raise_misfit(const Membership& membership, int from, uint64_t bytes, DType dtype, const Operation& receive) {
  throw CallFailed{concat("rank ", membership.global(from), " sent ", bytes, " bytes of ", dtype, " (tag ", receive.tag,
                          ") where rank ", membership.own_global(), " receives ", receive.take[0].bytes, " bytes of ",
                          receive.dtype),
                   membership.global(from)};
}

std::string describe(const Membership& membership, const Fingerprint& print) {
  Fingerprint shown = print;
  if (shown.root >= 0 && shown.root < membership.size()) shown.root = membership.global(shown.root);
  return describe(shown);
}

std::string who_is_this(const Membership& membership) {
  constexpr int kMostShown = 8;
  std::string ranks;
  if (membership.size() > 0 && membership.members.back() >= membership.size()) {
    for (int r = 0; r < std::min(membership.size(), kMostShown); ++r)
      ranks += concat(r == 0 ? ": ranks " : ", ", membership.global(r));
    if (membership.size() > kMostShown) ranks += ", …";
  }
  return concat("rank ", membership.own_global(), " (group ", membership.name, " of ", membership.size(), ranks, ")");
}

std::string prefix_of(const Membership& membership, const Operation& operation) {
  const std::string number = operation.number > 0 ? concat(" #", operation.number) : std::string();
  return concat("[", name_of(kind_of(operation.print)), number, "] ", who_is_this(membership), ": ");
}

namespace {
// What this rank knows of the cause where several of its threads made calls beside each other.
std::string about_threads(const Membership& membership, const FlightRecorder& flight) {
  const std::string threads = flight.threads(membership);
  if (threads.empty()) return {};
  return concat("; rank ", membership.own_global(), " makes the calls of this group from several threads: ", threads,
                ". What runs beside training, such as a save in the background (async_save), needs a group of its own");
}
}  // namespace

std::exception_ptr error_of(const Membership& membership, const Operation& operation, const std::string& reason,
                            int culprit, const FlightRecorder& flight) {
  std::string text = prefix_of(membership, operation) + reason;
  if (reason.find(kDifferentCalls) != std::string::npos) text += about_threads(membership, flight);
  const std::string dump = flight.dump(membership, text);
  if (!dump.empty()) text += concat(" [the last calls are in ", dump, "]");
  return std::make_exception_ptr(CommError(text, {.rank = membership.own_global(),
                                                  .peer = culprit,
                                                  .collective = std::string(name_of(kind_of(operation.print))),
                                                  .sequence_number = operation.number}));
}

std::string reason_of_a_broken_group(const Membership& membership, const Operation& operation,
                                     const std::string& reason) {
  if (operation.kind == CallKind::kMonitoredBarrier && membership.rank != 0 && operation.number > 0) {
    return concat("rank ", membership.own_global(), " reached the monitored barrier, but failed waiting on rank ",
                  membership.global(0), ": ", reason);
  }
  return concat("the group is broken: ", reason, "; build a new group");
}

void raise_timeout(const Membership& membership, const Operation& operation, int culprit, const std::string& who) {
  const std::string time = in_seconds(Deadline::Clock::now() - operation.issued);
  if (culprit < 0) throw CallFailed{concat("timed out after ", time), -1};
  const int rank = membership.global(culprit);
  throw CallFailed{concat("timed out: nothing from rank ", rank, " for ", time, "; ", who), rank};
}

std::string where_and_thrown(const std::string& last_call, const std::string& thrown) {
  const std::string where = last_call.empty() ? "has made no call in this group yet" : "last entered " + last_call;
  return thrown.empty() ? where : concat(where, ", and then threw: ", thrown);
}

void WaitingWord::say(const Membership& membership, const Operation& operation, std::span<const std::string> who) {
  next_ *= 2;
  if (who.empty()) return;
  std::string all;
  for (const std::string& one : who) all += concat(all.empty() ? "" : "; ", one);
  // One write, so that lines of several ranks stay whole.
  std::cerr << concat(prefix_of(membership, operation), "waiting since ",
                      in_seconds(Deadline::Clock::now() - operation.issued), " for ", all, "\n")
            << std::flush;
}

std::string in_seconds(Deadline::Clock::duration time) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
  return concat(ms / 1000, ".", ms % 1000 / 100, " s");
}

}  // namespace chorale::comm
