#include "chorale/train/training.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "chorale/api/api.h"
#include "chorale/base/comm_error.h"
#include "chorale/base/generator.h"
#include "chorale/base/log.h"
#include "chorale/base/parallel_for.h"
#include "chorale/comm/objects.h"
#include "chorale/io/file.h"
#include "chorale/json/json_write.h"
#include "chorale/parallel/distributed_sampler.h"
#include "chorale/trace/trace.h"
#include "chorale/train/job_device.h"
#include "chorale/train/told_by_rank_0.h"

namespace chorale::train {
namespace {

using Clock = std::chrono::steady_clock;

// A file in the folder of an elastic job, with a number by which ranks on any node know it again.
constexpr const char* kMark = ".job";
// How long rank 0 of before may take to let go of the folder: one that leaves on demand finishes its checkpoint, and a
// launcher that is cut off kills its ranks.
constexpr auto kLetsGo = std::chrono::seconds(30);

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

}  // namespace

Training::Training(const Job& job) : job_(job), options_(job.options), group_(job.group), loop_(job.loop) {
  manual_seed(static_cast<uint64_t>(options_.seed));
  task_ = job.kind.make(options_);
  task_->place(device_of(options_, group_.rank()));
  const bool makes_parts = loop_ && options_.fsdp;
  if (!makes_parts) ranks_ = std::make_shared<JobRanks>(job.group, options_);
  plan_ = make_plan(options_, task_->examples(), loop_ ? loop_->first_size() : ranks_->replicas().size());
  parameters_ = task_->model().parameter_count();
  // This stands before ranks meet: once there is a line of the log, every rank heeds Ctrl-C.
  interrupt_.emplace();
  if (loop_) {  // ranks meet in run()
    if (!makes_parts) make_stepper();
    return;
  }
  begin();
  saver_.emplace(group_);
  settle_in();
}

// ---- beginning

// Rank 0 makes the folder this job's, and looks for what there is to go on with.
void Training::open_folder(bool is_new) {
  made_.make(job_.folder);
  if (!lock_) lock_.emplace(job_.folder);
  if (loop_ && place_.mark == 0) place_.mark = (uint64_t{std::random_device()()} << 32) | std::random_device()() | 1;
  const bool resumes = options_.resume || options_.resume_previous;
  // What has no options is no run that began here: there is nothing to go on with, and nothing to write over.
  const bool has_options = std::filesystem::exists(job_.folder / "config.json");
  if (is_new && (!resumes || (!has_options && Checkpoints(job_.folder).list().empty()))) check_is_new(job_.folder);
  checkpoints_.emplace(job_.folder);
  checkpoints_->remove_unfinished();
  found_.reset();
  if (resumes || !is_new) found_ = find_checkpoint(*checkpoints_, options_.resume_previous);
  if (found_) {
    check_unchanged(job_.table, found_->checkpoint.options, job_.folder.string());
    CHORALE_CHECK(found_->checkpoint.data == task_->fingerprint(), "[train] the run in ", job_.folder.string(),
                  " learnt from other data (", found_->checkpoint.data, ") than there are now (", task_->fingerprint(),
                  ")");
    CHORALE_CHECK(found_->checkpoint.step <= plan_.steps, "[train] the run in ", job_.folder.string(), " is at step ",
                  found_->checkpoint.step, " already, behind the end at step ", plan_.steps,
                  "; give more with --steps or --epochs");
  } else if (!options_.init.empty()) {
    if (options_.fsdp) {
      weights_ = task_->weights_from(options_.init);
    } else {
      task_->start_from(options_.init);
    }
  }
  write_options();
}

void Training::write_options() const {
  io::write_file(job_.folder / "config.json", json::write(job_.table.values(), json::Layout::kPages) + "\n");
  if (loop_) io::write_file(job_.folder / kMark, std::to_string(place_.mark));
}

// Rank 0 is another process than before, perhaps on another node. True on all ranks: it has no folder of this job, so
// it made one.
bool Training::take_over_folder() {
  int64_t is_new = 0;
  on_rank_0(group_, [&] {
    if (lock_) return;
    const std::filesystem::path mark = job_.folder / kMark;
    const bool is_ours =
        std::filesystem::exists(mark) && io::MappedFile::open(mark)->text() == std::to_string(place_.mark);
    if (!is_ours) {
      check_is_new(job_.folder);
      made_.make(job_.folder);
      is_new = 1;
    }
    lock_.emplace(job_.folder, kLetsGo);
    checkpoints_.emplace(job_.folder);
    if (!is_ours) write_options();
  });
  group_.broadcast(std::span(&is_new, 1), 0).wait();
  return is_new != 0;
}

// Nodes have options of their own on their command lines.
void Training::check_same_options() const {
  std::vector<comm::Value> text{json::write(job_.table.values())};
  comm::broadcast_object_list(group_, text, 0);
  const json::Value first = json::parse("options of rank 0", text[0].as<std::string>());
  for (const auto& [name, value] : job_.table.values()) {
    if (name == "ranks" || name == "threads" || name == "device") continue;
    const json::Value* const other = json::find(first.object("options"), name);
    CHORALE_CHECK(other && json::write(*other) == json::write(value), "[train] --", name, " is ", json::write(value),
                  " on this node, and ", other ? json::write(*other) : "not there", " on that of rank ",
                  "0; give all nodes the same options");
  }
}

void Training::make_stepper() {
  stepper_ = std::make_shared<Stepper>(*task_, options_, plan_.steps, *ranks_, job_.shard_fully);
  if (stepper_->ddp()) stepper_->ddp()->set_sample_rate(options_.log_every);
}

// Makes the parts for other ranks. What was trained before lives as long as the owner that was returned for it.
StepLoop::Parts Training::make_parts(const comm::Group& ranks) {
  if (std::exchange(has_made_, true)) parts_->models.push_back(task_->renew_model());
  const std::string numbers = stepper_ ? stepper_->numbers() : std::string();
  const auto made = std::make_shared<OwnerOfParts>();
  ranks_ = made->ranks = std::make_shared<JobRanks>(JobRanks::of_any_number(ranks, options_));
  make_stepper();
  made->stepper = stepper_;
  parts_ = made;
  if (first_numbers_.empty()) first_numbers_ = stepper_->numbers();
  if (!numbers.empty()) stepper_->load_numbers(numbers);
  return {.parameters = task_->model().named_parameters(),
          .buffers = task_->model().named_buffers(),
          .optimizer = &stepper_->optimizer(),
          .has_replicas = ranks_->shards()->replicas > 1,
          .owner = made};
}

// Sets step and states to those of the last checkpoint, if there is one and it is wanted, else to the beginning.
void Training::begin() {
  const bool is_new = !std::exchange(has_tried_, true);
  on_rank_0(group_, [&] { open_folder(is_new); });
  if (!stepper_) make_stepper();
  // Rank 0 may have read a model to start from.
  if (loop_ && stepper_->ddp()) stepper_->ddp()->sync_module_states(group_.global_rank(0));
  std::vector<comm::Value> head(1);
  if (speaks())
    head[0] = comm::List{static_cast<int64_t>(place_.mark), found_ ? found_->checkpoint.step : int64_t{-1},
                         found_ ? found_->folder.string() : std::string()};
  comm::broadcast_object_list(group_, head, 0);
  const auto& values = head[0].as<comm::List>();
  place_.mark = static_cast<uint64_t>(values[0].as<int64_t>());
  if (const auto step = values[1].as<int64_t>(); step < 0) {
    // A job that lost its parts before there was a checkpoint has come further in its schedule already.
    if (!first_numbers_.empty()) stepper_->load_numbers(first_numbers_);
    stepper_->start(std::exchange(weights_, {}));
  } else {
    place_.step = place_.saved_step = step;
    with_all_ranks(group_, [&] { stepper_->load(values[2].as<std::string>()); });
  }
  place_.has_begun = true;
}

// Ranks are gone, and nobody has their parts of the model: regroup() begins as the job did, from the last checkpoint.
void Training::lose_parts() {
  place_ = {};
  if (speaks())
    log_warning(
        "parts of the model are lost with the ranks that had them and their copies: going back to the last "
        "checkpoint, or to the beginning where there is none");
}

// The ranks have changed: the folder of the run is the first one's, and everybody gets a new part of each step.
void Training::regroup() {
  bool is_lost = false;
  try {
    if (saver_) with_all_ranks(group_, [this] { saver_->wait(); });
  } catch (const CommError& error) {  // a rank that died had a part of it
    is_lost = true;
    if (speaks()) log_info(concat("the checkpoint that was being written is lost, and made again: ", error.what()));
  }
  saver_.reset();
  std::array<double, 2> all = {place_.has_begun ? 0.0 : 1.0, is_lost ? 1.0 : 0.0};
  group_.all_reduce(std::span<double>(all)).wait();
  check_same_options();
  bool is_new = false;
  if (all[0] > 0) {
    begin();
  } else {
    is_new = take_over_folder();
  }
  has_tried_ = true;
  if (all[1] > 0 || is_new) {
    place_.saves_again = place_.is_behind = true;
    place_.saved_step = -1;
    if (speaks()) checkpoints_->remove_unfinished();
  }
  if (const int64_t back = reached_ - place_.step; back > 0) {
    steps_back_ += back;
    reached_ = place_.step;
    log_.reset();  // lines of steps that are done again are dropped when it opens
  }
  saver_.emplace(group_);
  settle_in();
}

void Training::deal() {
  const auto seed = static_cast<uint64_t>(options_.seed);
  if (loop_) {
    share_ = loop_->deal(std::make_shared<data::RandomSampler>(task_->examples(), seed), options_.batch,
                         plan_.examples_of_rank, options_.elastic_batch == "local");
  } else {
    const auto order = std::make_shared<parallel::DistributedSampler>(
        task_->examples(), ranks_->replicas(), parallel::DistributedSamplerOptions{.seed = seed, .drop_last = true});
    share_ = {.pieces = std::make_shared<data::FixedBatches>(order, plan_.examples_of_rank, true),
              .pieces_of_step = options_.accumulate,
              .examples = static_cast<double>(plan_.examples_of_rank * options_.accumulate),
              .examples_of_all = options_.batch};
  }
  loader_ = task_->loader(share_.pieces, {.seed = seed});
  data::LoaderState position = loader_->state();
  position.epoch = place_.step / plan_.steps_per_epoch;
  position.batch = place_.step % plan_.steps_per_epoch * share_.pieces_of_step;
  loader_->load_state(position);
}

void Training::settle_in() {
  deal();
  // The timeline covers steps before the first change of ranks only: newcomers have no part in it.
  if (place_.has_stepped) {
    if (timeline_) trace::stop();
    timeline_.reset();
  } else {
    timeline_.emplace(group_, place_.step, plan_.steps);
  }
  const bool is_first = !progress_;
  if (is_first || (speaks() && !log_))
    progress_.emplace(job_.out, options_.quiet || !speaks() ? Progress::Style::kQuiet : Progress::style_for(job_.out),
                      plan_.steps);
  if (speaks() && !log_) {
    json::Object start = job_.facts;
    start.emplace_back("task", json::Value(std::string(job_.kind.name())));
    start.emplace_back("ranks", json::Value(int64_t{group_.size()}));
    start.emplace_back("threads", json::Value(int64_t{thread_count()}));
    start.emplace_back("device", json::Value(concat(task_->device())));
    start.emplace_back("parameters", json::Value(parameters_));
    start.emplace_back("steps", json::Value(plan_.steps));
    start.emplace_back("steps_per_epoch", json::Value(plan_.steps_per_epoch));
    start.emplace_back("used", json::Value(used()));
    log_.emplace(job_.folder, place_.step, std::move(start));
  }
  if (is_first && !place_.has_stepped) introduce();
  // The same holds behind a change of ranks before the first step: all ranks do it, or none.
  if (ranks_->shards() && !place_.has_stepped && place_.step < plan_.steps) say_memory();
}

void Training::introduce() {
  progress_->say(task_->describe());
  progress_->say(fmt::format(
      "{} parameters; {} steps of {} {}, {} to an epoch; ranks: {}{}, {}; run: {}", grouped(parameters_),
      grouped(plan_.steps), grouped(options_.batch * task_->unit().per_example), task_->unit().name,
      grouped(plan_.steps_per_epoch), group_.size(),
      ranks_->is_split() ? fmt::format(" ({} x {})", ranks_->replicas().size(), ranks_->parts())
      : ranks_->shards()
          ? fmt::format(" ({} x {} that share a model)", ranks_->shards()->replicas, ranks_->shards()->ranks)
          : "",
      task_->device() == kCpu ? fmt::format("threads of each: {}", thread_count())
                              : concat("device of the first: ", task_->device()),
      job_.folder.string()));
  if (place_.step > 0) progress_->say(fmt::format("going on behind step {}", grouped(place_.step)));
  if (place_.step == 0 && (options_.resume || options_.resume_previous))
    progress_->say("there is no checkpoint yet: starting from the beginning");
}

// What the ranks of a fully sharded model need, before the first step: found by a step that changes nothing.
void Training::say_memory() {
  default_generator().restore(stream_of_replica(options_, ranks_->replicas().rank(), place_.step));
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
      fmt::format("memory of a rank: {} at the peak of a step; parameters {}, gradients {}, states {}{}, "
                  "activations {}, largest gathered block {}",
                  text[0], text[1], text[2], text[3],
                  stepper_->parts_are_elsewhere() ? " (on the host, beside it)" : "", text[4], text[5]));
}

