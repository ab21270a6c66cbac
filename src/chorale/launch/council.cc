#include "chorale/launch/council.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <utility>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"

namespace chorale::launch {
namespace {

using namespace std::chrono_literals;
using transport::Epoch;
using transport::EpochNode;

constexpr auto kTick = 100ms;    // between two looks, when nobody rings
constexpr auto kAnswer = 500ms;  // for a call of the keeper's store
// How long the council waits for an answer to a ballot: from a node that is taken for lost, and from others.
constexpr auto kLostAnswers = 200ms, kAnswers = 1500ms;
// The one after the other begins to propose, when the keeper is lost.
constexpr auto kStagger = 100ms;
// The pause of a node that has asked for votes in vain. All others do so at about the same time.
constexpr auto kTakeOver = 1800ms;
constexpr auto kOwnStore = 10s;

constexpr const char* kJoins = "joins/";  // what nodes say that are in no epoch yet, at the keeper

std::string facts_key(int node) { return concat("facts/", node); }
std::string beat_key(int node) { return concat("beat/", node); }
std::string gone_key(int node) { return concat("gone/", node); }
std::string join_key(int node) { return concat(kJoins, node); }
std::string bell_key(int64_t count) { return concat("bell/", count); }
constexpr const char* kFacts = "facts";      // in a node's own store
constexpr const char* kDecided = "decided";  // the last that others have told it of
constexpr const char* kState = "state";      // of the keeper
constexpr const char* kHalt = "halt";        // at the keeper

// Before the launcher has said anything of its ranks there is nothing to be decided about them.
bool is_known(const NodeFacts& facts) { return !facts.node.place.empty(); }

}  // namespace

struct Council::State {
  bool waits = false, done = false, all_finished = false;
  std::string text() const { return concat(waits, " ", done, " ", all_finished); }
};

Council::Council(Plan plan)
    : plan_(std::move(plan)),
      silence_(plan_.keep_alive * 5 / 4),  // TCP may need as long again as the longest outage that is survived
      successor_(plan_.successor),
      current_(plan_.epoch),
      contact_(Deadline::Clock::now()) {
  CHORALE_INVARIANT(!current_.nodes.empty(), "a council of no nodes");
  facts_.node.number = plan_.node;
  prepare_to_vote(*plan_.own, within(kOwnStore));
  plan_.own->set(kEpochOfNode, current_.text(), within(kOwnStore));
  stores_[plan_.node] = plan_.own;
  // From the start on each node has a connection to every other one: at the place of one that is gone there may be
  // another later, whose store has forgotten its vote.
  for (const EpochNode& node : current_.nodes) store_of(node, within(kOwnStore));
  number_nodes();
  thread_ = std::thread([this] { run(); });
}

Council::~Council() {
  ending_ = true;
  try {
    ring(*plan_.own, within(kAnswer));
  } catch (const Error&) {  // the thread looks from time to time
  }
  thread_.join();
}

// ---- the launcher's side

void Council::tell(NodeFacts facts) {
  {
    const std::lock_guard lock(mutex_);
    if (facts.text() == facts_.text()) return;
    facts_ = std::move(facts);
  }
  plan_.own->set(kFacts, own_facts().text(), within(kOwnStore));
  ring(*plan_.own, within(kOwnStore));
}

std::optional<Epoch> Council::news() {
  const std::lock_guard lock(mutex_);
  return std::exchange(news_, std::nullopt);
}

std::optional<std::string> Council::problem() const {
  const std::lock_guard lock(mutex_);
  return problem_;
}

std::optional<std::string> Council::halted() const {
  const std::lock_guard lock(mutex_);
  return halted_;
}

void Council::halt(const std::string& why) {
  {
    const std::lock_guard lock(mutex_);
    if (halted_) return;
    halted_ = why;
  }
  ring(*plan_.own, within(kOwnStore));
}

void Council::fail(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (!problem_) problem_ = why;
}

NodeFacts Council::own_facts() const {
  const std::lock_guard lock(mutex_);
  return facts_;
}

// ---- the thread

void Council::run() {
  bool last = false;
  while (!last) {
    await_bell();
    last = ending_;  // one more round after the end, so that the others hear of it
    try {
      learn();
      if (problem() || released_) continue;
      if (is_keeper()) {
        keep();
      } else {
        follow();
      }
    } catch (const Error& error) {
      fail(concat("the launcher's own store: ", error.what()));
    }
  }
}

// A bell is an entry, since a store wakes those that wait for one.
void Council::ring(transport::Store& store, Deadline deadline) const {
  store.set(bell_key(store.add("bells", 1, deadline)), "", deadline);
}

void Council::await_bell() {
  const std::string next = bell_key(heard_ + 1);
  try {
    plan_.own->wait({&next, 1}, within(kTick));
    ++heard_;
    plan_.own->remove(next, within(kOwnStore));
  } catch (const CommError&) {  // nobody rang
    for (const int64_t rung = plan_.own->add("bells", 0, within(kOwnStore)); heard_ < rung;)
      plan_.own->remove(bell_key(++heard_), within(kOwnStore));
  }
}

// Whether another node has told this one of a later epoch.
void Council::learn() {
  if (!plan_.own->contains(kDecided, within(kOwnStore))) return;
  adopt(Epoch::parse(plan_.own->get(kDecided, within(kOwnStore))));
}

// A node may have missed some before it. False where this node cannot go on with it.
bool Council::adopt(const Epoch& epoch) {
  if (epoch.number <= current_.number) return true;
  if (!epoch.has_node(plan_.node)) {
    if (own_facts().leaves) {
      released_ = true;
      return false;
    }
    fail(concat("this node (", name_of(plan_.node), ") was excluded from epoch ", epoch.number, " (", epoch.cause,
                "): its ranks end here, and the others go on"));
    return false;
  }
  const bool keeper_stays = epoch.nodes.front() == current_.nodes.front();
  current_ = epoch;
  plan_.own->set(kEpochOfNode, current_.text(), within(kOwnStore));
  number_nodes();
  after_ = 0;
  in_vain_since_.reset();
  if (!keeper_stays) {
    will_.reset();
    told_.clear();
  }
  keeper_lost_.reset();
  contact_ = Deadline::Clock::now();
  std::erase_if(stores_, [&](const auto& row) { return row.first != plan_.node && !epoch.has_node(row.first); });
  for (const EpochNode& node : epoch.nodes) {
    plan_.own->remove(join_key(node.number), within(kOwnStore));
    try {
      store_of(node, within(kAnswer));
    } catch (const CommError&) {  // this node cannot ask for the vote of one that it does not reach
    }
  }
  const std::lock_guard lock(mutex_);
  news_ = epoch;
  return true;
}

// A node that joins gets the next number, here.
void Council::number_nodes() const {
  const int64_t known = plan_.own->add(kHighestNode, 0, within(kOwnStore));
  const int64_t highest = current_.nodes.back().number;
  if (known < highest) plan_.own->add(kHighestNode, highest - known, within(kOwnStore));
}

std::shared_ptr<transport::Store> Council::store_of(const EpochNode& node, Deadline deadline) {
  auto& store = stores_[node.number];
  if (!store) store = plan_.connect(node.place, deadline);
  return store;
}

std::string Council::name_of(int node) const {
  for (const EpochNode& other : current_.nodes) {
    if (other.number == node) return concat("node ", node, ", ", other.place);
  }
  return concat("node ", node);
}

// ---- the keeper

bool Council::is_lost(int node, Time now) {
  if (plan_.own->contains(gone_key(node), within(kOwnStore))) return true;
  const int64_t count = plan_.own->add(beat_key(node), 0, within(kOwnStore));
  const auto [beat, is_new] = beats_.try_emplace(node, Beat{count, now});
  if (is_new || beat->second.count != count) beat->second = {count, now};
  return now - beat->second.since > silence_;
}

void Council::keep() {
  const auto now = Deadline::Clock::now();
  const Deadline soon = within(kOwnStore);
  std::vector<int> lost;
  std::vector<NodeFacts> nodes{own_facts()};
  bool all_have_told = is_known(nodes.front());
  for (const EpochNode& node : current_.nodes) {
    if (node.number == plan_.node) continue;
    if (is_lost(node.number, now)) {
      lost.push_back(node.number);
    } else if (!plan_.own->contains(facts_key(node.number), soon)) {
      all_have_told = false;  // it has not found its new keeper yet
    } else {
      nodes.push_back(NodeFacts::parse(plan_.own->get(facts_key(node.number), soon)));
    }
  }
  State state;
  state.all_finished = all_have_told;
  for (const NodeFacts& facts : nodes) {
    state.done = state.done || facts.done;
    state.all_finished = state.all_finished && facts.finished;
  }
  if (plan_.own->contains(kHalt, soon)) halt(plan_.own->get(kHalt, soon));
  if (const auto why = halted()) plan_.own->compare_set(kHalt, "", *why, soon);
  if (all_have_told && !state.all_finished && !halted()) {
    add_newcomers(nodes);
    if (next_after(nodes) && !elect(lost)) end_if_in_vain("it has the store of the job");
  }
  state.waits = successor_.waits();
  waits_ = state.waits;
  done_ = done_ || state.done;
  all_finished_ = state.all_finished;
  plan_.own->set(kState, state.text(), soon);
}

// Nodes that are in no epoch yet.
void Council::add_newcomers(std::vector<NodeFacts>& nodes) {
  for (const std::string& key : plan_.own->keys(kJoins, within(kOwnStore))) {
    NodeFacts facts = NodeFacts::parse(plan_.own->get(key, within(kOwnStore)));
    if (!current_.has_node(facts.node.number) && !is_lost(facts.node.number, Deadline::Clock::now()))
      nodes.push_back(std::move(facts));
  }
}

std::optional<Epoch> Council::next_after(const std::vector<NodeFacts>& nodes) {
  const Successor::Answer answer = successor_.after(current_, nodes);
  waits_ = successor_.waits();
  if (answer.problem) halt(concat("1 ", *answer.problem));
  return answer.next;
}

void Council::end_if_in_vain(const std::string& why) {
  const auto now = Deadline::Clock::now();
  if (!in_vain_since_) in_vain_since_ = now;
  if (now - *in_vain_since_ < kTakeOver) return;
  fail(concat("not enough of the ", current_.nodes.size(), " nodes are reached to go on (", why,
              "): the ranks of this node end; start the job again, it goes on from its last checkpoint"));
}

// ---- the others

void Council::follow() {
  const EpochNode& keeper = current_.nodes.front();
  const bool is_member = current_.has_node(plan_.node);
  const Deadline deadline = within(kAnswer);
  std::string why = concat("was silent for ", std::chrono::duration<double>(silence_).count(), " s");
  bool is_closed = false;
  try {
    const auto store = store_of(keeper, deadline);
    store->add(beat_key(plan_.node), 1, deadline);
    if (!will_ && plan_.will) will_ = plan_.will(keeper.place, gone_key(plan_.node));
    const NodeFacts facts = own_facts();
    if (const std::string all = concat(current_.number, "\n", facts.text()); told_ != all && is_known(facts)) {
      store->set(is_member ? facts_key(plan_.node) : join_key(plan_.node), facts.text(), deadline);
      ring(*store, deadline);
      told_ = all;
    }
    if (const auto own = halted()) store->compare_set(kHalt, "", *own, deadline);
    if (store->contains(kHalt, deadline)) halt(store->get(kHalt, deadline));
    if (store->contains(kState, deadline)) {
      std::istringstream words(store->get(kState, deadline));
      bool waits = false, done = false, all_finished = false;
      words >> waits >> done >> all_finished;
      waits_ = waits;
      done_ = done_ || done;
      all_finished_ = all_finished_ || all_finished;
    }
    adopt(Epoch::parse(store->get(kEpochOfNode, deadline)));
    contact_ = Deadline::Clock::now();
    keeper_lost_.reset();
    return;
  } catch (const transport::StoreLost& error) {
    why = error.what();
    is_closed = true;
  } catch (const CommError&) {
  }
  // A connection that broke is tried once more, in the next round, before the keeper is taken for lost.
  const auto now = Deadline::Clock::now();
  if (!is_closed && now - contact_ <= silence_) return;
  take_over(why);
}

// The keeper is lost, as far as this node knows.
void Council::take_over(const std::string& why) {
  const auto now = Deadline::Clock::now();
  const EpochNode keeper = current_.nodes.front();
  if (own_facts().finished && done_) {
    all_finished_ = true;
    return;
  }
  if (!current_.has_node(plan_.node))
    return fail(concat("lost ", name_of(keeper.number), ", before the job was joined: ", why));
  if (!keeper_lost_) keeper_lost_ = now;
  const auto own = std::find_if(current_.nodes.begin(), current_.nodes.end(),
                                [&](const EpochNode& node) { return node.number == plan_.node; });
  if (now - *keeper_lost_ < kStagger * (own - current_.nodes.begin() - 1)) return;
  if (!elect({keeper.number}))
    end_if_in_vain(concat("lost ", name_of(keeper.number), ", which has the store of the job: ", why));
}

// ---- both

// False where too few nodes were reached.
bool Council::elect(const std::vector<int>& lost) {
  std::vector<Voter> voters;
  std::vector<std::shared_ptr<transport::Store>> held;
  for (const EpochNode& node : current_.nodes) {
    const bool seems_lost = std::find(lost.begin(), lost.end(), node.number) != lost.end();
    held.push_back(stores_[node.number]);
    voters.push_back({node.number, held.back().get(), seems_lost ? kLostAnswers : kAnswers});
  }
  Ballot ballot(current_.number + 1, plan_.node, std::move(voters), current_.nodes.front().number, after_);
  std::mutex mutex;
  std::vector<NodeFacts> nodes;
  const bool asked = ballot.ask([&](const Voter& voter) {
    NodeFacts facts = NodeFacts::parse(voter.store->get(kFacts, within(voter.patience)));
    const std::lock_guard lock(mutex);
    nodes.push_back(std::move(facts));
  });
  after_ = ballot.highest();
  if (ballot.is_past()) {
    // Others have decided later ones. Ask those that were reached how far they are.
    for (const auto& store : held) {
      try {
        if (store && !adopt(Epoch::parse(store->get(kEpochOfNode, within(kLostAnswers))))) break;
      } catch (const CommError&) {
      }
    }
    return true;
  }
  if (!asked) return ballot.is_enough(ballot.reached());
  in_vain_since_.reset();
  std::optional<std::string> value = ballot.bound_to();
  if (!value) {
    if (is_keeper()) add_newcomers(nodes);
    std::sort(nodes.begin(), nodes.end(), [](const auto& a, const auto& b) { return a.node.number < b.node.number; });
    const auto next = next_after(nodes);
    if (!next) return true;
    value = next->text();
  }
  if (ballot.propose(*value)) tell_of(Epoch::parse(*value));
  return true;
}

void Council::tell_of(const Epoch& epoch) {
  const std::string text = epoch.text();
  std::vector<EpochNode> all = epoch.nodes;
  for (const EpochNode& node : current_.nodes) {
    if (!epoch.has_node(node.number)) all.push_back(node);  // it may be there after all
  }
  std::vector<std::thread> calls;
  for (const EpochNode& node : all) {
    if (node.number == plan_.node) continue;
    const auto known = stores_[node.number];
    calls.emplace_back([&, known, node, patience = epoch.has_node(node.number) ? kAnswers : kLostAnswers] {
      try {
        const Deadline deadline = within(patience);
        const auto store = known ? known : plan_.connect(node.place, deadline);
        store->set(kDecided, text, deadline);
        ring(*store, deadline);
      } catch (const Error&) {  // it hears of it from the keeper
      }
    });
  }
  for (std::thread& call : calls) call.join();
  adopt(epoch);
}

}  // namespace chorale::launch
