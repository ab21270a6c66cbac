#include "cell.h"

#include <algorithm>
#include <random>

#include "chorale/base/error.h"

namespace chorale::faults {
namespace {

using namespace std::chrono_literals;

constexpr const char* kNames[] = {"kill",      "kill_soon",   "stop",        "stop_soon", "exit",
                                  "exception", "wrong_shape", "wrong_dtype", "wrong_op",  "wrong_root",
                                  "skip",      "cut",         "slow",        "damage",    "damage_data"};

bool exists(Fault fault, const CallRow& call) {
  switch (fault) {
    case Fault::kShape:
    case Fault::kDtype:
      return call.has_data;
    case Fault::kReduction:
      return call.reduces;
    case Fault::kRoot:
      return call.has_root;
    case Fault::kCut:
      return !call.has_root;  // every host writes to the other
    case Fault::kDamageData:
      return call.has_data && !call.has_root;  // where every rank gives something that another takes
    default:
      return true;
  }
}

}  // namespace

Cell Cell::parse(std::string_view text) {
  std::vector<std::string> words;
  for (std::string_view rest = text;;) {
    const size_t end = std::min(rest.find('/'), rest.size());
    words.emplace_back(rest.substr(0, end));
    if (end == rest.size()) break;
    rest.remove_prefix(end + 1);
  }
  CHORALE_CHECK(words.size() == 6, "'", text, "' is no cell; one is such as kill/all_reduce/shm/3/17/2");
  const auto* const fault = std::find(std::begin(kNames), std::end(kNames), words[0]);
  CHORALE_CHECK(fault != std::end(kNames), "there is no fault '", words[0], "'");
  return {.fault = static_cast<Fault>(fault - std::begin(kNames)),
          .call = &call_row(words[1]),
          .column = words[2],
          .size = std::stoi(words[3]),
          .seed = std::stoull(words[4]),
          .steps = std::stoi(words[5])};
}

int Cell::culprit() const {
  // Only the first rank of a host is sure to write to another.
  const int among = fault == Fault::kCut ? 2 : size;
  return static_cast<int>(std::mt19937_64(seed)() % static_cast<uint64_t>(among));
}
int Cell::root() const { return static_cast<int>(std::mt19937_64(seed + 1)() % static_cast<uint64_t>(size)); }
int64_t Cell::count() const {
  constexpr int64_t kCounts[] = {1, 7, 1000, 6000, 50'000, 300'000};
  return kCounts[std::mt19937_64(seed + 2)() % std::size(kCounts)];
}

bool Cell::in_a_loop() const {
  return fault == Fault::kKillSoon || fault == Fault::kStopSoon || fault == Fault::kCut || fault == Fault::kDamage ||
         fault == Fault::kDamageData;
}

bool Cell::ends_with_the_call() const { return fault >= Fault::kShape && fault <= Fault::kRoot && !call->pairwise; }

std::chrono::milliseconds Cell::deadline() const {
  const bool ends_by_it = fault == Fault::kStop || fault == Fault::kStopSoon ||
                          (fault == Fault::kSkip && std::string_view(call->name) == "send");
  // The others must not need it.
  return ends_by_it ? 500ms : 10s;
}

bool Cell::may_name(int rank) const {
  const bool differs = fault == Fault::kShape || fault == Fault::kDtype || fault == Fault::kReduction ||
                       fault == Fault::kRoot || fault == Fault::kSkip;
  // Of two that made different calls, or of the two ends of a message, either may be the wrong one.
  if (differs && size == 2) return true;
  if (differs && call->pairwise && (fault == Fault::kShape || std::string_view(call->name) == "send")) return true;
  // The rank that made the new group's memory may give up and end before the others have seen it: then they blame that rank.
  if (in_a_loop() && std::string_view(call->name) == "new_group") return true;
  // A wire has two ends, on different hosts.
  if (fault == Fault::kCut && host_of(rank) != host_of(culprit())) return true;
  return rank == culprit();
}

std::vector<std::string> existing_cells() {
  std::vector<std::string> cells;
  for (size_t f = 0; f < std::size(kNames); ++f) {
    for (const CallRow& call : call_rows()) {
      if (exists(static_cast<Fault>(f), call)) cells.push_back(concat(kNames[f], " ", call.name));
    }
  }
  return cells;
}

}  // namespace chorale::faults
