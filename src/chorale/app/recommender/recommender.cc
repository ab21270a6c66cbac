// `chorale train recommender`: which user likes which item, on made data. The table of items lives on a server; the
// layers above it are data-parallel over the trainers; one backward goes through both (docs/usage/rpc.md).
#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <optional>
#include <thread>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/app/commands.h"
#include "chorale/app/options.h"
#include "chorale/base/comm_error.h"
#include "chorale/base/config.h"
#include "chorale/base/host.h"
#include "chorale/base/log.h"
#include "chorale/base/parallel_for.h"
#include "chorale/codegen/fused.h"
#include "chorale/comm/world.h"
#include "chorale/dist_autograd/context.h"
#include "chorale/io/file.h"
#include "chorale/nn/nn.h"
#include "chorale/optim/sgd.h"
#include "chorale/parallel/ddp.h"
#include "chorale/report/page.h"
#include "chorale/rpc/distributed_optimizer.h"
#include "chorale/rpc/figures.h"
#include "chorale/rpc/remote_module.h"
#include "chorale/train/run_folder.h"
#include "chorale/train/run_log.h"
#include "chorale/train/trainer.h"
#include "chorale/transport/launcher_variables.h"

namespace chorale::app {
namespace {

constexpr int64_t kTaste = 4;  // numbers that say what a user likes, and what an item is

struct RecommenderOptions {
  int64_t trainers = 2, steps = 400, batch = 64, items = 100, width = 8, seed = 0, log_every = 10;
  double lr = 0.2;
  bool compile = false;
  std::string out;
  LaunchValues launching;
};

// ---- the model

struct ItemTable : nn::Module {
  ItemTable(int64_t items, int64_t width) : rows(items, width, {.padding_idx = {}, .sparse = true}) {}
  nn::Embedding rows;
  CHORALE_MODULE(ItemTable, rows)
  Tensor forward(const Tensor& items) { return rows(items); }
};
// The server's one table, for all trainers; it is made for the first that asks.
rpc::RRef<ItemTable> item_table(int64_t items, int64_t width, int64_t seed) {
  static const rpc::RRef<ItemTable> table = [&] {
    manual_seed(static_cast<uint64_t>(seed));
    return rpc::here().reference(ItemTable(items, width));
  }();
  return table;
}

// How well an item and a user go together.
struct Likes : nn::Module {
  explicit Likes(int64_t width) : item(width, 16), user(kTaste, 16) {}
  nn::Linear item, user;
  CHORALE_MODULE(Likes, item, user)
  Tensor forward(const Tensor& row, const Tensor& taste) { return compiled ? compiled(row, taste) : score(row, taste); }
  Tensor score(const Tensor& row, const Tensor& taste) { return sum(mul(item(row), user(taste)), {1}); }
  std::function<Tensor(const Tensor&, const Tensor&)> compiled;  // stands for score(), if any
};

// ---- the data

struct MadeBatch {
  Tensor items, users, liked;
};
// A user likes an item when their tastes point the same way. Nobody tells the model the tastes of items.
class MadeData {
 public:
  MadeData(const RecommenderOptions& options, uint64_t stream)
      : generator_(static_cast<uint64_t>(options.seed) * 1000 + stream), items_(options.items) {
    Generator tastes(static_cast<uint64_t>(options.seed) + 17);
    tastes_ = normal({items_, kTaste}, 0, 1, DType::kF32, tastes);
  }
  MadeBatch draw(int64_t count) {
    MadeBatch batch{randint(0, items_, {count}, DType::kI64, generator_),
                    normal({count, kTaste}, 0, 1, DType::kF32, generator_),
                    {}};
    const Tensor match = sum(mul(index_select(tastes_, 0, batch.items), batch.users), {1});
    batch.liked = to(gt(match, 0), DType::kF32);
    return batch;
  }

 private:
  Generator generator_;
  int64_t items_;
  Tensor tastes_;
};

double share_right(const Tensor& scores, const Tensor& liked) {
  return mean(to(eq(to(gt(scores, 0), DType::kF32), liked), DType::kF32)).item<double>();
}

// ---- a trainer

class Trainer {
 public:
  Trainer(const RecommenderOptions& options, rpc::Agent& agent, const comm::Group& trainers)
      : options_(options),
        agent_(agent),
        trainers_(trainers),
        table_(agent, agent.call<item_table>("server", options.items, options.width, options.seed)),
        likes_((manual_seed(static_cast<uint64_t>(options.seed) + 1), Likes(options.width)), trainers),
        table_optimizer_(agent, table_.remote_parameters(), {.lr = table_rate(options)}),
        optimizer_(likes_.module().named_parameters(), {.lr = options.lr}),
        data_(options, 1 + static_cast<uint64_t>(trainers.rank())) {
    if (!options.compile) return;
    Likes& likes = likes_.module();
    const auto scored =
        chorale::compile([&likes](const Tensor& row, const Tensor& taste) { return likes.score(row, taste); },
                         {.backend = codegen::fused(), .name = "recommender"});
    likes.compiled = scored;
    graphs_ = [scored] { return explain(scored).text(); };
  }

