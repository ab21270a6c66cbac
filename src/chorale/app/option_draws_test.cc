// Option values that nobody would think of, over every option of every command, up to where work would start: there is
// a message or a plan, never a signal and never silence.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "chorale/app/commands.h"
#include "chorale/app/program.h"
#include "chorale/base/printable.h"
#include "chorale/testing/temporary_folder_test_util.h"
#include "chorale/train/tasks.h"

namespace chorale::app {
namespace {

// The commands of chorale-bench and chorale-checkpoint are in it, too. That of chorale-recommender is drawn by itself,
// since one of these has its name.
constexpr AddCommand kMostCommands[] = {add_bench, add_checkpoint,
#define CHORALE_ADDRESS(name) add_##name,
                                        CHORALE_COMMANDS(CHORALE_ADDRESS)
#undef CHORALE_ADDRESS
};
constexpr AddCommand kRecommender[] = {add_train_recommender};

struct Outcome {
  int status;
  std::string said;
};
Outcome plan_of(const std::vector<std::string>& words, std::span<const AddCommand> known) {
  std::vector<const char*> args{"chorale"};
  for (const std::string& word : words) args.push_back(word.c_str());
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const int status = plan(static_cast<int>(args.size()), args.data(), known);
  std::string said = testing::internal::GetCapturedStdout();
  return {status, said + testing::internal::GetCapturedStderr()};
}

// A command by its words, with its options.
struct Command {
  struct Option {
    std::string name;
    std::string value;  // the default
    bool takes_value;
  };
  std::vector<std::string> words;
  std::vector<Option> options;
  bool needs_word = false;  // such as the folder of a run
  std::span<const AddCommand> known{};
};

void collect(const CLI::App& app, const std::vector<std::string>& words, std::vector<Command>& found) {
  for (const CLI::App* child : app.get_subcommands([](const CLI::App*) { return true; })) {
    std::vector<std::string> path = words;
    path.push_back(child->get_name());
    collect(*child, path, found);
    if (child->get_require_subcommand_min() > 0) continue;
    if (child->get_prefix_command()) continue;  // its words are for a program of its own
    Command command{path, {}};
    for (const CLI::Option* option : child->get_options()) {
      command.needs_word |= option->get_positional() && option->get_required();
      if (option->get_lnames().empty() || option->get_lnames()[0] == "help") continue;
      command.options.push_back(
          {"--" + option->get_lnames()[0], option->get_default_str(), option->get_expected_max() > 0});
    }
    found.push_back(std::move(command));
  }
}
std::vector<Command> commands() {
  std::vector<Command> all;
  for (const auto known : {std::span<const AddCommand>(kMostCommands), std::span<const AddCommand>(kRecommender)}) {
    CLI::App program;
    Work work;
    for (const AddCommand add : known) add(program, work);
    std::vector<Command> found;
    collect(program, {}, found);
    for (Command& command : found) {
      command.known = known;
      all.push_back(std::move(command));
    }
  }
  return all;
}

bool is_number(const std::string& text) {
  double value = 0;
  return !text.empty() &&
         std::from_chars(text.data(), text.data() + text.size(), value).ptr == text.data() + text.size();
}

// A working folder with some things in it.
class OptionDraws : public testing::Test {
 protected:
  OptionDraws() : before_(std::filesystem::current_path()) {
    folder_.write("text", std::string(2000, 'x'));
    folder_.write("empty", "");
    folder_.write("o.json", R"({"batch": 1e400, "seed": -1})");
    folder_.write("deep.json", std::string(100'000, '['));
    std::filesystem::create_directory(folder_ / "folder");
    std::filesystem::create_symlink("nowhere", folder_ / "dangling");
    EXPECT_EQ(mkfifo((folder_ / "pipe").c_str(), 0600), 0);
    std::filesystem::current_path(folder_.path());
  }
  ~OptionDraws() override { std::filesystem::current_path(before_); }

  const TemporaryFolder folder_;
  const std::filesystem::path before_;
};

TEST_F(OptionDraws, EndInAMessageOrAPlan) {
  const std::vector<std::string> values = {"",
                                           " ",
                                           "0",
                                           "-0",
                                           "1",
                                           "-1",
                                           "2",
                                           "1.5",
                                           "1e-320",
                                           "1e308",
                                           "1e309",
                                           "-1e308",
                                           "inf",
                                           "-inf",
                                           "nan",
                                           "-nan",
                                           "0x7f",
                                           "1,000",
                                           "١٢٣",
                                           "½",
                                           "true",
                                           "text",
                                           "empty",
                                           "o.json",
                                           "folder",
                                           "dangling",
                                           "pipe",
                                           "deep.json",
                                           "/dev/null",
                                           "/dev/zero",
                                           "/proc/self/mem",
                                           "/",
                                           "..",
                                           "\xff\xfe",
                                           "☃",
                                           "\xed\xa0\x80",
                                           "%s%n",
                                           "--",
                                           "-",
                                           "=",
                                           "a=b",
                                           "'\"`$(x)",
                                           "2147483648",
                                           "4294967296",
                                           "4294967297",
                                           "9223372036854775807",
                                           "-9223372036854775808",
                                           "9223372036854775808",
                                           "18446744073709551616",
                                           "bytes",
                                           "bpe",
                                           "{",
                                           "{}",
                                           "[1]",
                                           "HOST:1",
                                           "127.0.0.1:99999999",
                                           "ucx:x",
                                           "kill@rank=1,call=7",
                                           std::string(100'000, '9'),
                                           std::string(5000, '/'),
                                           std::string(300, 'x')};
  const std::vector<Command> all = commands();
  // Every option of every command in turn, and others with it.
  std::vector<std::pair<const Command*, const Command::Option*>> turns;
  std::set<std::string> names;
  for (const Command& command : all) {
    for (const Command::Option& option : command.options) {
      turns.emplace_back(&command, &option);
      names.insert(option.name);
    }
    if (command.options.empty()) turns.emplace_back(&command, nullptr);
  }
  ASSERT_GE(all.size(), 20u);
  ASSERT_THAT(names, testing::IsSupersetOf({"--tp", "--fsdp", "--hybrid", "--offload", "--device", "--compile",
                                            "--items", "--parts", "--seconds", "--on-nan"}));
  std::mt19937 numbers(20'261'116);
  const auto pick = [&](size_t count) { return std::uniform_int_distribution<size_t>(0, count - 1)(numbers); };
  for (size_t draw = 0; draw < std::max<size_t>(500, turns.size()); ++draw) {
    const Command& command = *turns[draw % turns.size()].first;
    std::vector<std::string> words = command.words;
    for (size_t left = 1 + pick(4), first = left; left > 0 && !command.options.empty(); --left) {
      const auto& option =
          left == first ? *turns[draw % turns.size()].second : command.options[pick(command.options.size())];
      const std::string& value = values[pick(values.size())];
      if (!option.takes_value) {
        words.push_back(option.name);
      } else if (pick(2) == 0) {
        words.push_back(option.name + "=" + value);
      } else {
        words.insert(words.end(), {option.name, value});
      }
    }
    if (command.needs_word || pick(4) == 0) words.push_back(values[pick(values.size())]);
    std::string line;
    for (const std::string& word : words) line += " '" + printable(word.substr(0, 80)) + "'";
    SCOPED_TRACE(line);
    const Outcome outcome = plan_of(words, command.known);
    ASSERT_THAT(outcome.status, testing::AnyOf(0, 1, 2));
    ASSERT_TRUE(outcome.status == 0 || !outcome.said.empty());
    ASSERT_TRUE(is_utf8(outcome.said)) << printable(outcome.said);
    ASSERT_TRUE(std::filesystem::is_symlink("dangling") && std::filesystem::is_fifo("pipe"));
    ASSERT_EQ(folder_.read("text").size(), 2000u);
  }
}

TEST_F(OptionDraws, EveryNumberHasARange) {
  int checked = 0;
  for (const Command& command : commands()) {
    for (const Command::Option& option : command.options) {
      if (!option.takes_value || !is_number(option.value)) continue;
      for (const char* value : {"nan", "inf", "1e300", "-1e300"}) {
        std::vector<std::string> words = command.words;
        words.insert(words.end(), {option.name, value});
        const Outcome outcome = plan_of(words, command.known);
        EXPECT_EQ(outcome.status, 2) << command.words.back() << " " << option.name << " " << value << ": "
                                     << outcome.said;
        ++checked;
      }
    }
  }
  EXPECT_GT(checked, 200);
  for (const auto& kind : train::task_kinds()) {
    train::TrainOptions options;
    train::OptionTable table;
    train::list_options(options, table);
    kind->list_options(options, table);
    for (const train::Option& row : table.rows()) {
      const bool is_number =
          std::holds_alternative<int64_t*>(row.target) || std::holds_alternative<double*>(row.target);
      EXPECT_TRUE(!is_number || (row.least < row.most && std::isfinite(row.most))) << row.name;
    }
  }
}

}  // namespace
}  // namespace chorale::app
