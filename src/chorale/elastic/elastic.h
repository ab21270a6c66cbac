// A training loop that goes on when ranks die. `chorale run --elastic MIN:MAX` starts the ranks; when one dies, the
// others agree on who is left, make their groups anew and go on with the step in flight; a replacement takes part from
// the next step on.
//
//   parallel::Elastic job;                                         // instead of comm::World and init()
//   parallel::DistributedDataParallel model(Net(), job.group());
//   optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-3});
//   job.keep(model, optimizer);
//   job.run(steps, [&](int64_t step) {
//     const auto [x, y] = …;                                       // this rank's samples (elastic/batches.h)
//     backward(loss(model(x), y));
//     job.step();                                                  // instead of optimizer.step()
//   });
//
// Note [Steps]
// step() is the commit point of a step: nobody passes it before all have come to it with averaged gradients. When ranks
// die, and a survivor has passed, all apply the update; otherwise all do the whole step again, with the same number,
// and with buffers, the default generator and what else is kept as they were before it. So every update is done by all
// or by none. What the body does before step() may happen twice; what it does behind step() may be left out for a step.
//
// A fully sharded model is made anew for every set of ranks:
//
//   job.keep_sharded([&](const comm::Group& group) {
//     net = std::make_shared<Net>();                               // the same values on all ranks
//     fsdp::fully_shard(*net, {.mesh = Mesh(group, {group.size()})});
//     …
//     return elastic::Sharded{net->named_parameters(), net->named_buffers(), optimizer.get(), net};
//   });
//
// Where parts are gone with a rank, and no replica has them, all go back to the last copy (shards.h) or checkpoint, and
// do the steps since then again.
//
// Without --elastic it is a loop over steps in the group that a launcher started, and a failure is thrown as always.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/base/generator.h"
#include "chorale/comm/value.h"
#include "chorale/comm/world.h"
#include "chorale/elastic/shards.h"
#include "chorale/optim/optimizer.h"
#include "chorale/parallel/averaging.h"
#include "chorale/parallel/ddp.h"
#include "chorale/transport/security/secret.h"
#include "chorale/transport/store/epochs.h"

namespace chorale::elastic {

// Where a rank is; what `watch` of the options is told, before it goes on.
enum class Phase : uint8_t {
  kBegin,      // of a step
  kCopy,       // before parts are sent to a neighbour; the older of its two copies is gone
  kCommit,     // at step()
  kAverage,    // behind a step, before parameters are averaged
  kUpdate,     // passed, not applied
  kApplied,    // behind the update
  kAgreement,  // the group is left; before this rank tells how far it came
  kMeeting,    // before it meets the others of the next epoch
  kTransfer,   // before states are sent to newcomers
  kFinish,     // all steps are done here
};

// A change of the job's ranks, as one of them saw it. Times in milliseconds.
struct Change {
  int64_t epoch = 0;
  std::string cause;
  int rank = 0, size = 1;  // from now on
  int64_t step = 0;        // that comes next
  bool repeated = false;   // it had begun
  int64_t steps_back = 0;  // so many that were applied are done again
  int newcomers = 0;
  std::chrono::steady_clock::time_point noticed;  // the failure, or the announcement
  double verdict_ms = 0;                          // from then to the launcher's word
  double agreement_ms = 0;                        // in which the ranks tell each other how far they have come
  double regroup_ms = 0;                          // groups
  double transfer_ms = 0;                         // states
};

// Where a process of an elastic job finds the others.
struct Seat {
  std::shared_ptr<transport::Store> store;  // the entries of this start of the job
  std::shared_ptr<transport::EpochBoard> board;
  int member = 0;
  // In a job on several nodes, opens the store at a place that an epoch names.
  std::function<std::shared_ptr<transport::Store>(const std::string& place, Deadline deadline)> reach{};
  std::string address{};                      // of this node, for the others
  std::optional<transport::Secret> secret{};  // of the job; each epoch has one of its own that follows from it
  // What `chorale run --elastic` tells its ranks; nothing where there is no such launcher.
  static std::optional<Seat> from_environment();
};

struct ElasticOptions {
  comm::GroupOptions group{};
  // Makes what else depends on the ranks, such as groups and meshes out of this one. Called on all ranks, in every
  // epoch.
  std::function<void(const comm::Group& group)> rebuild{};
  // Called on all ranks before they change on demand, while the groups of before still work: what uses them in the
  // background, such as a checkpoint that is being written, comes to its end in it.
  std::function<void()> before_change{};
  std::function<void(Phase phase, int64_t step)> watch{};
  // How long after a failure the launcher may be silent about deaths; then the failure is thrown. On several nodes
  // twice the keep-alive comes on top.
  std::chrono::milliseconds patience = std::chrono::seconds(10);
  std::optional<Seat> seat{};  // instead of the environment's
};

// What run() throws on a rank that is not needed any more: the job goes on without it, and it should end, touching
// nothing.
class Excluded : public StateError {
 public:
  using StateError::StateError;
};

// What the connections of an epoch are made with: ranks of another epoch are strangers.
transport::Secret secret_of_epoch(const transport::Secret& job, int64_t epoch);

class Elastic {
 public:
  explicit Elastic(ElasticOptions options = {});
  ~Elastic();
  Elastic(const Elastic&) = delete;
  Elastic& operator=(const Elastic&) = delete;

  // This rank alone before run(), and in run() the ranks of the epoch; the object stays, older groups throw.
  comm::Group& group() { return seat_ ? group_ : world_.group(); }

