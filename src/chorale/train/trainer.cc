#include "chorale/train/trainer.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "chorale/api/api.h"
#include "chorale/base/generator.h"
#include "chorale/base/log.h"
#include "chorale/base/parallel_for.h"
#include "chorale/comm/objects.h"
#include "chorale/device/allocator.h"
#include "chorale/io/file.h"
#include "chorale/json/json_write.h"
#include "chorale/parallel/distributed_sampler.h"
#include "chorale/report/page.h"
#include "chorale/snapshot/async_saver.h"
#include "chorale/train/job_device.h"
#include "chorale/train/timeline.h"
#include "chorale/train/told_by_rank_0.h"

namespace chorale::train {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Dropout and the like: each replica has numbers of its own in each step, and the ranks that share its model draw the
// same. They follow from the step alone: a run that goes on, with as many replicas or others, needs to know no more.
RandomStream stream_of_replica(const TrainOptions& options, int replica, int64_t step) {
  constexpr uint64_t kTraining = 2;
  return Generator(static_cast<uint64_t>(options.seed))
      .fork(kTraining)
      .fork(static_cast<uint64_t>(step))
      .fork(static_cast<uint64_t>(replica))
      .state();
}

// Sums over the steps since the last line of metrics.
struct Sums {
  int64_t steps = 0;
  double loss = 0, right = 0, gradient_norm = 0;
  double seconds = 0;  // of steps alone
};

class Trainer {
 public:
  explicit Trainer(const Job& job);
  Ending run();

 private:
  bool speaks() const { return group_.rank() == 0; }
  void resume();
  void load(const std::optional<FoundCheckpoint>& found, const NamedTensors& weights);
  void introduce();
  void say_memory();
  bool step();  // true when somebody wants to stop
  [[noreturn]] void give_up(const std::string& problem);
  bool is_due(int64_t every) const { return every > 0 && step_ % every == 0; }
  bool ends_epoch() const { return step_ % plan_.steps_per_epoch == 0; }
  Metrics measured();
  std::string status(const Metrics& metrics) const;
  void log(bool due);
  void evaluate();
  void log_ranks();
  void save();
  void finish_saving();
  void say_how_to_go_on();
  void write_page() const;
  template <class Write>
  void leave_file(const char* name, const Write& write) const;

  // Where each rank has only a part of the model, rank 0's task gets all of it for the time of the scope, to print
  // samples with. Putting the parts together is a collective: every rank makes one of these.
  class ShownWhole {
   public:
    explicit ShownWhole(Trainer& trainer) : trainer_(trainer) {
      if (!trainer.ranks_.has_parts() || !trainer.task_->has_samples()) return;
      const NamedTensors state = trainer.stepper_->split().whole_model(trainer.speaks());
      if (trainer.speaks()) trainer.task_->show_whole(&state);
    }
    ~ShownWhole() {
      if (trainer_.ranks_.has_parts()) trainer_.task_->show_whole(nullptr);
    }
    ShownWhole(const ShownWhole&) = delete;
    ShownWhole& operator=(const ShownWhole&) = delete;

   private:
    Trainer& trainer_;
  };

  const Job& job_;
  const TrainOptions& options_;
  const comm::Group& group_;
  const JobRanks ranks_;
  std::unique_ptr<Task> task_;
  Plan plan_;
  int64_t parameters_ = 0;  // of the whole model
  std::optional<Stepper> stepper_;
  std::shared_ptr<Loader> loader_;
  std::optional<Timeline> timeline_;
  std::optional<Progress> progress_;
  std::optional<Interrupt> interrupt_;
  MadeFolders made_;                        // on rank 0; goes after the lock, which is a file in it
  std::optional<RunLock> lock_;             // on rank 0
  std::optional<RunLog> log_;               // on rank 0
  std::optional<Checkpoints> checkpoints_;  // on rank 0
  std::optional<snapshot::AsyncSaver> saver_;

