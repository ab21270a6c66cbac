// A training job from its start to its end, as one rank of it: what train() of trainer.h makes and runs.
//
// Note [Turns]
// A turn is what is due behind the steps done so far (an evaluation, a checkpoint), and then a step. Where ranks may
// die, a turn that fails is repeated as a whole by those that are left: what it begins with is in `place_`, which is
// taken back then, and which newcomers get.
#pragma once

#include <chrono>

#include "chorale/snapshot/async_saver.h"
#include "chorale/train/timeline.h"
#include "chorale/train/trainer.h"

namespace chorale::train {

class Training {
 public:
  explicit Training(const Job& job);
  Ending run();

 private:
  bool speaks() const { return group_.rank() == 0; }
  // ---- beginning
  void open_folder(bool is_new);
  void write_options() const;
  bool take_over_folder();
  void check_same_options() const;
  void make_stepper();
  void begin();
  StepLoop::Parts make_parts(const comm::Group& ranks);
  void lose_parts();
  void regroup();
  void deal();
  void settle_in();
  void introduce();
  void say_memory();
  // ---- turns
  bool turn();  // false: it was the last
  void step();
  void commit(std::span<double> values, const std::function<void()>& update);
  void update(std::span<const double> sums);
  void finish();
  [[noreturn]] void give_up();
  bool is_due(int64_t every) const { return every > 0 && place_.step % every == 0; }
  bool ends_epoch() const { return place_.step % plan_.steps_per_epoch == 0; }
  // ---- what is written down
  json::Object used() const;
  Metrics measured();
  std::string status(const Metrics& metrics) const;
  void log(bool due);
  void log_event(const StepLoop::Event& event);
  void evaluate();
  void log_ranks();
  void save();
  void finish_saving();
  void drop_unfinished() const;
  void say_how_to_go_on();
  std::string command_to_go_on() const;
  std::string interrupted_meanwhile(const std::string& why) const;
  void write_page() const;
  void leave_file(const char* name, const std::function<void()>& write) const;

  // Where each rank has only a part of the model, rank 0's task gets all of it for the time of the scope, to print
  // samples with. Putting the parts together is a collective: every rank makes one of these.
  class ShownWhole {
   public:
    explicit ShownWhole(Training& training);
    ~ShownWhole();
    ShownWhole(const ShownWhole&) = delete;
    ShownWhole& operator=(const ShownWhole&) = delete;

   private:
    Training& training_;
  };

  // Sums over the steps since the last line of metrics.
  struct Sums {
    int64_t steps = 0;
    double examples = 0, loss = 0, right = 0, gradient_norm = 0;
    double seconds = 0;  // of steps alone
  };
  // Note [Turns]. Plain bytes.
  struct Place {
    int64_t step = 0;
    int64_t saved_step = -1, evaluated_step = -1;
    Sums sums{};
    double step_s = 0;  // of the steps before the last line
    double smooth_loss = 0;
    uint64_t mark = 0;         // of the folder
    bool has_begun = false;    // values are those of a checkpoint, or the first ones
    bool has_stepped = false;  // in this session
    bool is_behind = false;    // a step was done, and what is due behind it was not
    bool stops = false;        // somebody wants to
    bool gives_up = false;     // numbers are not finite
    bool saves_again = false;  // a checkpoint was lost with a rank
  };

  const Job& job_;
  const TrainOptions& options_;
  const comm::Group& group_;
  StepLoop* const loop_;  // where ranks may die
  std::unique_ptr<Task> task_;
  Plan plan_;
  int64_t parameters_ = 0;  // of the whole model
  // Where ranks that may die have parts of the model, these two are made for each set of ranks.
  std::shared_ptr<const JobRanks> ranks_;
  std::shared_ptr<Stepper> stepper_;
  struct OwnerOfParts {
    std::vector<std::shared_ptr<nn::Module>> models;  // that gave way to others since it was made
    std::shared_ptr<const JobRanks> ranks;
    std::shared_ptr<Stepper> stepper;
  };
  std::shared_ptr<OwnerOfParts> parts_ = std::make_shared<OwnerOfParts>();
  std::shared_ptr<Loader> loader_;
  Share share_;
  std::optional<Timeline> timeline_;
  std::optional<Progress> progress_;
  std::optional<Interrupt> interrupt_;
  MadeFolders made_;                        // on rank 0; goes after the lock, which is a file in it
  std::optional<RunLock> lock_;             // on rank 0
  std::optional<RunLog> log_;               // on rank 0
  std::optional<Checkpoints> checkpoints_;  // on rank 0
  std::optional<snapshot::AsyncSaver> saver_;
  std::optional<FoundCheckpoint> found_;  // on rank 0: what the run goes on from
  NamedTensors weights_;                  // on rank 0: to start from

  static constexpr size_t kSums = 3;  // over ranks, at the end of a step: loss, right, who wants to stop
  Place place_;
  std::string problem_;  // why it gives up
  UpdateResult updated_;
  bool has_tried_ = false;     // to begin, as some rank of an earlier epoch: the folder may be open
  bool has_made_ = false;      // parts, or has tried to
  std::string first_numbers_;  // where it makes parts: the stepper's before the first step
  int64_t reached_ = 0;        // the furthest step that was done here
  int64_t steps_back_ = 0;     // in changes of ranks that were not told yet
  bool has_noted_ = false;     // that BatchNorm differs
  std::string status_;         // for the live line
  Metrics result_;             // of the last evaluation
};

}  // namespace chorale::train