  // The table's rate is higher because few of its rows are in a batch, and divided because every trainer makes a step
  // of its own.
  static double table_rate(const RecommenderOptions& options) {
    return options.lr * static_cast<double>(options.items) / static_cast<double>(2 * options.trainers);
  }
  struct Figures {
    double loss = 0, accuracy = 0;
  };
  Figures step() {
    const MadeBatch batch = data_.draw(options_.batch);
    dist_autograd::Context context(agent_);
    const Tensor scores = likes_(table_.forward(batch.items), batch.users);
    const Tensor loss = binary_cross_entropy_with_logits(scores, batch.liked);
    check_finite(loss.item<double>());
    context.backward({loss});
    // The table changes between two steps of all trainers, not while one of them reads it.
    trainers_.barrier().wait();
    table_optimizer_.step(context);
    for (const Tensor& parameter : likes_.module().parameters()) set_gradient(parameter, context.gradient(parameter));
    optimizer_.step();
    trainers_.barrier().wait();
    return {loss.item<double>(), share_right(scores, batch.liked)};
  }
  // All trainers stop where the mean of their losses is not finite: before anything is changed by it.
  void check_finite(double loss) {
    ++steps_;
    std::array<double, 1> mean = {loss / trainers_.size()};
    trainers_.all_reduce(std::span<double>(mean)).wait();
    if (!std::isfinite(mean[0]))
      throw train::NotFinite(concat("step ", steps_, ": the loss is ", mean[0], "; on rank ", trainers_.rank(),
                                    " it is ", loss, ". Try a smaller --lr"));
  }
  // Measures on data that nobody has trained on.
  Figures test() {
    const NoGrad quiet;
    const MadeBatch batch = MadeData(options_, 0).draw(2000);
    const Tensor scores = likes_.module()(table_.forward(batch.items), batch.users);
    return {binary_cross_entropy_with_logits(scores, batch.liked).item<double>(), share_right(scores, batch.liked)};
  }
  // What was compiled, as `chorale graph` reads it; empty where nothing is.
  std::string graphs() const { return graphs_ ? graphs_() : std::string(); }

