// The commands of the chorale program. A new one is a line here and a file that defines its add_… function.
#pragma once

#include <CLI/CLI.hpp>

#define CHORALE_COMMANDS(X) X(bench) X(doctor) X(flight) X(generate) X(ops) X(report) X(run) X(train) X(watch)

namespace chorale::app {

// add_doctor(program) and so on: each adds its subcommand with its options, and a callback that does the work and
// throws a chorale::Error to fail, or CLI::RuntimeError(status) to end with a status of its own.
#define CHORALE_DECLARE(name) void add_##name(CLI::App& program);
CHORALE_COMMANDS(CHORALE_DECLARE)
#undef CHORALE_DECLARE

void add_bench_all(CLI::App& bench);
void add_bench_collectives(CLI::App& bench);
void add_bench_ops(CLI::App& bench);
void add_bench_steps(CLI::App& bench);
void add_bench_ddp(CLI::App& bench);

}  // namespace chorale::app
