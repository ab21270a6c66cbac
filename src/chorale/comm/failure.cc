#include "chorale/comm/failure.h"

#include <algorithm>
#include <utility>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

int global(const Membership& membership, int rank) { return membership.members[static_cast<size_t>(rank)]; }

}  // namespace

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
  std::string text = "ranks made different calls:";
  for (const auto& [print, ranks] : camps) {
    text += ranks.size() > 1 ? " ranks" : " rank";
    for (size_t r = 0; r < ranks.size(); ++r) text += concat(r > 0 ? ", " : " ", global(membership, ranks[r]));
    text += concat(": ", describe(membership, print), ";");
  }
  text += " all ranks must make the same calls in the same order";
  // The smallest camp is the odd one out; of equal ones the later.
  auto odd = camps.begin();
  for (auto camp = camps.begin(); camp != camps.end(); ++camp) {
    if (camp->second.size() <= odd->second.size()) odd = camp;
  }
  throw CallFailed{text, global(membership, odd->second.front())};
}

void note_absence(const Membership& membership, Operation& operation) {
  const int missing = operation.seen;
  const bool one_more = missing < membership.size();
  if (one_more) operation.absent.push_back(missing);
  if (operation.wait_for_all && one_more) {
    operation.deadline = within(operation.timeout);
    return;
  }
  std::string who, there;
  for (int peer : operation.absent) who += concat(who.empty() ? "" : ", ", global(membership, peer));
  for (int peer = 0; peer < missing; ++peer) {
    if (std::find(operation.absent.begin(), operation.absent.end(), peer) == operation.absent.end())
      there += concat(there.empty() ? "" : ", ", global(membership, peer));
  }
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(operation.timeout).count();
  throw CallFailed{concat("rank ", global(membership, 0), " timed out in the monitored barrier after ", ms, " ms: rank",
                          operation.absent.size() > 1 ? "s " : " ", who, " did not reach it (seen: ", there, ")"),
                   global(membership, operation.absent.front())};
}

void raise_misfit(const Membership& membership, int from, uint64_t bytes, DType dtype, const Operation& receive) {
  throw CallFailed{concat("rank ", global(membership, from), " sent ", bytes, " bytes of ", dtype, " (tag ",
                          receive.tag, ") where rank ", global(membership, membership.rank), " receives ",
                          receive.take[0].bytes, " bytes of ", receive.dtype),
                   global(membership, from)};
}

std::string describe(const Membership& membership, const Fingerprint& print) {
  Fingerprint shown = print;
  if (shown.root >= 0 && shown.root < membership.size()) shown.root = global(membership, shown.root);
  return describe(shown);
}

std::string who_is_this(const Membership& membership) {
  constexpr int kMostShown = 8;
  std::string ranks;
  if (membership.size() > 0 && membership.members.back() >= membership.size()) {
    for (int r = 0; r < std::min(membership.size(), kMostShown); ++r)
      ranks += concat(r == 0 ? ": ranks " : ", ", global(membership, r));
    if (membership.size() > kMostShown) ranks += ", …";
  }
  return concat("rank ", global(membership, membership.rank), " (group ", membership.name, " of ", membership.size(),
                ranks, ")");
}

std::string prefix_of(const Membership& membership, const Operation& operation) {
  const std::string number = operation.number > 0 ? concat(" #", operation.number) : std::string();
  return concat("[", name_of(operation.kind), number, "] ", who_is_this(membership), ": ");
}

std::exception_ptr error_of(const Membership& membership, const Operation& operation, const std::string& reason,
                            int culprit, const FlightRecorder& flight) {
  std::string text = prefix_of(membership, operation) + reason;
  const std::string dump = flight.dump(membership, text);
  if (!dump.empty()) text += concat(" [the last calls are in ", dump, "]");
  return std::make_exception_ptr(CommError(text, {.rank = global(membership, membership.rank),
                                                  .peer = culprit,
                                                  .collective = std::string(name_of(operation.kind)),
                                                  .sequence_number = operation.number}));
}

std::string reason_of_a_broken_group(const Membership& membership, const Operation& operation,
                                     const std::string& reason) {
  if (operation.kind == CallKind::kMonitoredBarrier && membership.rank != 0 && operation.number > 0) {
    return concat("rank ", global(membership, membership.rank),
                  " reached the monitored barrier, but failed waiting on rank ", global(membership, 0), ": ", reason);
  }
  return concat("the group is broken: ", reason, "; build a new group");
}

std::string where_and_thrown(const std::string& last_call, const std::string& thrown) {
  const std::string where = last_call.empty() ? "has made no call in this group yet" : "last entered " + last_call;
  return thrown.empty() ? where : concat(where, ", and then threw: ", thrown);
}

std::string in_seconds(Deadline::Clock::duration time) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
  return concat(ms / 1000, ".", ms % 1000 / 100, " s");
}

}  // namespace chorale::comm