  int64_t step_ = 0;
  int64_t saved_step_ = -1, evaluated_step_ = -1;
  Sums sums_;
  double step_s_ = 0;  // of the steps before the last line
  double smooth_loss_ = 0;
  std::string status_;  // for the live line
  Metrics result_;      // of the last evaluation
};

Trainer::Trainer(const Job& job) : job_(job), options_(job.options), group_(job.group), ranks_(job.group, job.options) {
  manual_seed(static_cast<uint64_t>(options_.seed));
  task_ = job.kind.make(options_);
  if (!options_.fsdp) task_->place(device_of(options_, group_.rank()));
  plan_ = make_plan(options_, task_->examples(), ranks_.replicas().size());
  parameters_ = task_->model().parameter_count();
  resume();
  loader_ = task_->loader(
      std::make_shared<parallel::DistributedSampler>(
          task_->examples(), ranks_.replicas(),
          parallel::DistributedSamplerOptions{.seed = static_cast<uint64_t>(options_.seed), .drop_last = true}),
      {.batch_size = plan_.examples_of_rank, .drop_last = true, .seed = static_cast<uint64_t>(options_.seed)});
  data::LoaderState position = loader_->state();
  position.epoch = step_ / plan_.steps_per_epoch;
  position.batch = step_ % plan_.steps_per_epoch * options_.accumulate;
  loader_->load_state(position);
  timeline_.emplace(group_, step_, plan_.steps);
  progress_.emplace(job.out, options_.quiet || !speaks() ? Progress::Style::kQuiet : Progress::style_for(job.out),
                    plan_.steps);
  if (speaks()) {
    json::Object start = job.facts;
    start.emplace_back("task", json::Value(std::string(job.kind.name())));
    start.emplace_back("ranks", json::Value(int64_t{group_.size()}));
    start.emplace_back("threads", json::Value(int64_t{thread_count()}));
    start.emplace_back("device", json::Value(concat(task_->device())));
    start.emplace_back("parameters", json::Value(parameters_));
    start.emplace_back("steps", json::Value(plan_.steps));
    start.emplace_back("steps_per_epoch", json::Value(plan_.steps_per_epoch));
    log_.emplace(job.folder, step_, std::move(start));
  }
  introduce();
}

// Sets step and states to those of the last checkpoint, if there is one and it is wanted, else to the beginning.
void Trainer::resume() {
  // Before ranks meet below: once there is a line of the log, every rank heeds Ctrl-C.
  interrupt_.emplace();
  std::optional<FoundCheckpoint> found;
  NamedTensors weights;
  on_rank_0(group_, [&] {
    made_.make(job_.folder);
    lock_.emplace(job_.folder);
    const bool resumes = options_.resume || options_.resume_previous;
    // What has no options is no run that began here: there is nothing to go on with, and nothing to write over.
    const bool has_options = std::filesystem::exists(job_.folder / "config.json");
    if (!resumes || (!has_options && Checkpoints(job_.folder).list().empty())) check_is_new(job_.folder);
    checkpoints_.emplace(job_.folder);
    checkpoints_->remove_unfinished();
    if (resumes) found = find_checkpoint(*checkpoints_, options_.resume_previous);
    if (found) {
      check_unchanged(job_.table, found->checkpoint.options, job_.folder.string());
      CHORALE_CHECK(found->checkpoint.data == task_->fingerprint(), "[train] the run in ", job_.folder.string(),
                    " learnt from other data (", found->checkpoint.data, ") than there are now (", task_->fingerprint(),
                    ")");
      CHORALE_CHECK(found->checkpoint.step <= plan_.steps, "[train] the run in ", job_.folder.string(), " is at step ",
                    found->checkpoint.step, " already, behind the end at step ", plan_.steps,
                    "; give more with --steps or --epochs");
    } else if (!options_.init.empty()) {
      if (options_.fsdp) {
        weights = task_->weights_from(options_.init);
      } else {
        task_->start_from(options_.init);
      }
    }
    io::write_file(job_.folder / "config.json", json::write(job_.table.values(), json::Layout::kPages) + "\n");
  });
  stepper_.emplace(*task_, options_, plan_.steps, ranks_, job_.shard_fully);
  if (stepper_->ddp()) stepper_->ddp()->set_sample_rate(options_.log_every);
  saver_.emplace(group_);
  load(found, weights);
}

void Trainer::load(const std::optional<FoundCheckpoint>& found, const NamedTensors& weights) {
  std::vector<comm::Value> head(1);
  if (found) head[0] = comm::List{comm::Value(found->checkpoint.step), comm::Value(found->folder.string())};
  comm::broadcast_object_list(group_, head, 0);
  if (head[0].is_nothing()) return stepper_->start(weights);
  const auto& values = head[0].as<comm::List>();
  step_ = saved_step_ = values[0].as<int64_t>();
  with_all_ranks(group_, [&] { stepper_->load(values[1].as<std::string>()); });
}

void Trainer::introduce() {
  progress_->say(task_->describe());
  progress_->say(
      fmt::format("{} parameters; {} steps of {} {}, {} to an epoch; ranks: {}{}, {}; run: {}", grouped(parameters_),
                  grouped(plan_.steps), grouped(options_.batch * task_->unit().per_example), task_->unit().name,
                  grouped(plan_.steps_per_epoch), group_.size(),
                  ranks_.is_split() ? fmt::format(" ({} x {})", ranks_.replicas().size(), ranks_.parts())
                  : ranks_.shards()
                      ? fmt::format(" ({} x {} that share a model)", ranks_.shards()->replicas, ranks_.shards()->ranks)
                      : "",
                  task_->device() == kCpu ? fmt::format("threads of each: {}", thread_count())
                                          : concat("device of the first: ", task_->device()),
                  job_.folder.string()));
  if (step_ > 0) progress_->say(fmt::format("going on behind step {}", grouped(step_)));
  if (step_ == 0 && (options_.resume || options_.resume_previous))
    progress_->say("there is no checkpoint yet: starting from the beginning");
  if (ranks_.shards() && step_ < plan_.steps) say_memory();
}

// What the ranks of a fully sharded model need, before the first step: found by a step that changes nothing.
void Trainer::say_memory() {
  default_generator().restore(stream_of_replica(options_, ranks_.replicas().rank(), step_));
  const data::LoaderState place = loader_->state();
  auto piece = loader_->next();
  CHORALE_INVARIANT(piece, "there is no batch to begin with");
  const StepMemory own = stepper_->rehearse(*piece);
  loader_->load_state(place);
  std::array<int64_t, 6> largest = {own.peak,   own.model.parts, own.model.gradients,
                                    own.states, own.activations, own.model.largest_block};
  group_.all_reduce(std::span<int64_t>(largest), Reduce::kMax).wait();
  std::array<std::string, 6> text;
  for (size_t i = 0; i < text.size(); ++i)
    text[i] = fmt::format("{:.4g} MiB", static_cast<double>(largest[i]) / (1 << 20));
  progress_->say(
      fmt::format("memory of a rank: {} at the peak of a step; parameters {}, gradients {}, states {}, "
                  "activations {}, largest gathered block {}",
                  text[0], text[1], text[2], text[3], text[4], text[5]));
}

bool Trainer::step() {
  const auto start = Clock::now();
  if (ends_epoch()) loader_->set_epoch(step_ / plan_.steps_per_epoch);  // leaves out what did not fill a step
  timeline_->begin(step_ + 1);
  default_generator().restore(stream_of_replica(options_, ranks_.replicas().rank(), step_));
  const StepResult mine = stepper_->compute([this] {
    auto batch = loader_->next();
    CHORALE_INVARIANT(batch, "the epoch ended before its last step");
    return std::move(*batch);
  });
  const auto ranks = static_cast<double>(group_.size());
  // The ranks of a replica saw the same examples.
  const double right = static_cast<double>(mine.right) / ranks_.parts();
  std::array<double, 3> all = {mine.loss / ranks, right, Interrupt::requested() ? 1.0 : 0.0};
  group_.all_reduce(std::span<double>(all)).wait();
  if (options_.on_nan == "stop" && !std::isfinite(all[0])) give_up(concat("the loss is ", all[0]));
  const UpdateResult update = stepper_->update();
  if (!update.problem.empty()) give_up(update.problem);
  ++step_;
  if (const auto timeline = timeline_->end(step_)) {
    leave_file("trace.json", [&] { io::write_file(job_.folder / "trace.json", *timeline); });
  }
  ++sums_.steps;
  sums_.loss += all[0];
  sums_.right += all[1];
  sums_.gradient_norm += update.gradient_norm;
  sums_.seconds += seconds_since(start);
  smooth_loss_ = smooth_loss_ == 0 ? all[0] : 0.9 * smooth_loss_ + 0.1 * all[0];
  return all[2] > 0;
}

// Before the update: every rank repeats the step by itself and looks where numbers stop being finite.
void Trainer::give_up(const std::string& problem) {
  finish_saving();
  const std::vector<comm::Value> found = comm::gather_object(group_, comm::Value(stepper_->find_not_finite()));
  progress_.reset();
  std::string message =
      fmt::format("[train] step {}: {}, so training has stopped before the update", step_ + 1, problem);
  if (!speaks()) throw NotFinite(message);
  std::vector<std::string> places;
  for (size_t rank = 0; rank < found.size(); ++rank) {
    if (const auto& place = found[rank].as<std::string>(); !place.empty())
      places.push_back(fmt::format("on rank {} it is {}", rank, place));
  }
  message += places.empty() ? "; every rank's own numbers are finite: their sum over ranks is not"
                            : fmt::format("; what is not finite first: {}", fmt::join(places, ", "));
  const std::vector<std::filesystem::path> saved = checkpoints_->list();
  message += saved.empty() ? ". There is no checkpoint yet"
                           : fmt::format(". The last checkpoint, {}, is as it was", saved.back().string());
  write_page();
  throw NotFinite(message + ". Try a smaller --lr, or --clip 1; --on-nan continue trains on regardless");
}

// Files for people to look at: a run that cannot write one has trained all the same.
template <class Write>
void Trainer::leave_file(const char* name, const Write& write) const {
  try {
    write();
  } catch (const Error& error) {
    log_warning(concat("there is no ", name, " of this run: ", error.what()));
  }
}

// Of the steps since the last line.
Metrics Trainer::measured() {
  const auto steps = static_cast<double>(sums_.steps);
  const double step_s = sums_.seconds / steps, loss = sums_.loss / steps;
  Metrics metrics{{"loss", loss}};
  for (const auto& row : task_->of_loss(loss)) metrics.push_back(row);
  if (sums_.right > 0) metrics.emplace_back("accuracy", sums_.right / steps / static_cast<double>(options_.batch));
  if (options_.clip > 0) metrics.emplace_back("gradient_norm", sums_.gradient_norm / steps);
  metrics.emplace_back("lr", stepper_->lr());
  metrics.emplace_back("epoch", static_cast<double>(step_) / static_cast<double>(plan_.steps_per_epoch));
  metrics.emplace_back("step_ms", step_s * 1000);
  metrics.emplace_back(concat(task_->unit().name, "_per_second"),
                       static_cast<double>(options_.batch * task_->unit().per_example) / step_s);
  if (group_.size() > 1) {
    // Waiting for other ranks after this one's own gradients were ready.
    const CommunicationTimes times = stepper_->communication();
    metrics.emplace_back("communication_ms", times.all_ms);
    metrics.emplace_back("exposed_communication_ms", times.all_ms - times.hidden_ms);
  }
  return metrics;
}

double find(const Metrics& metrics, std::string_view name) {
  for (const auto& [key, value] : metrics) {
    if (key == name) return value;
  }
  return 0;
}

// What the live line says besides the step.
std::string Trainer::status(const Metrics& metrics) const {
  Metrics shown{{"loss", smooth_loss_}};
  for (const auto& row : task_->of_loss(smooth_loss_)) shown.push_back(row);
  if (sums_.right > 0) shown.emplace_back("accuracy", find(metrics, "accuracy"));
  std::string text = fmt::format(
      "epoch {}/{}  {}  {} {}/s", (step_ - 1) / plan_.steps_per_epoch + 1,
      (plan_.steps - 1) / plan_.steps_per_epoch + 1, text_of(shown),
      grouped(static_cast<int64_t>(find(metrics, concat(task_->unit().name, "_per_second")))), task_->unit().name);
  if (group_.size() > 1) {
    const double waited = find(metrics, "exposed_communication_ms") / find(metrics, "step_ms");
    text += fmt::format("  comm {:.0f} %", 100 * std::clamp(waited, 0.0, 1.0));
  }
  return text;
}

// Every step moves the live line; what it says changes with the lines of metrics.
void Trainer::log(bool due) {
  if (speaks() && (due || status_.empty())) {
    const Metrics metrics = measured();
    status_ = status(metrics);
    if (due) log_->numbers("train", step_, metrics);
  }
  if (due) {
    step_s_ = sums_.seconds / static_cast<double>(sums_.steps);
    sums_ = {};
  }
  progress_->show(step_, status_);
}

void Trainer::log_ranks() {
  const CommunicationTimes times = stepper_->communication();
  const double hidden = times.hidden_ms, exposed = times.all_ms - hidden;
  const double memory = static_cast<double>(cpu_allocator().stats().peak_bytes) / (1 << 20);
  const std::vector<comm::Value> ranks =
      comm::gather_object(group_, comm::List{std::max(step_s_ * 1000 - exposed, 0.0), exposed, hidden, memory});
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto& numbers = ranks[rank].as<comm::List>();
    log_->rank(step_, static_cast<int>(rank),
               {{"compute_ms", numbers[0].as<double>()},
                {"exposed_ms", numbers[1].as<double>()},
                {"hidden_ms", numbers[2].as<double>()},
                {"memory_mib", numbers[3].as<double>()}});
  }
}

