// The page of one or several runs: one file with styles, program and data in it, which asks nothing of any server. A
// live page gets its data anew whenever there is more (app/live_server.h); it is the same page otherwise.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "chorale/report/run.h"

namespace chorale::report {

// What the page draws: everything of these runs, with long curves thinned. One line of JSON.
std::string page_data(std::span<const RunReader* const> runs);

enum class Mode { kFile, kLive };
std::string page(std::string_view data, Mode mode);

// Reads the runs and writes their page. Returns what could not be understood, each with the name of its run. Throws
// InvalidArgument for a folder without metrics, and if the file cannot be written.
std::vector<std::string> write_report(std::span<const std::filesystem::path> runs, const std::filesystem::path& file);

}  // namespace chorale::report
