// `chorale generate`: goes on with a text, with the model of a run or of a GPT-2's folder.
#include <filesystem>
#include <memory>

#include "chorale/app/commands.h"
#include "chorale/app/options.h"
#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/models/checkpoint.h"
#include "chorale/train/checkpoint.h"
#include "chorale/train/options.h"
#include "chorale/train/output.h"
#include "chorale/train/writer.h"

namespace chorale::app {
namespace {

namespace fs = std::filesystem;

struct GenerateCommand {
  std::string run, prompt;
  train::WriteOptions options{.temperature = 0.8};
  int64_t seed = 0;
  int64_t threads = 0;  // 0: as ever
  train::OptionTable table;

  void list_options();
};

void GenerateCommand::list_options() {
  using enum train::OptionKind;
  table.add({.name = "prompt", .help = "what the text begins with", .target = &prompt, .kind = kHere});
  table.add({.name = "tokens", .help = "how many to write", .target = &options.tokens, .kind = kHere, .most = 1e9});
  table.add({.name = "temperature",
             .help = "0: always the likeliest token; 1: as the model says",
             .target = &options.temperature,
             .kind = kHere,
             .most = 1e6});
  table.add({.name = "top-k",
             .help = "only among the K likeliest tokens; 0: all",
             .target = &options.top_k,
             .kind = kHere,
             .most = 1e9});
  table.add({.name = "top-p",
             .help = "only among the likeliest tokens that together have this probability",
             .target = &options.top_p,
             .kind = kHere,
             .most = 1});
  table.add({.name = "seed",
             .help = "of the choices: the same one gives the same text",
             .target = &seed,
             .kind = kHere,
             .most = train::kMostSeed});
  table.add({.name = "threads",
             .help = "0: one for each core",
             .target = &threads,
             .kind = kHere,
             .most = train::kMostThreads});
}

// The last checkpoint of a run, or the folder itself when it has a model.
fs::path model_folder(const std::string& run) {
  std::error_code error;
  CHORALE_CHECK(fs::is_directory(run, error), "[generate] --run ", run, " is no folder",
                error ? ": " + error.message() : "");
  for (const char* name : {"model.safetensors", "model.safetensors.index.json", "index.json"}) {
    if (fs::exists(fs::path(run) / name)) return run;
  }
  const auto found = train::find_checkpoint(train::Checkpoints(run), false);
  CHORALE_CHECK(found, "[generate] there is no checkpoint in ", run,
                " and no model.safetensors; train one: chorale "
                "train gpt --out ",
                run);
  return found->folder;
}

void generate(GenerateCommand& command) {
  if (command.threads > 0) set_thread_count(static_cast<int>(command.threads));
  const fs::path folder = model_folder(command.run);
  models::Gpt2 model = models::load_gpt2(folder, train::model_tensors(folder));
  const train::Tokenizer tokenizer = train::Tokenizer::load(folder);
  Generator numbers(static_cast<uint64_t>(command.seed));
  command.options.generator = &numbers;
  train::Output output(stdout);
  command.options.on_text = [&](const std::string& piece) { output.print(piece); };
  train::write_text(model, tokenizer, command.prompt, command.options);
  output.print("\n");
  if (output.has_failed()) end_with(kOutputLost);
}

}  // namespace

void add_generate(CLI::App& program, Work& work) {
  CLI::App* command = program.add_subcommand("generate", "Go on with a text, with a GPT that was trained");
  const auto state = std::make_shared<GenerateCommand>();
  command->add_option("--run", state->run, "folder of a run, or of a GPT-2 with config.json and model.safetensors")
      ->type_name("DIR")
      ->required();
  state->list_options();
  add_options(*command, state->table);
  command->callback([state, &work] { work = [state] { generate(*state); }; });
}

}  // namespace chorale::app
