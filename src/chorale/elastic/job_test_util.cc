#include "chorale/elastic/job_test_util.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <sstream>

#include "chorale/elastic/batches.h"
#include "chorale/fsdp/fully_shard.h"
#include "chorale/fsdp/state.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/power_sgd.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::elastic {
namespace {

using parallel::pattern;

constexpr int64_t kSamples = 60;

// Counts its forward passes in a buffer.
struct CountingNet : nn::Module {
  nn::Linear a{3, 7}, b{7, 5}, c{5, 2};
  nn::Buffer forwards{Tensor::from<double>({0}, {1})};
  CHORALE_MODULE(CountingNet, a, b, c, forwards)
  Tensor forward(const Tensor& x) {
    {
      const NoGrad quiet;
      add_(forwards, 1);
    }
    return c(tanh(b(tanh(a(x)))));
  }
};

CountingNet make_net() {
  CountingNet net;
  net.to(DType::kF64);
  return parallel::seeded(std::move(net), 3);
}

// The same net where each rank has a part of it. What makes it leaves no trace in the generator.
struct PartOfNet {
  CountingNet net;
  std::optional<optim::AdamW> optimizer;

  PartOfNet(const comm::Group& group, bool hybrid) : net(made_quietly()) {
    const int size = group.size();
    const Mesh mesh = hybrid ? Mesh(group, {2, size / 2}, {"replicate", "shard"}) : Mesh(group, {size}, {"shard"});
    for (nn::Linear* layer : {&net.a, &net.b}) fsdp::fully_shard(*layer, {.mesh = mesh});
    fsdp::fully_shard(net, {.mesh = mesh});
    optimizer.emplace(net.named_parameters(), optim::AdamWOptions{.lr = 0.01});
  }

 private:
  static CountingNet made_quietly() {
    const RandomStream before = default_generator().state();
    CountingNet net = make_net();
    default_generator().restore(before);
    return net;
  }
};

struct Samples {
  Tensor x = pattern({kSamples, 3}, 1, DType::kF64), y = pattern({kSamples, 2}, 2, DType::kF64);
  Batches batches{std::make_shared<data::RandomSampler>(kSamples, 5), kJobBatch};

