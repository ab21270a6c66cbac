#include "chorale/snapshot/agreement.h"

#include <set>

#include "chorale/base/error.h"
#include "chorale/comm/objects.h"

namespace chorale::snapshot {
namespace {

std::string described(const std::string& step, const std::map<int, std::string>& failures) {
  std::string text = concat("[checkpoint] ", step, " failed on ", failures.size() == 1 ? "rank" : "ranks");
  for (auto at = failures.begin(); at != failures.end(); ++at)
    text += concat(at == failures.begin() ? " " : ", ", at->first);
  for (const auto& [rank, what] : failures) text += concat("; rank ", rank, ": ", what);
  return text;
}

}  // namespace

CheckpointError::CheckpointError(const std::string& step, std::map<int, std::string> failures)
    : StateError(described(step, failures)), failures_(std::move(failures)) {}

void check_same_keys(const comm::Group& group, const State& state) {
  std::set<std::string> own, any;
  for (const TensorChunk& chunk : state.chunks) own.insert(chunk.key);
  for (const auto& [key, bytes] : state.bytes) own.insert(key);
  comm::List list;
  for (const std::string& key : own) list.emplace_back(key);
  std::vector<std::set<std::string>> keys;
  for (const comm::Value& of_rank : comm::all_gather_object(group, list)) {
    std::set<std::string>& some = keys.emplace_back();
    for (const comm::Value& key : of_rank.as<comm::List>()) some.insert(key.as<std::string>());
    any.insert(some.begin(), some.end());
  }
  std::string differences;
  for (size_t rank = 0; rank < keys.size(); ++rank) {
    for (const std::string& key : any) {
      if (!keys[rank].contains(key))
        differences += concat(differences.empty() ? "" : ", ", "rank ", group.global_rank(static_cast<int>(rank)),
                              " has no ", key);
    }
  }
  CHORALE_CHECK(differences.empty(), "[checkpoint] the ranks' keys differ: ", differences);
}

const char* name_of(Step step) {
  switch (step) {
    case Step::kPrepare:
      return "preparing";
    case Step::kPlan:
      return "planning";
    case Step::kAgree:
      return "putting plans together";
    case Step::kWrite:
      return "writing";
    case Step::kIndex:
      return "writing the index";
    case Step::kRead:
      return "reading";
  }
  return "";
}

std::vector<comm::Value> everywhere(const comm::Group& group, Step step, const std::function<void(Step)>& on_step,
                                    const std::function<comm::Value()>& work) {
  comm::Map mine;
  try {
    if (on_step) on_step(step);
    mine["value"] = work();
  } catch (const std::exception& error) {
    mine["error"] = std::string(error.what());
  }
  const bool alone = !group.is_member();
  const std::vector<comm::Value> all =
      alone ? std::vector<comm::Value>{comm::Value(mine)} : comm::all_gather_object(group, comm::Value(mine));
  std::map<int, std::string> failures;
  std::vector<comm::Value> results;
  for (size_t r = 0; r < all.size(); ++r) {
    const auto& map = all[r].as<comm::Map>();
    if (const auto error = map.find("error"); error != map.end()) {
      failures[alone ? 0 : group.global_rank(static_cast<int>(r))] = error->second.as<std::string>();
    } else {
      results.push_back(map.at("value"));
    }
  }
  if (!failures.empty()) throw CheckpointError(name_of(step), std::move(failures));
  return results;
}

}  // namespace chorale::snapshot