// ---- turns

bool Training::turn() {
  if (place_.gives_up) give_up();
  const bool is_last = place_.step == plan_.steps;
  if (std::exchange(place_.is_behind, false)) {
    const bool due = options_.evaluate_every > 0 ? is_due(options_.evaluate_every) : ends_epoch();
    if (is_last || (due && !place_.stops)) evaluate();
    if (is_last || is_due(options_.checkpoint_every) || place_.stops || place_.saves_again) save();
  }
  if (!is_last && !place_.stops) {
    step();
    return true;
  }
  finish();
  return false;
}

void Training::step() {
  const auto start = Clock::now();
  if (ends_epoch()) loader_->set_epoch(place_.step / plan_.steps_per_epoch);  // leaves out what did not fill a step
  if (timeline_) timeline_->begin(place_.step + 1);
  default_generator().restore(stream_of_replica(options_, ranks_->replicas().rank(), place_.step));
  const StepResult mine = stepper_->compute({share_.pieces_of_step, share_.examples}, [this] {
    auto batch = loader_->next();
    CHORALE_INVARIANT(batch, "the epoch ended before its last step");
    return std::move(*batch);
  });
  const auto ranks = static_cast<double>(group_.size());
  // The ranks of a replica saw the same examples.
  const double right = static_cast<double>(mine.right) / ranks_->parts();
  std::array<double, kSums> all = {mine.loss / ranks, right, Interrupt::requested() ? 1.0 : 0.0};
  const auto examples = static_cast<double>(share_.examples_of_all);
  // Where ranks have parts it asks the others, which an update must not. Elsewhere a step that is done again would
  // divide its gradients by the loss scale twice.
  if (ranks_->has_parts()) updated_ = stepper_->prepare();
  commit(all, [&] { update(all); });
  if (place_.gives_up) return;
  if (timeline_) {
    if (const auto timeline = timeline_->end(place_.step))
      leave_file("trace.json", [&] { io::write_file(job_.folder / "trace.json", *timeline); });
  }
  Sums& sums = place_.sums;
  ++sums.steps;
  sums.examples += examples;
  sums.loss += all[0];
  sums.right += all[1];
  sums.gradient_norm += updated_.gradient_norm;
  sums.seconds += seconds_since(start);
  place_.smooth_loss = place_.smooth_loss == 0 ? all[0] : 0.9 * place_.smooth_loss + 0.1 * all[0];
  log(is_due(options_.log_every) || place_.step == plan_.steps || place_.stops);
}

