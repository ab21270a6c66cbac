#include "chorale/elastic/elastic.h"

#include <algorithm>
#include <bit>
#include <sstream>
#include <thread>
#include <utility>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/base/log.h"
#include "chorale/comm/flight_file.h"
#include "chorale/comm/leaving.h"
#include "chorale/op/copy.h"
#include "chorale/reducer/copy_values.h"
#include "chorale/transport/keep_alive.h"
#include "chorale/transport/store/memory_store.h"
#include "chorale/transport/store/prefix_store.h"

namespace chorale::elastic {
namespace {

using namespace std::chrono_literals;
using transport::Epoch;

constexpr auto kStoreTime = 30s;  // of a call that waits for nobody
constexpr auto kConnects = 3s;    // of an attempt to reach a launcher that may be gone

double ms_since(Deadline::Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Deadline::Clock::now() - start).count();
}

}  // namespace

// How far a rank has come, as it tells the others of the next epoch.
struct Elastic::Report {
  bool holds = false;          // the state of the job
  int64_t done = 0;            // steps that it has applied
  int64_t commits = 0;         // commit points that it has passed
  int64_t epoch = 0;           // in which the last of them began
  bool last = false;           // there are no more
  std::vector<double> sums{};  // of the last one

  std::string text() const {
    std::string all = concat(holds ? 1 : 0, " ", done, " ", commits, " ", epoch, " ", last ? 1 : 0, " ", sums.size());
    for (const double sum : sums) all += concat(" ", std::bit_cast<uint64_t>(sum));
    return all;
  }
  static Report parse(const std::string& text) {
    std::istringstream words(text);
    Report report;
    uint64_t bits = 0;
    size_t count = 0;
    words >> report.holds >> report.done >> report.commits >> report.epoch >> report.last >> count;
    while (report.sums.size() < count && words >> bits) report.sums.push_back(std::bit_cast<double>(bits));
    if (!words) throw CommError(concat("[elastic] a rank's report is not ours: '", text, "'"));
    return report;
  }
};

Elastic::Elastic(ElasticOptions options)
    : options_(std::move(options)), seat_(options_.seat ? options_.seat : Seat::from_environment()) {
  if (!seat_) {
    world_.init("env://", transport::RendezvousOptions{}, options_.group);
    return;
  }
  transport::MemoryStore nobody;
  comm::GroupOptions alone = options_.group;
  alone.chaos = "";
  group_ = comm::Group::connect(nobody, "alone", 0, 1, alone);
}

Elastic::~Elastic() = default;

// ---- what is kept

void Elastic::keep(parallel::DataParallelBase& model, optim::Optimizer& optimizer) {
  CHORALE_CHECK_STATE(!model_ && !shards_, "[elastic] there is a model already; one loop trains one");
  model_ = &model;
  optimizer_ = &optimizer;
  check_kept();
}

void Elastic::keep_sharded(std::function<Sharded(const comm::Group&)> make, ShardedOptions options) {
  CHORALE_CHECK_STATE(!model_ && !shards_, "[elastic] there is a model already; one loop trains one");
  shards_.emplace(std::move(make), std::move(options));
}

void Elastic::keep(std::string name, std::function<std::string()> save, std::function<void(const std::string&)> load,
                   bool rest) {
  CHORALE_CHECK(save && load, "[elastic] ", name, " needs a function that saves it and one that loads it");
  for (const Kept& other : kept_) CHORALE_CHECK_STATE(other.name != name, "[elastic] there is a ", name, " already");
  kept_.push_back({std::move(name), std::move(save), std::move(load), rest});
}

// What would be half done when a step is taken back.
void Elastic::check_kept() const {
  if (!seat_) return;
  CHORALE_CHECK_STATE(!optimizer_->updates_in_backward(),
                      "[elastic] updates in backward come before the commit point of a step; use job.step() alone");
  if (!model_) return;
  const reducer::CommHook* const hook = model_->reducer().hook();
  CHORALE_CHECK_STATE(!hook || hook->state, "[elastic] the hook ", hook->name,
                      " has no begin, commit and abort (reducer::HookState) by which a step that is repeated could be "
                      "taken back, or sends to a group that does not change with the ranks; train without it, or "
                      "without --elastic");
  CHORALE_CHECK_STATE(model_->reducer().owners().empty(),
                      "[elastic] gradients with owners (ZeRO, stage 2) are lost with a rank; train without --elastic");
  CHORALE_CHECK_STATE(!model_->current_join(),
                      "[elastic] join() and Elastic cannot be combined: Batches deals the same number of steps to all");
}

