// `chorale report RUN [RUN…]`: makes the page of a run again, or one that compares several.
#include <fmt/format.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "chorale/app/commands.h"
#include "chorale/report/page.h"

namespace chorale::app {

void add_report(CLI::App& program, Work& work) {
  CLI::App* command = program.add_subcommand("report", "Make the page of a run again, or one that compares several");
  struct Options {
    std::vector<std::filesystem::path> runs;
    std::filesystem::path out;
  };
  auto options = std::make_shared<Options>();
  command->add_option("runs", options->runs, "folders of runs, such as runs/NAME")->required();
  command->add_option("-o,--out", options->out,
                      "the file to write; report.html in the folder of the run, or comparison.html for several runs");
  command->callback([options, &work] {
    work = [options] {
      std::signal(SIGXFSZ, SIG_IGN);  // a limit on files is an error like a full disk
      std::filesystem::path file = options->out;
      if (file.empty()) file = options->runs.size() == 1 ? options->runs.front() / "report.html" : "comparison.html";
      for (const std::string& problem : report::write_report(options->runs, file))
        fmt::print(stderr, "chorale: {}\n", problem);
      fmt::print("{}\n", file.string());
    };
  });
}

}  // namespace chorale::app