 private:
  const RecommenderOptions& options_;
  rpc::Agent& agent_;
  const comm::Group& trainers_;
  rpc::RemoteModule<ItemTable> table_;
  parallel::DistributedDataParallel<Likes> likes_;
  rpc::DistributedOptimizer<optim::Sgd> table_optimizer_;
  optim::Sgd optimizer_;
  MadeData data_;
  int64_t steps_ = 0;
  std::function<std::string()> graphs_;
};

// Trainer 0 also writes the run down.
void train_and_tell(const RecommenderOptions& options, rpc::Agent& agent, Trainer& trainer) {
  const auto number = [](int64_t value) { return json::Value(value); };
  train::RunLog log(options.out, 0,
                    {{"task", json::Value(std::string("recommender"))},
                     {"ranks", number(options.trainers + 1)},
                     {"steps", number(options.steps)}});
  double since = 0;
  for (int64_t step = 1; step <= options.steps; ++step) {
    const Trainer::Figures figures = trainer.step();
    if (step % options.log_every != 0 && step != options.steps) continue;
    const double now = log.seconds(),
                 examples = static_cast<double>(options.log_every * options.batch * options.trainers);
    log.numbers(
        "train", step,
        {{"loss", figures.loss}, {"accuracy", figures.accuracy}, {"examples_per_second", examples / (now - since)}});
    since = now;
    std::string lines = rpc::metrics_lines(rpc::figures_of(agent), step, now);
    for (const rpc::WorkerInfo& worker : agent.workers()) {
      if (worker != agent.info()) lines += rpc::metrics_lines(agent.call<rpc::own_figures>(worker), step, now);
    }
    log.add_lines(lines);
  }
  const Trainer::Figures figures = trainer.test();
  log.numbers("evaluation", options.steps, {{"test_loss", figures.loss}, {"test_accuracy", figures.accuracy}});
  const std::filesystem::path run = options.out, page = run / "report.html";
  if (const std::string graphs = trainer.graphs(); !graphs.empty()) {
    std::filesystem::create_directories(run / "graphs");
    io::write_file(run / "graphs" / "forward.txt", graphs);
  }
  for (const std::string& problem : report::write_report({&run, 1}, page)) log_warning(problem);
  fmt::print("loss {:.3f}, accuracy {:.2f} % on new data; {}\n", figures.loss, 100 * figures.accuracy, page.string());
  std::fflush(stdout);
}

void be_a_rank(RecommenderOptions& options) {
  set_thread_count(1);
  train::MadeFolders made;
  std::optional<train::RunLock> lock;
  comm::World world;
  world.init();
  const comm::Group& all = world.group();
  CHORALE_CHECK(all.size() == options.trainers + 1, "[train] there are ", all.size(), " ranks; --trainers ",
                options.trainers, " needs ", options.trainers + 1, ", one of them for the table");
  if (all.rank() == 0) {
    if (options.out.empty()) options.out = made.make_numbered("recommender");
    made.make(options.out);
    lock.emplace(options.out);
    if (transport::restart_count() == 0) train::check_is_new(options.out);
  }
  rpc::AgentOptions serving{.serves = {rpc::remote<item_table>, rpc::remote<rpc::own_figures>}};
  rpc::add(serving.serves, rpc::module_functions<ItemTable, int64_t, int64_t>());
  rpc::add(serving.serves, rpc::optimizer_functions<optim::Sgd>());
  serving.name = all.rank() < options.trainers ? fmt::format("trainer{}", all.rank()) : "server";
  rpc::Agent agent(all, serving);
  std::vector<int> ranks;
  ranks.reserve(static_cast<size_t>(options.trainers));
  for (int rank = 0; rank < options.trainers; ++rank) ranks.push_back(rank);
  const comm::Group trainers = all.new_group(ranks);
  if (trainers.is_member()) {
    Trainer trainer(options, agent, trainers);
    if (all.rank() == 0) {
      train_and_tell(options, agent, trainer);
    } else {
      for (int64_t step = 0; step < options.steps; ++step) trainer.step();
    }
  }
  agent.shutdown();  // the server serves until all have come here
}

// This program again, once for each rank.
int start_recommender_ranks(const RecommenderOptions& options) {
  std::vector<std::string> line = {"/proc/self/exe"};
  std::ifstream words("/proc/self/cmdline");
  std::string word;
  std::getline(words, word, '\0');  // the program
  while (std::getline(words, word, '\0')) line.push_back(word);
  line.insert(line.end(), {"--out", options.out});
  launch::LaunchOptions launching = launch_options(options.launching, options.trainers + 1);
  launching.command = std::move(line);
  launching.final_statuses = {kNotFinite, kOutputLost};
  return launch::launch(launching);
}

// Called before the first tensor is made: looks at the server's table, and each trainer's tastes of the items.
void check_table_fits(const RecommenderOptions& options) {
  const auto items = static_cast<double>(options.items), trainers = static_cast<double>(options.trainers);
  const double needed = items * sizeof(float) * (static_cast<double>(options.width) + kTaste * trainers);
  const auto there = static_cast<double>(memory_room().total_bytes);
  CHORALE_CHECK(needed <= there, "[train] a table of ", options.items, " items of ", options.width, " numbers takes ",
                fmt::format("{:.4g} GiB with what {} trainers know of them; this machine has {:.4g} GiB",
                            needed / (1 << 30), options.trainers, there / (1 << 30)),
                ". Choose a smaller one");
}

void run_recommender(RecommenderOptions& options) {
  std::signal(SIGXFSZ, SIG_IGN);  // a limit on files is an error like a full disk
  check_table_fits(options);
  if (config::one_of_several_ranks()) {
    try {
      return be_a_rank(options);
    } catch (const train::NotFinite& error) {
      std::cerr << "chorale: " << error.what() << '\n';
      throw CLI::RuntimeError(kNotFinite);
    } catch (const CommError&) {
      // Somebody else is gone. A launcher that heard of this rank first would not know why, and start the job again.
      std::this_thread::sleep_for(std::chrono::seconds(1));
      throw;
    }
  }
  train::MadeFolders made;
  if (options.out.empty()) options.out = made.make_numbered("recommender");
  train::check_can_be_folder(options.out);
  train::check_is_new(options.out);
  made.make(options.out);
  end_with(start_recommender_ranks(options));
}

}  // namespace

void add_train_recommender(CLI::App& program, Work& work) {
  CLI::App* train = program.add_subcommand("train", "Train a model");
  train->require_subcommand(1);
  CLI::App* command = train->add_subcommand("recommender", kRecommenderHelp);
  struct State {
    RecommenderOptions options;
    train::OptionTable table;
  };
  const auto state = std::make_shared<State>();
  RecommenderOptions& options = state->options;
  const auto whole = [&](const char* name, const char* help, int64_t& target, double least, double most,
                         const char* also = "") {
    state->table.add({.name = name, .help = help, .target = &target, .least = least, .most = most, .also = also});
  };
  whole("trainers", "processes that train; one more holds the table", options.trainers, 1, 256, "-n");
  whole("steps", "steps of training", options.steps, 1, 1e9);
  whole("batch", "examples of a trainer in a step", options.batch, 1, 1e6);
  whole("items", "rows of the table", options.items, 2, 1e7);
  whole("width", "numbers in a row", options.width, 1, 4096);
  whole("seed", "of weights and data", options.seed, 0, 1e9);
  whole("log-every", "steps between lines of metrics.jsonl", options.log_every, 1, 1e9);
  state->table.add({.name = "lr", .help = "learning rate", .target = &options.lr, .least = 0, .most = 1e3});
  state->table.add({.name = "compile",
                    .help = "run the trainers' layers from graphs, with kernels made by the system's C compiler",
                    .target = &options.compile});
  state->table.add({.name = "out",
                    .help = "folder of the run; otherwise runs/recommender-N",
                    .target = &options.out,
                    .value_name = "DIR"});
  list_options(options.launching, state->table);
  add_options(*command, state->table);
  command->callback([state, &work] { work = [state] { run_recommender(state->options); }; });
}

}  // namespace chorale::app