// What the hook of communication knows; null: there is none.
reducer::HookState* Elastic::hook_state() const {
  const reducer::CommHook* const hook = model_ ? model_->reducer().hook() : nullptr;
  return hook ? hook->state.get() : nullptr;
}

void Elastic::watch(Phase phase) const {
  if (options_.watch) options_.watch(phase, done_);
}

void Elastic::begin_step() {
  in_step_ = true;
  stepped_ = false;
  step_epoch_ = epoch_;
  optimizer_->zero_grad();
  if (seat_) {
    check_kept();
    const NamedTensors buffers = this->buffers();
    // Users may assign new ones.
    const bool same = std::equal(buffers.begin(), buffers.end(), buffers_.begin(), buffers_.end(),
                                 [](const auto& now, const auto& before) { return now.second.is(before.first); });
    if (!same) buffers_.clear();
    for (size_t i = 0; i < buffers.size(); ++i) {
      if (same) {
        reducer::copy_values(buffers_[i].first, buffers_[i].second);
      } else {
        const NoGrad scope;
        buffers_.emplace_back(buffers[i].second, clone(buffers[i].second));
      }
    }
    random_ = default_generator().state();
    if (hook_state()) hook_state()->begin();
    for (Kept& kept : kept_) {
      if (!kept.rest) kept.saved = kept.save();
    }
  }
  watch(Phase::kBegin);
}

void Elastic::take_back() {
  for (const auto& [buffer, saved] : buffers_) reducer::copy_values(saved, buffer);
  default_generator().restore(random_);
  if (hook_state()) hook_state()->abort();
  for (const Kept& kept : kept_) {
    if (!kept.rest) kept.load(kept.saved);
  }
  optimizer_->zero_grad();
}

// ---- the loop

void Elastic::run(int64_t steps, const std::function<void(int64_t step)>& body) {
  CHORALE_CHECK_STATE(model_ || shards_, "[elastic] tell first what a step changes: keep(model, optimizer)");
  CHORALE_CHECK_STATE(!in_step_, "[elastic] run() inside of run()");
  CHORALE_CHECK_STATE(!is_member_, "[elastic] run() was called before: an elastic job has one loop");
  steps_ = asked_steps_ = steps;
  struct OutOfStep {
    bool* flag;
    ~OutOfStep() { *flag = false; }
  } const out_of_step{&in_step_};
  if (seat_) {
    seat_->store->set(transport::ready_key(seat_->member), "", within(kStoreTime));
    regroup("");
  } else if (shards_) {
    enter(group(), true);
  } else {
    make_averager();
  }
  for (bool over = false; !over;) {
    try {
      if (regroup_due_) {
        if (options_.before_change) options_.before_change();
        if (shards_) hand_over();
        group_.barrier().wait();  // so that nobody is in a call any more when the groups of before end
        regroup("");
      }
      if (shards_) keep_safe();
      if (averager_ && averaged_ < done_) {
        average();
      } else if (done_ < steps_) {
        begin_step();
        body(done_);
        CHORALE_CHECK_STATE(stepped_, "[elastic] the body of step ", done_, " did not call step()");
        in_step_ = false;
      } else {
        finish();
        over = !regroup_due_;
      }
    } catch (const Repeat&) {  // the ranks are together again
      in_step_ = false;
    } catch (const CommError& error) {
      if (!seat_) throw;
      regroup(error.what());
      in_step_ = false;
    }
  }
  if (copy_costs().count > 0 && group().rank() == 0) log_info(concat("[elastic] ", copy_costs().text()));
}

// Nobody leaves before all have come here: a rank that has not passed the last commit point needs one that has.
void Elastic::finish() {
  watch(Phase::kFinish);
  pass({});
  if (seat_ && !regroup_due_) seat_->store->set(transport::kElasticDone, "", within(kStoreTime));
}