void Trainer::evaluate() {
  if (evaluated_step_ == step_) return;
  evaluated_step_ = step_;
  if (step_s_ > 0) log_ranks();  // there were steps in this session
  // Buffers, such as running means, are each rank's own during a step; those of rank 0 are saved.
  stepper_->sync_buffers();
  task_->model().eval();
  {
    const NoGrad scope;
    const SplitModel::Shown parts(stepper_->split());
    result_ = task_->evaluate(ranks_.replicas());
  }
  {
    const NoGrad scope;
    const ShownWhole whole(*this);
    if (speaks()) {
      log_->numbers("evaluation", step_, result_);
      leave_file("evaluation", [&] { task_->report(job_.folder); });
      progress_->say(fmt::format("step {}  {}  {}", grouped(step_), text_of(result_), clock_text(log_->seconds())));
      leave_file("sample", [&] {
        const auto text = task_->sample(step_);
        if (!text) return;
        log_->sample(step_, *text);
        progress_->say("  " + *text);
      });
    }
  }
  task_->model().train();
}

// Returns once the values are copied: files are written while the next steps run, and the next save waits for that.
void Trainer::save() {
  if (saved_step_ == step_) return;
  saved_step_ = step_;
  finish_saving();
  std::filesystem::path folder;
  snapshot::SaveOptions options;
  on_rank_0(group_, [&] {
    folder = checkpoints_->begin(step_);
    task_->save_files(folder);
    options.finish =
        [this, checkpoint = Checkpoint{.step = step_, .data = task_->fingerprint(), .options = job_.table.values()}] {
          checkpoints_->finish(checkpoint, options_.keep);
        };
  });
  std::vector<comm::Value> name{folder.string()};
  comm::broadcast_object_list(group_, name, 0);
  saver_->start(name[0].as<std::string>(), stepper_->state(), options);
}

