// Did everybody make the same call?
#include <algorithm>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/comm/shm_group.h"

namespace chorale::comm {
namespace {

[[gnu::cold, gnu::noinline]] void raise_difference(const ShmGroup& group, const Operation& operation) {
  // Ranks by the call they made, in the order of their first rank.
  std::vector<std::pair<Fingerprint, std::vector<int>>> camps;
  for (int peer = 0; peer < group.size; ++peer) {
    const Fingerprint& print = group.segment.slot(peer, operation.number).fingerprint;
    auto camp = std::find_if(camps.begin(), camps.end(), [&](const auto& other) { return other.first == print; });
    if (camp == camps.end()) camp = camps.insert(camps.end(), {print, {}});
    camp->second.push_back(peer);
  }
  std::string text = "ranks made different calls:";
  for (const auto& [print, ranks] : camps) {
    text += ranks.size() > 1 ? " ranks" : " rank";
    for (size_t r = 0; r < ranks.size(); ++r) text += concat(r > 0 ? ", " : " ", group.global(ranks[r]));
    Fingerprint shown = print;
    if (shown.root >= 0 && shown.root < group.size) shown.root = group.global(shown.root);
    text += concat(": ", describe(shown), ";");
  }
  text += " all ranks must make the same calls in the same order";
  // The smallest camp is the odd one out; of equal ones the later.
  auto odd = camps.begin();
  for (auto camp = camps.begin(); camp != camps.end(); ++camp) {
    if (camp->second.size() <= odd->second.size()) odd = camp;
  }
  throw CallFailed{text, group.global(odd->second.front())};
}

}  // namespace

void check_fingerprints(const ShmGroup& group, const Operation& operation) {
  for (int peer = 0; peer < group.size; ++peer) {
    if (!(group.segment.slot(peer, operation.number).fingerprint == operation.print)) [[unlikely]]
      raise_difference(group, operation);
  }
}

}  // namespace chorale::comm