// An all-reduce: its result needs something of everybody, so nobody has it before all have come. With it, all learn at
// the same step that a rank has seen a later epoch.
void Elastic::pass(std::span<double> values) {
  passing_.assign(values.begin(), values.end());
  passing_.push_back(seat_ && seat_->board->latest() > epoch_ ? 1.0 : 0.0);
  passing_.push_back(stops_ ? 1.0 : 0.0);
  group().all_reduce(std::span<double>(passing_)).wait();
  std::copy_n(passing_.begin(), values.size(), values.begin());
  regroup_due_ = passing_[values.size()] > 0;
  last_ = passing_[values.size() + 1] > 0;
}

double Elastic::step(double value) {
  return step([this] { optimizer_->step(); }, value);
}

double Elastic::step(const std::function<void()>& update, double value) {
  step(update, std::span(&value, 1));
  return value;
}

void Elastic::step(const std::function<void()>& update, std::span<double> values) {
  CHORALE_CHECK_STATE(in_step_ && !stepped_, "[elastic] step() belongs into the body of run(), once in each step");
  struct Pending {
    const std::function<void()>** slot;
    ~Pending() { *slot = nullptr; }
  } const pending{&pending_};
  pending_ = &update;
  pending_values_ = values;
  watch(Phase::kCommit);
  try {
    pass(values);
  } catch (const CommError& error) {
    if (!seat_) throw;
    regroup(error.what());
    if (!stepped_ || went_back_) throw Repeat{};
    return;
  }
  sums_.assign(values.begin(), values.end());
  apply();
}

void Elastic::apply() {
  if (!averaging_) watch(Phase::kUpdate);
  (*pending_)();
  pending_ = nullptr;
  ++commits_;
  committed_epoch_ = step_epoch_;
  if (averaging_) {
    ++averaged_;
    return;
  }
  stepped_ = true;
  ++done_;
  if (shards_) shards_->note_commit();
  if (seat_ && hook_state()) hook_state()->commit();
  if (last_) steps_ = done_;
  watch(Phase::kApplied);
}

// ---- a change of ranks

// The group of the epoch and all that were made out of it end: whoever still waits for this rank in one of them is told
// so, also where nobody has died.
void Elastic::leave(const std::string& why) {
  comm::abandon(group_, why.empty() ? "goes on in the group of other ranks, which Elastic::group() is now"
                                    : concat("goes on without some of the others: ", why));
  averager_.reset();
  if (hook_state()) hook_state()->leave();
  if (model_) model_->set_group(comm::Group());
  group_.destroy();
}

void Elastic::regroup(const std::string& why) {
  const auto start = Deadline::Clock::now();
  Change change;
  change.repeated = in_step_ && !stepped_;
  went_back_ = false;
  std::string problem = why;
  while (true) {
    leave(problem);
    const bool was_member = is_member_;
    const Epoch epoch = next_epoch(problem);
    // Epochs that ended before this rank took part in them belong to the change.
    if (was_member) change.cause += causes_between(epoch_, epoch.number);
    epoch_ = epoch.number;
    change.epoch = epoch.number;
    change.cause += epoch.cause;
    change.noticed = start;
    change.verdict_ms = ms_since(start);
    try {
      join(epoch, change);
      break;
    } catch (const CommError& error) {  // another one has died: a later epoch comes
      problem = error.what();
      change.cause += "; ";
    }
  }
  regroup_due_ = false;
  change.repeated = (change.repeated && !stepped_) || change.steps_back > 0;
  change.rank = group_.rank();
  change.size = group_.size();
  change.step = done_;
  changes_.push_back(change);
  const std::string text = concat(
      "epoch ", change.epoch, ": ", change.size, " ranks from step ", change.step, change.repeated ? " (again)" : "",
      change.steps_back > 0 ? concat(", ", change.steps_back, " back") : std::string(), "; ", change.cause,
      "; ms: verdict ", change.verdict_ms, ", agreement ", change.agreement_ms, ", regroup ", change.regroup_ms,
      ", transfer ", change.transfer_ms);
  comm::note_event(text);
  if (group_.rank() == 0) {
    forget_epochs_before(epoch_);
    log_info(concat("[elastic] ", text));
  }
}

