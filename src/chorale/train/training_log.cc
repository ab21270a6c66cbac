// What a job writes down while it trains.
#include <fmt/format.h>

#include <algorithm>

#include "chorale/api/api.h"
#include "chorale/base/log.h"
#include "chorale/comm/objects.h"
#include "chorale/device/allocator.h"
#include "chorale/io/file.h"
#include "chorale/json/json_write.h"
#include "chorale/report/page.h"
#include "chorale/train/told_by_rank_0.h"
#include "chorale/train/training.h"
#include "chorale/transport/launcher_variables.h"

namespace chorale::train {
namespace {

double find(const Metrics& metrics, std::string_view name) {
  for (const auto& [key, value] : metrics) {
    if (key == name) return value;
  }
  return 0;
}

bool has_batch_norm(Task& task) {
  const NamedTensors buffers = task.model().named_buffers();
  return std::any_of(buffers.begin(), buffers.end(),
                     [](const auto& row) { return row.first.ends_with("running_mean"); });
}

}  // namespace

Training::ShownWhole::ShownWhole(Training& training) : training_(training) {
  if (!training.ranks_->has_parts() || !training.task_->has_samples()) return;
  const NamedTensors state = training.stepper_->split().whole_model(training.speaks());
  if (training.speaks()) training.task_->show_whole(&state);
}
Training::ShownWhole::~ShownWhole() {
  if (training_.ranks_->has_parts()) training_.task_->show_whole(nullptr);
}

// Files for people to look at: a run that cannot write one has trained all the same.
void Training::leave_file(const char* name, const std::function<void()>& write) const {
  try {
    write();
  } catch (const Error& error) {
    log_warning(concat("there is no ", name, " of this run: ", error.what()));
  }
}

// What each option came to that leaves something to the program. Others were used as they were given.
json::Object Training::used() const {
  const auto written = job_.table.values();
  json::Object used;
  const auto left = [&](const char* option, auto came_to) {
    const json::Value* const given = json::find(written, option);
    const std::string text = given ? json::write(*given) : "";
    if (text == "0" || text == "\"auto\"") used.emplace_back(option, json::Value(came_to));
  };
  left("steps", plan_.steps);
  left("evaluate-every", plan_.steps_per_epoch);
  left("checkpoint-every", plan_.steps);
  left("clip", std::string("none"));
  left("device", concat(task_->device()));
  left("ranks", int64_t{transport::find_launcher_variables().local_size.value_or(1)});
  left("dp", int64_t{ranks_->replicas().size()});
  if (options_.schedule == "one-cycle") left("warmup", std::string("none but the cycle's own"));
  return used;
}

// The figures of the steps since the last line.
Metrics Training::measured() {
  const auto steps = static_cast<double>(place_.sums.steps);
  const double step_s = place_.sums.seconds / steps, loss = place_.sums.loss / steps;
  Metrics metrics{{"loss", loss}};
  for (const auto& row : task_->of_loss(loss)) metrics.push_back(row);
  if (place_.sums.right > 0) metrics.emplace_back("accuracy", place_.sums.right / place_.sums.examples);
  if (options_.clip > 0) metrics.emplace_back("gradient_norm", place_.sums.gradient_norm / steps);
  metrics.emplace_back("lr", stepper_->lr() * share_.lr_scale);
  metrics.emplace_back("epoch", static_cast<double>(place_.step) / static_cast<double>(plan_.steps_per_epoch));
  metrics.emplace_back("step_ms", step_s * 1000);
  metrics.emplace_back(concat(task_->unit().name, "_per_second"),
                       place_.sums.examples * static_cast<double>(task_->unit().per_example) / place_.sums.seconds);
  if (group_.size() > 1) {
    // Waiting for other ranks after this one's own gradients were ready.
    const CommunicationTimes times = stepper_->communication();
    metrics.emplace_back("communication_ms", times.all_ms);
    metrics.emplace_back("exposed_communication_ms", times.all_ms - times.hidden_ms);
  }
  return metrics;
}

// What the live line says besides the step.
std::string Training::status(const Metrics& metrics) const {
  Metrics shown{{"loss", place_.smooth_loss}};
  for (const auto& row : task_->of_loss(place_.smooth_loss)) shown.push_back(row);
  if (place_.sums.right > 0) shown.emplace_back("accuracy", find(metrics, "accuracy"));
  std::string text = fmt::format(
      "epoch {}/{}  {}  {} {}/s", (place_.step - 1) / plan_.steps_per_epoch + 1,
      (plan_.steps - 1) / plan_.steps_per_epoch + 1, text_of(shown),
      grouped(static_cast<int64_t>(find(metrics, concat(task_->unit().name, "_per_second")))), task_->unit().name);
  if (group_.size() > 1) {
    const double waited = find(metrics, "exposed_communication_ms") / find(metrics, "step_ms");
    text += fmt::format("  comm {:.0f} %", 100 * std::clamp(waited, 0.0, 1.0));
  }
  if (loop_) text += fmt::format("  {} ranks", group_.size());
  return text;
}

// Every step moves the live line; what it says changes with the lines of metrics.
void Training::log(bool due) {
  if (speaks() && (due || status_.empty())) {
    const Metrics metrics = measured();
    status_ = status(metrics);
    if (due) log_->numbers("train", place_.step, metrics);
  }
  if (due) {
    place_.step_s = place_.sums.seconds / static_cast<double>(place_.sums.steps);
    place_.sums = {};
  }
  progress_->show(place_.step, status_);
}

void Training::log_ranks() {
  const CommunicationTimes times = stepper_->communication();
  const double hidden = times.hidden_ms, exposed = times.all_ms - hidden;
  const double memory = static_cast<double>(allocator_of(task_->device()).stats().peak_bytes) / (1 << 20);
  const std::vector<comm::Value> ranks =
      comm::gather_object(group_, comm::List{std::max(place_.step_s * 1000 - exposed, 0.0), exposed, hidden, memory});
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto& numbers = ranks[rank].as<comm::List>();
    log_->rank(place_.step, static_cast<int>(rank),
               {{"compute_ms", numbers[0].as<double>()},
                {"exposed_ms", numbers[1].as<double>()},
                {"hidden_ms", numbers[2].as<double>()},
                {"memory_mib", numbers[3].as<double>()}});
  }
}

