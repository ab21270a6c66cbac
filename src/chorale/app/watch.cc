// `chorale watch RUN`: the page of a run in a browser of this machine, while training goes on.
#include <fmt/format.h>

#include <cstdio>
#include <memory>

#include "chorale/app/commands.h"
#include "chorale/app/live_server.h"
#include "chorale/app/options.h"

namespace chorale::app {

void add_watch(CLI::App& program, Work& work) {
  CLI::App* command = program.add_subcommand("watch", "Show a run in the browser while it trains");
  struct Options {
    std::filesystem::path run;
    int64_t port = 8642;
    train::OptionTable table;
  };
  auto options = std::make_shared<Options>();
  command->add_option("run", options->run, "the folder of the run, such as runs/NAME")->required();
  options->table.add({.name = "port",
                      .help = "port on 127.0.0.1; 0: any that is free",
                      .target = &options->port,
                      .kind = train::OptionKind::kHere,
                      .most = 65535});
  add_options(*command, options->table);
  command->callback([options, &work] {
    work = [options] {
      LiveServer server(options->run, static_cast<int>(options->port));
      fmt::print("http://127.0.0.1:{}/ shows the run (Ctrl-C ends this)\n", server.port());
      std::fflush(stdout);
      server.serve();  // there is nothing to tidy up when somebody interrupts it
    };
  });
}

}  // namespace chorale::app