// What is still known of the epochs between these.
std::string Elastic::causes_between(int64_t before, int64_t now) const {
  std::string causes;
  for (int64_t number = before + 1; number < now; ++number) {
    const std::string key = transport::epoch_key(number);
    if (seat_->store->contains(key, within(kStoreTime)))
      causes += Epoch::parse(seat_->store->get(key, within(kStoreTime))).cause + "; ";
  }
  return causes;
}

Epoch Elastic::next_epoch(const std::string& why) {
  // The launchers of other nodes may notice the loss of a node later than this rank.
  const auto patience = options_.patience + (meeting_place_.empty() ? 0ms : 2 * transport::keep_alive());
  Deadline deadline = within(patience);
  for (auto pause = 100us;; pause = std::min<std::chrono::microseconds>(pause * 2, 2ms)) {
    if (const int64_t latest = seat_->board->latest(); latest > epoch_) {
      Epoch epoch = Epoch::parse(seat_->store->get(transport::epoch_key(latest), within(kStoreTime)));
      if (epoch.rank_of(seat_->member) >= 0) {
        is_member_ = true;
        return epoch;
      }
      if (is_member_)
        throw Excluded(concat("[elastic] this process (member ", seat_->member, ") was excluded from epoch ", latest,
                              " (", epoch.cause, "): it ends here, and the others go on"));
    }
    CHORALE_CHECK_STATE(!seat_->board->is_stopping(),
                        "[elastic] the job is being stopped while its ranks change, so this one ends",
                        why.empty() ? "" : ": ", why);
    // A newcomer is awaited by nobody; the launcher ends it when it is not needed.
    if (!is_member_ || seat_->board->is_waiting()) deadline = within(patience);
    CHORALE_CHECK_STATE(!deadline.passed(), "[elastic] a call failed, but the launcher has stated no death within ",
                        std::chrono::duration<double>(patience).count(), " s, so this is no loss of a rank: ", why);
    std::this_thread::sleep_for(pause);
  }
}

void Elastic::join(const Epoch& epoch, Change& change) {
  const int rank = epoch.rank_of(seat_->member), size = static_cast<int>(epoch.members.size());
  transport::EpochStore store(
      std::make_shared<transport::PrefixStore>(transport::epoch_prefix(epoch.number), meeting_of(epoch)), seat_->board,
      epoch.number);
  auto start = Deadline::Clock::now();
  const auto lap = [&start] { return ms_since(std::exchange(start, Deadline::Clock::now())); };
  watch(Phase::kAgreement);
  const std::vector<Report> reports = exchange(epoch, store);
  settle(epoch, reports);
  change.agreement_ms = lap();
  watch(Phase::kMeeting);
  comm::GroupOptions options = options_.group;
  if (epoch.number > 1) options.chaos = "";  // faults on purpose are those of the first epoch
  if (!epoch.nodes.empty() && options.net.address.empty()) options.net.address = seat_->address;
  if (seat_->secret) options.net.secret = secret_of_epoch(*seat_->secret, epoch.number);
  group_ = comm::Group::connect(store, concat("epoch ", epoch.number), rank, size, options);
  change.regroup_ms = lap();
  watch(Phase::kTransfer);
  std::vector<int> sources;
  for (int i = 0; i < size; ++i) {
    if (reports[static_cast<size_t>(i)].holds) sources.push_back(i);
  }
  change.newcomers = size - static_cast<int>(sources.size());
  if (shards_) {
    const int64_t before = done_;
    // Where the program gives the model its values itself, it may have given others since it was made.
    const bool is_given = static_cast<bool>(shards_->options().lost);
    enter(group_, may_begin(epoch) && std::none_of(reports.begin(), reports.end(), [&](const Report& report) {
                    return is_given ? report.holds : report.done > 0;
                  }));
    change.steps_back += std::max<int64_t>(holds_ ? before - done_ : 0, 0);
  } else {
    if (sources.empty()) sources.push_back(0);  // the job begins
    if (std::ssize(sources) < size) transfer(sources);
  }
  // From here on it can give the state to others, should those that it got it from die.
  if (!std::exchange(holds_, true)) seat_->store->set(transport::joined_key(seat_->member), "", within(kStoreTime));
  change.transfer_ms = lap();
  if (model_) model_->set_group(group_);
  make_averager();
  if (options_.rebuild) options_.rebuild(group_);
  change.regroup_ms += lap();
}

