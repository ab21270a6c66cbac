// Who is in the next epoch of an elastic job, from what its nodes say of their ranks (docs/dev/elastic.md).
#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "chorale/launch/elastic_limits.h"
#include "chorale/transport/store/epochs.h"

namespace chorale::launch {

// What a node says of its ranks.
struct NodeFacts {
  transport::EpochNode node{};
  std::vector<int> members{};  // that run and stay: of the last epoch, and others that are ready to take part
  bool used = false;           // a rank has asked to take part: the program is one that can go on
  bool left = false;           // a rank has ended of its own will: the job comes to its end
  bool hopeless = false;       // ranks that are started here end before they take part
  bool done = false;           // all steps are
  bool finished = false;       // no rank runs here, and none is to be started
  bool leaves = false;         // for good: the job goes on without this node
  std::string cause{};         // of what has changed here since the last epoch

  std::string text() const;
  // CommError for anything else.
  static NodeFacts parse(const std::string& text);
};

// Used by one thread.
class Successor {
 public:
  struct Plan {
    ElasticLimits limits;
    std::chrono::milliseconds patience = std::chrono::seconds(60);  // with fewer than the least
    std::function<void(const std::string& line)> say = {};
  };
  explicit Successor(Plan plan) : plan_(std::move(plan)) {}

  struct Answer {
    std::optional<transport::Epoch> next{};  // nothing: there is no change, or more ranks are awaited
    std::optional<std::string> problem{};    // why the job cannot go on
  };
  // `nodes`: those that are reached, with what each says. A node of the current epoch that is missing is lost.
  Answer after(const transport::Epoch& current, const std::vector<NodeFacts>& nodes);
  // Deaths are known, and more ranks are awaited.
  bool waits() const { return waits_since_.has_value(); }

 private:
  const Plan plan_;
  std::optional<std::chrono::steady_clock::time_point> waits_since_;
};

}  // namespace chorale::launch