  template <class Model>
  Tensor loss(Model& model, const std::vector<int64_t>& which) const {
    const Tensor index = Tensor::from(which, {static_cast<int64_t>(which.size())});
    return mse_loss(model(index_select(x, 0, index)), index_select(y, 0, index));
  }
};

std::string bytes_of(const std::vector<double>& values) {
  std::string bytes(values.size() * sizeof(double), '\0');
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}
std::vector<double> doubles_of(const std::string& bytes) {
  std::vector<double> values(bytes.size() / sizeof(double));
  if (!values.empty()) std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

// The hook of a job, and what it knows.
struct Averaging {
  std::shared_ptr<parallel::PowerSgd> power_sgd;
  std::shared_ptr<reducer::HookState> state;

  Averaging(JobHook kind, parallel::DataParallelBase& model) {
    if (kind == JobHook::kNone) return;
    if (kind == JobHook::kPowerSgd)
      power_sgd = std::make_shared<parallel::PowerSgd>(
          parallel::PowerSgdOptions{.rank = 1, .start_iteration = 2, .min_compression_rate = 1});
    model.register_comm_hook(power_sgd
                                 ? parallel::power_sgd_hook(power_sgd)
                                 : parallel::post_local_sgd_hook(
                                       {.start_iteration = 3, .average_in_subgroup = kind == JobHook::kPostLocalSgd}));
    state = model.reducer().hook()->state;
  }
  void tell(JobResult& result) const {
    if (!state) return;
    result.hook_shared = state->save();
    result.hook_state = result.hook_shared;
    if (!power_sgd) return;
    comm::List all;
    for (const auto& [name, tensor] : power_sgd->state_dict()) all.emplace_back(comm::List{name, tensor});
    result.hook_state = comm::encode(all);
  }
};

// Averages behind the steps 3, 5, 7, ….
std::unique_ptr<parallel::ModelAverager> make_averager(const comm::Group& group) {
  return std::make_unique<parallel::PeriodicAverager>(
      group, parallel::PeriodicAveragerOptions{.period = 2, .warmup_steps = 3});
}

const char* name_of(Phase phase) {
  constexpr const char* kNames[] = {"begin",   "copy",      "commit",  "average",  "update",
                                    "applied", "agreement", "meeting", "transfer", "finish"};
  return kNames[static_cast<size_t>(phase)];
}

}  // namespace

std::vector<Kill> parse_kills(const std::string& text) {
  std::vector<Kill> kills;
  std::istringstream words(text);
  for (Kill kill; words >> kill.rank;) {
    words.ignore(1);
    words >> kill.step;
    words.ignore(1);
    words >> kill.phase;
    kills.push_back(kill);
  }
  return kills;
}

std::string text_of(const std::vector<Kill>& kills) {
  std::string text;
  for (const Kill& kill : kills) text += concat(text.empty() ? "" : " ", kill.rank, "@", kill.step, ":", kill.phase);
  return text;
}

std::vector<Kill> random_kills(uint64_t seed, int ranks, int64_t steps, bool with_copies) {
  std::mt19937_64 random(seed);
  std::vector<const char*> phases = {"begin",   "forward",   "backward", "bucket",   "commit", "update",
                                     "applied", "agreement", "meeting",  "transfer", "finish"};
  if (with_copies) phases.push_back("copy");
  std::vector<Kill> kills;
  // One fewer than there are ranks: somebody has to have the state.
  const auto deaths = 1 + static_cast<int>(random() % static_cast<uint64_t>(std::min(3, ranks - 1)));
  for (int i = 0; i < deaths; ++i) {
    Kill kill{static_cast<int>(random() % static_cast<uint64_t>(ranks)),
              static_cast<int64_t>(random() % static_cast<uint64_t>(steps)), phases[random() % phases.size()]};
    if (kill.phase == "finish") kill.step = steps;
    // This one dies at the same moment as the one before.
    if (i > 0 && random() % 2 == 0) {
      kill.step = kills.back().step;
      kill.phase = kills.back().phase;
    }
    kills.push_back(kill);
  }
  return kills;
}

JobResult run_job(const JobOptions& job) {
  Elastic* running = nullptr;
  // The member that wins the entry dies: each death happens once, whichever member has the rank then.
  const auto visit = [&](const std::string& phase, int64_t step) {
    for (size_t i = 0; i < job.kills.size(); ++i) {
      const Kill& kill = job.kills[i];
      if (kill.phase != phase || kill.step != step) continue;
      // A rank between groups has no number: its last one counts.
      const int rank = !running || running->changes().empty() ? job.seat.member : running->changes().back().rank;
      if (rank != kill.rank) continue;
      const std::string mine = std::to_string(job.seat.member);
      const Deadline patience = within(std::chrono::seconds(30));
      if (job.seat.store->compare_set(concat("killed/", i), "", mine, patience) != mine) continue;
      for (size_t other = 0; kill.together && other < job.kills.size(); ++other) {
        const Kill& with = job.kills[other];
        if (with.together && with.phase == phase && with.step == step)
          job.seat.store->get(concat("killed/", other), patience);
      }
      job.die();
    }
  };

  const auto watch = [&](Phase phase, int64_t step) {
    visit(name_of(phase), step);
    if (phase == Phase::kCopy && running->changes().size() > 1) visit("recopy", step);
  };
  Elastic elastic({.watch = watch, .seat = job.seat});
  running = &elastic;
  const Samples samples;
  const auto in_bucket = [&](const Tensor&) { visit("bucket", elastic.steps_done()); };
  std::optional<parallel::DistributedDataParallel<CountingNet>> ddp;
  std::optional<optim::AdamW> optimizer;
  std::shared_ptr<PartOfNet> part;
  std::optional<HookHandle> hook;
  std::optional<Averaging> averaging;
  JobResult result;
  if (job.sharded) {
    ShardedOptions options = job.sharded->options;
    // The job begins again. Like a program that reads a checkpoint, all ranks do it together.
    if (options.lost)
      options.lost = [&, values_are_there = options.lost] {
        visit("lost", elastic.steps_done());
        elastic.group().barrier().wait();
        result = {};
        fill_(part->net.forwards, 0);
        values_are_there();
      };
    elastic.keep_sharded(
        [&](const comm::Group& group) {
          part = std::make_shared<PartOfNet>(group, job.sharded->hybrid && group.size() % 2 == 0);
          hook = after_accumulate(part->net.b.weight, in_bucket);
          return Sharded{part->net.named_parameters(), part->net.named_buffers(), &*part->optimizer, part};
        },
        std::move(options));
  } else {
    ddp.emplace(make_net(), elastic.group(), parallel::DdpOptions{.bucket_cap_mb = 0.0003});
    optimizer.emplace(ddp->named_parameters(), optim::AdamWOptions{.lr = 0.01});
    hook = after_accumulate(ddp->module().b.weight, in_bucket);
    averaging.emplace(job.hook, *ddp);
    elastic.keep(*ddp, *optimizer);
    if (job.hook == JobHook::kLocalSgd) elastic.keep_averager(make_averager);
  }
  elastic.keep(
      "losses", [&] { return bytes_of(result.losses); },
      [&](const std::string& bytes) { result.losses = doubles_of(bytes); });
  elastic.keep(
      "sizes",
      [&] {
        return bytes_of({result.sizes.begin(), result.sizes.end()});
      },
      [&](const std::string& bytes) {
        const std::vector<double> sizes = doubles_of(bytes);
        result.sizes = {sizes.begin(), sizes.end()};
      });
  const uint64_t drawn_before = default_generator().state().offset;  // by what made the model
  elastic.run(job.steps, [&](int64_t step) {
    comm::Group& group = elastic.group();
    const int size = group.size();
    if (group.rank() == 0 && job.before_step) job.before_step(step);
    if (job.draws) default_generator().take(4);
    visit("forward", step);
    const std::vector<int64_t> own = samples.batches.of(step, group);
    const Tensor loss = (ddp ? samples.loss(*ddp, own) : samples.loss(part->net, own)) * samples.batches.weight(group);
    visit("backward", step);
    backward(loss);
    const double sum = elastic.step(loss.item<double>() / size);
    if (!job.keeps_losses) return;
    result.losses.push_back(sum);
    result.sizes.push_back(size);
  });
  if (hook) hook->remove();
  result.drawn = static_cast<int64_t>(default_generator().state().offset - drawn_before);
  CountingNet& net = ddp ? ddp->module() : part->net;
  if (part) {
    CountingNet whole = make_net();
    const NoGrad quiet;
    whole.load_state_dict(fsdp::full_state_dict(net));
    result.bits = parallel::bits_of(whole);
  } else {
    result.bits = parallel::bits_of(net);
  }
  result.forwards = net.forwards.item<double>();
  result.last_rank = elastic.group().rank();
  result.changes = elastic.changes();
  result.copies = elastic.copy_costs();
  if (averaging) averaging->tell(result);
  return result;
}

std::optional<JobResult> run_with_memberships(const comm::Group& all, JobHook hook,
                                              const std::vector<std::vector<int>>& ranks,
                                              const std::vector<std::vector<int>>& averaging) {
  const Samples samples;
  parallel::DistributedDataParallel<CountingNet> ddp(make_net(), all, parallel::DdpOptions{.bucket_cap_mb = 0.0003});
  optim::AdamW optimizer(ddp.named_parameters(), {.lr = 0.01});
  const Averaging knowledge(hook, ddp);
  JobResult result;
  comm::Group group;
  std::unique_ptr<parallel::ModelAverager> averager;
  std::vector<int> now;
  // All ranks call it. False: this one has left.
  const auto become = [&](const std::vector<int>& next) {
    const bool stays = std::find(next.begin(), next.end(), all.rank()) != next.end();
    if (next == std::exchange(now, next)) return stays;
    comm::Group smaller = all.split(stays ? 1 : 0);
    const int64_t averaged = averager ? averager->step() : 0;
    averager.reset();
    if (knowledge.state) knowledge.state->leave();
    ddp.set_group(comm::Group());
    group = std::move(smaller);
    if (!stays) return false;
    ddp.set_group(group);
    if (hook != JobHook::kLocalSgd) return true;
    averager = make_averager(group);
    averager->set_step(averaged);
    return true;
  };
  for (size_t step = 0; step < ranks.size(); ++step) {
    if (become(ranks[step])) {
      optimizer.zero_grad();
      const Tensor loss =
          samples.loss(ddp, samples.batches.of(static_cast<int64_t>(step), group)) * samples.batches.weight(group);
      backward(loss);
      double sum = loss.item<double>() / group.size();
      group.all_reduce(std::span(&sum, 1)).wait();
      optimizer.step();
      result.losses.push_back(sum);
    }
    if (become(averaging[step]) && averager) averager->average_parameters(optimizer);
  }
  if (std::find(now.begin(), now.end(), all.rank()) == now.end()) return {};
  result.bits = parallel::bits_of(ddp.module());
  knowledge.tell(result);
  return result;
}

std::vector<double> reference_losses(int64_t steps) {
  const Samples samples;
  CountingNet net = make_net();
  optim::AdamW optimizer(net.named_parameters(), {.lr = 0.01});
  std::vector<double> losses;
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    const Tensor loss = samples.loss(net, samples.batches.of(step, 0, 1));
    backward(loss);
    optimizer.step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

void expect_undisturbed(const JobResult& result, int64_t steps, bool draws) {
  const std::vector<double> expected = reference_losses(steps);
  ASSERT_EQ(result.losses.size(), expected.size());
  ASSERT_EQ(result.sizes.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_NEAR(result.losses[i], expected[i], 1e-9 * std::max(1.0, std::abs(expected[i]))) << "step " << i;
  EXPECT_EQ(result.forwards, static_cast<double>(steps));
  if (draws) {
    EXPECT_EQ(result.drawn, steps);
  }
}

}  // namespace chorale::elastic
