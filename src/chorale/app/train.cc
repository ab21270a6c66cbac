#include "chorale/app/train.h"

#include <csignal>
#include <memory>

#include "chorale/app/commands.h"

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
bool Interrupt::requested() { return interrupts != 0; }

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
  fashion->add_option("--batch", options->batch, "pictures in a step")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  fashion->add_option("--lr", options->lr, "highest learning rate of the one-cycle schedule")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  fashion->add_option("--seed", options->seed, "of weights and order")->capture_default_str();
  fashion->add_option("--threads", options->threads, "0: one per core")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  fashion->add_flag("--quiet", options->quiet, "only the result");
  fashion->callback([options] { train_fashion_mnist(*options); });
}

}  // namespace chorale::app