void Training::evaluate() {
  if (place_.evaluated_step == place_.step) return;
  place_.evaluated_step = place_.step;
  if (place_.has_stepped) log_ranks();
  // Buffers, such as running means, are each rank's own during a step; those of rank 0 are saved.
  stepper_->sync_buffers();
  task_->model().eval();
  {
    const NoGrad scope;
    const SplitModel::Shown parts(stepper_->split());
    result_ = task_->evaluate(ranks_->replicas());
  }
  {
    const NoGrad scope;
    const ShownWhole whole(*this);
    if (speaks()) {
      log_->numbers("evaluation", place_.step, result_);
      leave_file("evaluation", [&] { task_->report(job_.folder); });
      progress_->say(
          fmt::format("step {}  {}  {}", grouped(place_.step), text_of(result_), clock_text(log_->seconds())));
      leave_file("sample", [&] {
        const auto text = task_->sample(place_.step);
        if (!text) return;
        log_->sample(place_.step, *text);
        progress_->say("  " + *text);
      });
    }
  }
  task_->model().train();
}

// A change of the ranks, and what it cost.
void Training::log_event(const StepLoop::Event& event) {
  const int64_t back = std::exchange(steps_back_, 0);
  if (!speaks()) return;
  const std::string again = back > 0         ? fmt::format("{} steps are done again; ", grouped(back))
                            : event.repeated ? "the step was repeated; "
                                             : "";
  progress_->say(fmt::format("step {}  {} ranks: {}; {}cost {:.0f} ms", grouped(place_.step), event.ranks, event.cause,
                             again, event.cost_ms));
  json::Object members{
      {"cause", json::Value(event.cause)},          {"epoch_of_ranks", json::Value(event.epoch)},
      {"ranks", json::Value(int64_t{event.ranks})}, {"newcomers", json::Value(int64_t{event.newcomers})},
      {"repeated", json::Value(event.repeated)},    {"steps_back", json::Value(back)}};
  for (const auto& [name, value] :
       {std::pair("cost_ms", event.cost_ms), std::pair("verdict_ms", event.verdict_ms),
        std::pair("agreement_ms", event.agreement_ms), std::pair("regroup_ms", event.regroup_ms),
        std::pair("transfer_ms", event.transfer_ms)})
    members.emplace_back(name, json::Value(value));
  if (event.ranks != loop_->first_size() && options_.elastic_batch == "global" && has_batch_norm(*task_)) {
    const char* note =
        "BatchNorm takes its statistics from each rank's own part of a batch, which is larger or smaller now: results "
        "differ a little from those of as many ranks as at the start";
    members.emplace_back("note", json::Value(std::string(note)));
    if (!std::exchange(has_noted_, true)) progress_->say(concat("  ", note));
  }
  log_->event(place_.step, std::move(members));
}

// Returns once the values are copied: files are written while the next steps run, and the next save waits for that.
void Training::save() {
  if (place_.saved_step == place_.step) return;
  place_.saved_step = place_.step;
  place_.saves_again = false;
  finish_saving();
  std::filesystem::path folder;
  snapshot::SaveOptions options;
  on_rank_0(group_, [&] {
    try {
      folder = checkpoints_->begin(place_.step);
      task_->save_files(folder);
    } catch (...) {
      drop_unfinished();
      throw;
    }
    options.finish = [this, checkpoint = Checkpoint{
                                .step = place_.step, .data = task_->fingerprint(), .options = job_.table.values()}] {
      checkpoints_->finish(checkpoint, options_.keep);
    };
  });
  std::vector<comm::Value> name{folder.string()};
  comm::broadcast_object_list(group_, name, 0);
  saver_->start(name[0].as<std::string>(), stepper_->state(), options);
}

// A disk that is full gets its room back when a save has failed, not with --resume.
void Training::drop_unfinished() const {
  try {
    checkpoints_->remove_unfinished();
  } catch (const std::filesystem::filesystem_error&) {  // NOLINT(bugprone-empty-catch): the first error is told
  }
}

void Training::finish_saving() {
  with_all_ranks(group_, [this] {
    try {
      saver_->wait();
    } catch (const snapshot::CheckpointError&) {
      if (speaks()) drop_unfinished();  // all ranks have failed, and write no more
      throw;
    }
  });
}

void Training::write_page() const {
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

}  // namespace chorale::train
