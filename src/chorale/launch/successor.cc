#include "chorale/launch/successor.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <sstream>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"

namespace chorale::launch {
namespace {

// A word for every text.
std::string word_of(const std::string& place) { return place.empty() ? "-" : place; }

}  // namespace

std::string NodeFacts::text() const {
  std::string list;
  for (const int member : members) list += concat(" ", member);
  return concat(node.number, " ", word_of(node.place), " ", used, " ", left, " ", hopeless, " ", done, " ", finished,
                " ", leaves, " ", members.size(), list, "\n", cause);
}

NodeFacts NodeFacts::parse(const std::string& text) {
  const size_t end = std::min(text.find('\n'), text.size());
  std::istringstream words(text.substr(0, end));
  NodeFacts facts;
  size_t count = 0;
  words >> facts.node.number >> facts.node.place >> facts.used >> facts.left >> facts.hopeless >> facts.done >>
      facts.finished >> facts.leaves >> count;
  for (int member = 0; facts.members.size() < count && words >> member;) facts.members.push_back(member);
  if (!words || facts.members.size() != count || end == text.size())
    throw CommError(concat("[launch] a node says of its ranks what is not ours: '", text, "'"));
  if (facts.node.place == "-") facts.node.place.clear();
  facts.cause = text.substr(end + 1);
  return facts;
}

Successor::Answer Successor::after(const transport::Epoch& current, const std::vector<NodeFacts>& nodes) {
  Answer answer;
  std::set<int> running;
  std::vector<std::string> causes;
  bool used = false, left = false, hopeless = true;
  for (const NodeFacts& facts : nodes) {
    running.insert(facts.members.begin(), facts.members.end());
    if (!facts.cause.empty()) causes.push_back(facts.cause);
    used = used || facts.used;
    left = left || facts.left;
    hopeless = hopeless && facts.hopeless;
  }
  transport::Epoch next;
  next.number = current.number + 1;
  next.founders = current.founders;
  bool lost = false;
  for (const transport::EpochNode& node : current.nodes) {
    const auto facts = std::find_if(nodes.begin(), nodes.end(), [&](const auto& other) { return other.node == node; });
    if (facts != nodes.end() && !facts->leaves) {
      next.nodes.push_back(node);
      continue;
    }
    causes.push_back(
        concat(facts == nodes.end() ? "lost node " : "given back: node ", node.number, " (", node.place, ")"));
    lost = true;
  }
  for (const int member : current.members) {
    if (running.erase(member) > 0) next.members.push_back(member);
  }
  const bool lost_all = next.members.empty();
  lost = lost || next.members.size() < current.members.size();
  if (!lost && running.empty()) return answer;
  if (lost_all && !left) {
    answer.problem = concat("no rank is left that had the state of the job; start it again from a checkpoint. ",
                            fmt::format("{}", fmt::join(causes, "; ")));
    return answer;
  }
  if (!used) return answer;  // its first processes may still be on their way, or it is one that cannot go on
  const auto size = next.members.size() + running.size();
  const auto now = std::chrono::steady_clock::now();
  if (!left && static_cast<int>(size) < plan_.limits.least) {
    if (!waits_since_) {
      waits_since_ = now;
      if (plan_.say)
        plan_.say(fmt::format("{} ranks are left, at least {} are wanted: waiting up to {} s for more", size,
                              plan_.limits.least, plan_.patience.count() / 1000));
    }
    if (hopeless || now - *waits_since_ >= plan_.patience)
      answer.problem = fmt::format("{} ranks are left, at least {} are wanted, and no more have come. {}", size,
                                   plan_.limits.least, fmt::join(causes, "; "));
    return answer;
  }
  waits_since_.reset();
  if (size == 0) return answer;
  if (!running.empty()) {
    causes.push_back(fmt::format("member{} {} {}", running.size() == 1 ? "" : "s", fmt::join(running, " "),
                                 running.size() == 1 ? "joins" : "join"));
    next.members.insert(next.members.end(), running.begin(), running.end());
  }
  if (!current.nodes.empty()) {
    for (const NodeFacts& facts : nodes) {
      const bool brings_ranks = std::any_of(facts.members.begin(), facts.members.end(),
                                            [&](int member) { return next.rank_of(member) >= 0; });
      if (!current.has_node(facts.node.number) && brings_ranks) next.nodes.push_back(facts.node);
    }
    std::sort(next.nodes.begin(), next.nodes.end(), [](const auto& a, const auto& b) { return a.number < b.number; });
  }
  next.cause = fmt::format("{}", fmt::join(causes, "; "));
  answer.next = std::move(next);
  return answer;
}

}  // namespace chorale::launch
