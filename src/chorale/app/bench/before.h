// `--against before=PROGRAM`: has a change made anything slower? An older chorale program runs the same benchmark in
// turns with this one.
#pragma once

#include <string>

#include "chorale/app/bench/bench.h"

namespace chorale::app {

// PROGRAM, if the list of peers has before=PROGRAM; else empty.
std::string before_program(const std::string& against);

// How often each program runs, in turns; the median counts.
inline constexpr int kRunsOfEach = 3;

// Runs this process's own command line, without --against and --json, as `PROGRAM bench …` and with this program,
// kRunsOfEach times in turns, and reports. Throws StateError when a run fails. `rounds`: how many a run makes where the
// command line does not say; 0: as many as without a comparison.
void compare_with_before(const std::string& bench, const std::string& program, const std::string& json, int rounds = 0);

// Prints each case, before and now, and what the comparison comes to; writes the rows to `json` unless that is empty.
void report_comparison(const std::string& bench, const std::vector<BenchRow>& rows, const std::string& json);

// The rows that both have, by the medians over the runs of each side: `ours` is now, the peer "before" then.
std::vector<BenchRow> compared(const std::vector<nlohmann::json>& now, const std::vector<nlohmann::json>& before);

}  // namespace chorale::app
