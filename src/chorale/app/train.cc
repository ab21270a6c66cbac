#include "chorale/app/train.h"

#include <unistd.h>

#include <csignal>
#include <fstream>
#include <memory>

#include "chorale/app/commands.h"
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/base/host.h"
#include "chorale/base/parallel.h"
#include "chorale/comm/world.h"
#include "chorale/launch/launcher.h"
#include "chorale/transport/memory_store.h"

namespace chorale::app {
namespace {

volatile std::sig_atomic_t interrupts = 0;

extern "C" void note_interrupt(int number) {
  interrupts = interrupts + 1;
  std::signal(number, SIG_DFL);  // the second one is not ours any more
}

}  // namespace

Interrupt::Interrupt() {
  interrupts = 0;
  std::signal(SIGINT, note_interrupt);
  std::signal(SIGTERM, note_interrupt);
}
Interrupt::~Interrupt() {
  std::signal(SIGINT, SIG_DFL);
  std::signal(SIGTERM, SIG_DFL);
}
bool Interrupt::requested(const comm::Group& group) {
  const Tensor any = Tensor::scalar(interrupts != 0 ? 1 : 0, DType::kI32);
  group.all_reduce(any, {Reduce::kMax}).wait();
  return any.item<int32_t>() != 0;
}

namespace {

// This program with the same arguments, once for each rank. Lines of ranks come with their rank in front, which a live
// line does not survive: rank 0 gets our own output as well.
int start_ranks(int ranks) {
  const int output = dup(STDOUT_FILENO);  // inherited by the ranks
  std::vector<std::string> command = {"/proc/self/exe"};
  std::ifstream words("/proc/self/cmdline");
  std::string word;
  std::getline(words, word, '\0');  // the program
  while (std::getline(words, word, '\0')) command.push_back(word);
  command.insert(command.end(), {"--output", std::to_string(output)});
  launch::LaunchOptions options;
  options.ranks = ranks;
  options.command = std::move(command);
  return launch::launch(options);
}

void run_train(const TrainOptions& options) {
  const int ranks = options.ranks > 0 ? options.ranks : usable_cores();
  if (!config::one_of_several_ranks() && ranks > 1) {
    if (const int status = start_ranks(ranks); status != 0) throw CLI::RuntimeError(status);
    return;
  }
  set_thread_count(options.threads);
  comm::World world;
  if (config::one_of_several_ranks()) {
    world.init();
  } else {
    world.init(std::make_shared<transport::MemoryStore>(), 0, 1);
  }
  std::FILE* out = options.output >= 0 ? fdopen(options.output, "w") : stdout;
  CHORALE_CHECK(out, "[train] descriptor ", options.output, " cannot be written to");
  train_fashion_mnist(options, world.group(), out);
}

}  // namespace

void add_train(CLI::App& program) {
  CLI::App* train = program.add_subcommand("train", "Train a model");
  train->require_subcommand(1);
  CLI::App* fashion = train->add_subcommand(
      "fashion-mnist", "Tell ten kinds of clothes apart: 60,000 pictures of 28 x 28, from Debian's package");
  auto options = std::make_shared<TrainOptions>();
  fashion->add_option("--model", options->model, "cnn or mlp")
      ->capture_default_str()
      ->check(CLI::IsMember({"cnn", "mlp"}));
  fashion->add_option("--epochs", options->epochs, "passes over the training pictures")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  fashion->add_option("--steps", options->steps, "end after this many steps; 0: when the epochs are over")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  fashion->add_option("--batch", options->batch, "pictures in a step, of all ranks together")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  fashion->add_option("--lr", options->lr, "highest learning rate of the one-cycle schedule")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  fashion->add_option("--seed", options->seed, "of weights and order")->capture_default_str();
  fashion->add_option("-n,--ranks", options->ranks, "processes that share each batch; 0: one for each core")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  fashion->add_option("--threads", options->threads, "of each rank")->capture_default_str()->check(CLI::PositiveNumber);
  fashion->add_flag("--quiet", options->quiet, "only the result");
  fashion->add_option("--output", options->output)->group("");
  fashion->callback([options] { run_train(*options); });
}

}  // namespace chorale::app