// The store of the epoch. Its launcher may be gone, too: then another epoch comes.
const std::shared_ptr<transport::Store>& Elastic::meeting_of(const Epoch& epoch) {
  if (epoch.nodes.empty()) {
    meeting_ = seat_->store;
  } else if (const std::string& place = epoch.nodes.front().place; place != meeting_place_) {
    meeting_place_.clear();
    const Deadline deadline = within(kStoreTime);
    while (meeting_place_.empty()) {
      try {
        meeting_ = seat_->reach(place, deadline.earlier(within(kConnects)));
        meeting_place_ = place;
      } catch (const CommError&) {  // it is gone, or slow
        if (deadline.passed() || seat_->board->latest() > epoch.number) throw;
      }
    }
  }
  return meeting_;
}

std::vector<Elastic::Report> Elastic::exchange(const Epoch& epoch, transport::Store& store) const {
  const Deadline deadline = within(options_.group.timeout.value_or(transport::default_timeout()));
  store.set(transport::report_key(seat_->member),
            Report{holds_, done_, commits_, committed_epoch_, last_, sums_}.text(), deadline);
  std::vector<Report> reports;
  reports.reserve(epoch.members.size());
  for (const int member : epoch.members)
    reports.push_back(Report::parse(store.get(transport::report_key(member), deadline)));
  return reports;
}

// While one that was there from the first epoch on has no state, no step was ever committed: it would have been in it.
bool Elastic::may_begin(const Epoch& epoch) {
  return epoch.number == 1 ||
         std::any_of(epoch.members.begin(), epoch.members.end(), [&](int member) { return member < epoch.founders; });
}

// All members of the epoch have read the same reports, and draw the same conclusion.
void Elastic::settle(const Epoch& epoch, const std::vector<Report>& reports) {
  const auto ahead = std::max_element(reports.begin(), reports.end(), [](const Report& a, const Report& b) {
    return std::pair(a.holds, a.commits) < std::pair(b.holds, b.commits);
  });
  const bool may_go_back = shards_ && (shards_->options().lost || !shards_->options().folder.empty());
  CHORALE_CHECK_STATE(ahead->holds || may_begin(epoch) || may_go_back,
                      "[elastic] nobody is left that had the state of the job; start it again from a checkpoint");
  if (!holds_) return;
  const auto passed = std::find_if(reports.begin(), reports.end(), [&](const Report& report) {
    return report.holds && report.commits == commits_ + 1 && report.epoch == step_epoch_;
  });
  if (pending_ && passed != reports.end()) {
    sums_ = passed->sums;
    CHORALE_INVARIANT(sums_.size() == pending_values_.size(), "ranks gave ", sums_.size(), " and ",
                      pending_values_.size(), " values at the end of a step");
    std::copy(sums_.begin(), sums_.end(), pending_values_.begin());
    last_ = passed->last;
    apply();
    return;
  }
  // Parts of a model may be of several moments, until the ranks have come to enter().
  CHORALE_INVARIANT(shards_ || ahead->commits == commits_, "a rank has passed ", ahead->commits,
                    " commit points, this one ", commits_, ", and is not at the next");
  if (in_step_ && !stepped_) take_back();
}

void Elastic::forget_epochs_before(int64_t epoch) const {
  for (int64_t number = epoch - 1; number > 0; --number) {
    const auto keys = meeting_->keys(concat(transport::epoch_prefix(number), "/"), within(kStoreTime));
    if (keys.empty() && number + 1 < epoch) break;  // these went in an earlier epoch
    for (const std::string& key : keys) meeting_->remove(key, within(kStoreTime));
  }
}

}  // namespace chorale::elastic