// All have come, with gradients that are averaged: nobody updates before.
void Training::commit(std::span<double> values, const std::function<void()>& update) {
  if (loop_) return loop_->commit(values, update);
  group_.all_reduce(values).wait();
  update();
}

// Calls nobody.
void Training::update(std::span<const double> sums) {
  problem_.clear();
  if (options_.on_nan == "stop" && !std::isfinite(sums[0])) {
    problem_ = concat("the loss is ", sums[0]);
  } else {
    if (!ranks_->has_parts()) updated_ = stepper_->prepare();
    stepper_->update(updated_, share_.lr_scale);
    problem_ = updated_.problem;
  }
  place_.gives_up = !problem_.empty();
  if (place_.gives_up) return;
  reached_ = ++place_.step;
  place_.is_behind = place_.has_stepped = true;
  place_.stops = sums[2] > 0;
}

// Where ranks may die, nobody leaves before all have come here.
void Training::finish() {
  if (place_.step == plan_.steps) evaluate();  // of a run that was complete when it began
  finish_saving();
  write_page();
  if (!loop_) return;
  loop_->stop();
  std::array<double, kSums> nothing{};
  loop_->commit(nothing, [] {});
}

// Called before the update: every rank repeats the step by itself and looks where numbers stop being finite.
void Training::give_up() {
  finish_saving();
  const std::vector<comm::Value> found = comm::gather_object(group_, comm::Value(stepper_->find_not_finite()));
  progress_.reset();
  std::string message =
      fmt::format("[train] step {}: {}, so training has stopped before the update", place_.step + 1, problem_);
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

std::string Training::command_to_go_on() const {
  return fmt::format("chorale train {} --out {} --resume{}", job_.kind.name(), job_.folder.string(),
                     options_.fsdp ? " --fsdp" : "");
}

void Training::say_how_to_go_on() {
  progress_.reset();  // clears the live line
  if (!speaks()) return;
  job_.out.print(fmt::format("interrupted after step {} of {}, which is saved; go on with\n  {}\n",
                             grouped(place_.step), grouped(plan_.steps), command_to_go_on()));
}

// Ranks that are stopped while one of them is lost do not come together again, so nobody can save.
std::string Training::interrupted_meanwhile(const std::string& why) const {
  const std::vector<std::filesystem::path> saved = Checkpoints(job_.folder).list();
  if (saved.empty()) return concat(why, ". There is no checkpoint yet");
  return concat(why, ". Go on from the last checkpoint, ", saved.back().string(), ", with\n  ", command_to_go_on());
}

Ending Training::run() {
  if (!loop_) {
    while (turn()) continue;
  } else {
    const auto bytes = [this] { return std::string(reinterpret_cast<const char*>(&place_), sizeof place_); };
    const auto from_bytes = [this](const std::string& text) {
      CHORALE_CHECK(text.size() == sizeof place_, "[train] a rank of another version says where the job is");
      std::memcpy(&place_, text.data(), sizeof place_);
    };
    const StepLoop::Calls calls{.changed = [this] { regroup(); },
                                .before_change = [this] { with_all_ranks(group_, [this] { saver_->wait(); }); },
                                .step = [this] { turn(); },
                                .event = [this](const StepLoop::Event& event) { log_event(event); },
                                .save = bytes,
                                .load = from_bytes,
                                .save_rest = [this] { return stepper_->numbers(); },
                                .load_rest = [this](const std::string& text) { stepper_->load_numbers(text); }};
    const StepLoop::PartsCalls parts{.make = [this](const comm::Group& ranks) { return make_parts(ranks); },
                                     .lost = [this] { lose_parts(); },
                                     .copy_every = options_.copy_every};
    try {
      const bool stays =
          options_.fsdp ? loop_->run_parts(parts, calls) : loop_->run(*stepper_->ddp(), stepper_->optimizer(), calls);
      if (!stays) return Ending::kLeft;
    } catch (const StateError& error) {
      if (!Interrupt::requested()) throw;
      throw StateError(interrupted_meanwhile(error.what()));
    }
  }
  if (place_.step < plan_.steps) {
    say_how_to_go_on();
    return Ending::kInterrupted;
  }
  progress_.reset();
  if (speaks()) {
    job_.out.print(fmt::format("{} after {} steps, {:.1f} s; run: {}\n", text_of(result_), grouped(place_.step),
                               log_->seconds(), job_.folder.string()));
  }
  return Ending::kDone;
}

}  // namespace chorale::train
