// `chorale generate`: goes on with a text, with the model of a run or of a GPT-2's folder.
#include <filesystem>
#include <iostream>
#include <memory>

#include "chorale/app/commands.h"
#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/models/checkpoint.h"
#include "chorale/train/checkpoint.h"
#include "chorale/train/writer.h"

namespace chorale::app {
namespace {

namespace fs = std::filesystem;

struct GenerateCommand {
  std::string run, prompt;
  train::WriteOptions options{.temperature = 0.8};
  uint64_t seed = 0;
  int threads = 0;  // 0: as ever
};

// The last checkpoint of a run, or the folder itself when it has a model.
fs::path model_folder(const std::string& run) {
  if (fs::exists(fs::path(run) / "model.safetensors") || fs::exists(fs::path(run) / "model.safetensors.index.json"))
    return run;
  const auto found = train::find_checkpoint(train::Checkpoints(run), false);
  CHORALE_CHECK(found, "[generate] there is no checkpoint in ", run,
                " and no model.safetensors; train one: chorale "
                "train gpt --out ",
                run);
  return found->folder;
}

void generate(GenerateCommand& command) {
  if (command.threads > 0) set_thread_count(command.threads);
  const fs::path folder = model_folder(command.run);
  models::Gpt2 model = models::load_gpt2(folder);
  const train::Tokenizer tokenizer = train::Tokenizer::load(folder);
  Generator numbers(command.seed);
  command.options.generator = &numbers;
  command.options.on_text = [](const std::string& piece) { std::cout << piece << std::flush; };
  train::write_text(model, tokenizer, command.prompt, command.options);
  std::cout << '\n';
}

}  // namespace

void add_generate(CLI::App& program) {
  CLI::App* command = program.add_subcommand("generate", "Go on with a text, with a GPT that was trained");
  const auto state = std::make_shared<GenerateCommand>();
  command->add_option("--run", state->run, "Folder of a run, or of a GPT-2 with config.json and model.safetensors")
      ->type_name("DIR")
      ->required();
  command->add_option("--prompt", state->prompt, "What the text begins with");
  command->add_option("--tokens", state->options.tokens, "How many to write")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--temperature", state->options.temperature, "0: always the likeliest token; 1: as the model says")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--top-k", state->options.top_k, "Only among the K likeliest tokens; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--top-p", state->options.top_p,
                   "Only among the likeliest tokens that together have this probability")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--seed", state->seed, "Of the choices: the same one gives the same text")->capture_default_str();
  command->add_option("--threads", state->threads, "0: one for each core")->check(CLI::NonNegativeNumber);
  command->callback([state] { generate(*state); });
}

}  // namespace chorale::app