void Trainer::finish_saving() {
  with_all_ranks(group_, [this] { saver_->wait(); });
}

void Trainer::say_how_to_go_on() {
  progress_.reset();  // clears the live line
  if (!speaks()) return;
  job_.out.print(fmt::format(
      "interrupted after step {} of {}, which is saved; go on with\n  chorale train {} --out {} --resume{}\n",
      grouped(step_), grouped(plan_.steps), job_.kind.name(), job_.folder.string(), options_.fsdp ? " --fsdp" : ""));
}

void Trainer::write_page() const {
  if (!speaks()) return;
  if (const std::string graphs = stepper_->graphs(); !graphs.empty()) {
    leave_file("graphs", [&] {
      std::filesystem::create_directories(job_.folder / "graphs");
      io::write_file(job_.folder / "graphs" / "forward.txt", graphs);
    });
  }
  leave_file("report", [&] {
    const std::vector<std::filesystem::path> runs{job_.folder};
    for (const std::string& problem : report::write_report(runs, job_.folder / "report.html")) log_warning(problem);
  });
}

Ending Trainer::run() {
  while (step_ < plan_.steps) {
    const bool stop = step();
    log(is_due(options_.log_every) || step_ == plan_.steps || stop);
    const bool due = options_.evaluate_every > 0 ? is_due(options_.evaluate_every) : ends_epoch();
    if (step_ == plan_.steps || (due && !stop)) evaluate();
    if (step_ == plan_.steps || is_due(options_.checkpoint_every) || stop) save();
    if (stop && step_ < plan_.steps) {
      finish_saving();
      write_page();
      say_how_to_go_on();
      return Ending::kInterrupted;
    }
  }
  evaluate();  // of a run that was complete when it began
  finish_saving();
  write_page();
  progress_.reset();
  if (speaks()) {
    job_.out.print(fmt::format("{} after {} steps, {:.1f} s; run: {}\n", text_of(result_), grouped(step_),
                               log_->seconds(), job_.folder.string()));
  }
  return Ending::kDone;
}

}  // namespace

Plan make_plan(const TrainOptions& options, int64_t examples, int ranks) {
  const int64_t pieces = product("ranks and pieces of a batch", {ranks, options.accumulate});
  CHORALE_CHECK(options.batch % pieces == 0, "[train] a batch of ", options.batch, " cannot be dealt to ", ranks,
                " ranks in ", options.accumulate, " pieces equally; choose a multiple of ", pieces);
  Plan plan{.steps_per_epoch = examples / options.batch, .examples_of_rank = options.batch / pieces};
  CHORALE_CHECK(plan.steps_per_epoch > 0, "[train] a batch of ", options.batch, " is larger than the ", examples,
                " training examples; choose a smaller one");
  const int64_t all = product("steps of all epochs", {plan.steps_per_epoch, options.epochs});
  plan.steps = options.steps > 0 ? std::min(options.steps, all) : all;
  return plan;
}

Ending train(const Job& job) { return Trainer(job).run(); }

}  // namespace chorale::train