  // What a step changes. They must outlive this object's last use. StateError for what cannot be taken back: hooks of
  // communication without a state that can be (reducer::HookState), gradients with owners, updates in backward.
  void keep(parallel::DataParallelBase& model, optim::Optimizer& optimizer);
  // What a step changes where each rank has a part of it: `make` is called on all ranks in every epoch. The update of
  // its optimizer must not call other ranks.
  void keep_sharded(std::function<Sharded(const comm::Group& group)> make, ShardedOptions options = {});
  // Averages parameters now and then beside keep() (parallel/averaging.h), by what `make` gives for the ranks of
  // each epoch. Averages are copies until all ranks have them; then all take them over, or none. Between two averages
  // the parameters of ranks differ: a newcomer gets those of the first rank.
  void keep_averager(std::function<std::unique_ptr<parallel::ModelAverager>(const comm::Group& group)> make);
  // Anything else: the place in the data, a schedule. It is saved before a step, loaded when a step is repeated, and on
  // a newcomer. What only an update changes need not be taken back: `rest`.
  void keep(std::string name, std::function<std::string()> save, std::function<void(const std::string&)> load,
            bool rest = false);

  // Calls `body` for each step. Returns when all ranks have done all steps.
  void run(int64_t steps, const std::function<void(int64_t step)>& body);
  // The end of a step, in `body`, once: waits for all, and updates: optimizer.step(), or what is given, which must not
  // call others. Returns the sum of `value` over ranks.
  double step(double value = 0);
  double step(const std::function<void()>& update, double value = 0);
  // Values become their sums over ranks before the update; all ranks give equally many.
  void step(const std::function<void()>& update, std::span<double> values);

  // Called in `body`, before step(): this step is the last, for all ranks, whichever of them says so.
  void stop() { stops_ = true; }

  // Steps that are applied.
  int64_t steps_done() const { return done_; }
  int64_t epoch() const { return epoch_; }
  // What the copies of a fully sharded job have cost this rank.
  CopyCosts copy_costs() const { return shards_ ? shards_->costs() : CopyCosts(); }
  // The changes since this rank takes part; the first is its own joining.
  const std::vector<Change>& changes() const { return changes_; }

 private:
  struct Repeat {};  // thrown through the body
  struct Report;
  struct Kept {
    std::string name;
    std::function<std::string()> save;
    std::function<void(const std::string&)> load;
    bool rest = false;
    std::string saved{};
  };

  void watch(Phase phase) const;
  void begin_step();
  void take_back();
  void finish();
  void pass(std::span<double> values);
  void apply();
  void average();
  void make_averager();
  void leave(const std::string& why);
  void regroup(const std::string& why);
  std::string causes_between(int64_t before, int64_t now) const;
  transport::Epoch next_epoch(const std::string& why);
  void join(const transport::Epoch& epoch, Change& change);
  std::vector<Report> exchange(const transport::Epoch& epoch, transport::Store& store) const;
  static bool may_begin(const transport::Epoch& epoch);
  void settle(const transport::Epoch& epoch, const std::vector<Report>& reports);
  void transfer(const std::vector<int>& sources);
  void enter(const comm::Group& group, bool begins);
  void keep_safe();
  void hand_over();
  std::string personal() const;
  void load_personal(const std::string& text, bool with_kept);
  void load_kept(const comm::Value& saved);
  reducer::HookState* hook_state() const;
  NamedTensors buffers() const { return model_ ? model_->named_buffers() : shards_->now().buffers; }
  void forget_epochs_before(int64_t epoch) const;
  const std::shared_ptr<transport::Store>& meeting_of(const transport::Epoch& epoch);
  void check_kept() const;

  const ElasticOptions options_;
  const std::optional<Seat> seat_;
  comm::World world_;  // where there is no seat
  comm::Group group_;  // where there is one
  parallel::DataParallelBase* model_ = nullptr;
  optim::Optimizer* optimizer_ = nullptr;
  std::optional<Shards> shards_;  // instead of a model
  std::function<std::unique_ptr<parallel::ModelAverager>(const comm::Group& group)> make_averager_;
  std::unique_ptr<parallel::ModelAverager> averager_;  // of the epoch
  std::vector<Kept> kept_;

  std::shared_ptr<transport::Store> meeting_;  // where the ranks of the epoch meet, and its place
  std::string meeting_place_;
  int64_t epoch_ = 0;  // that this rank was last in, or tried to join
  int64_t done_ = 0;
  int64_t averaged_ = 0;         // steps behind which parameters were averaged, where that was due
  int64_t commits_ = 0;          // commit points that this rank has passed: of steps, and of averages
  int64_t step_epoch_ = 0;       // in which the step began that is done now
  int64_t committed_epoch_ = 0;  // in which the last one that is applied did
  int64_t steps_ = 0, asked_steps_ = 0;
  bool is_member_ = false;  // of an epoch, now or before
  bool holds_ = false;      // the state of the job
  bool is_lost_ = false;    // and its parts have no values: ShardedOptions::lost has not returned
  bool in_step_ = false, stepped_ = false;
  bool went_back_ = false;                          // in the last regroup(), behind steps that were applied
  bool regroup_due_ = false;                        // a later epoch was announced, and all know it
  const std::function<void()>* pending_ = nullptr;  // the update of a rank that waits at the commit point
  bool averaging_ = false;                          // it is that of averages
  std::span<double> pending_values_;                // and where its sums go
  bool stops_ = false, last_ = false;               // this rank wants to stop; the step that is committed is the last
  std::vector<double> sums_;                        // of the last step that was committed
  std::vector<double> passing_;                     // memory for them
  // The values before the step.
  std::vector<std::pair<Tensor, Tensor>> buffers_;  // and copies of them
  RandomStream random_{};
  std::vector<Change> changes_;
};

}  // namespace chorale::elastic

namespace chorale::parallel {
using elastic::Elastic;
using elastic::ElasticOptions;
}  // namespace chorale::parallel
