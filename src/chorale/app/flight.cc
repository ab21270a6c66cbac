// `chorale flight DUMP…`: reads the dumps of all ranks and says which rank diverged first, and at which call.
#include "chorale/app/flight.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "chorale/app/commands.h"
#include "chorale/base/error.h"
#include "chorale/io/file.h"

namespace chorale::app {
namespace {

struct Call {
  std::string text;
  std::string state;
};
// One rank's calls in one group, by number; messages, which have none, are left out.
struct Flight {
  int rank = -1;
  std::string error;
  std::vector<std::string> events;  // changes of the job's ranks, the last ones
  std::map<int64_t, Call> calls;
  int64_t last() const { return calls.empty() ? 0 : calls.rbegin()->first; }
};

std::string list_of(const std::vector<int>& ranks) {
  return fmt::format("{} {}", ranks.size() == 1 ? "rank" : "ranks", fmt::join(ranks, ", "));
}

std::string explain_group(const std::string& group, const std::vector<int>& members,
                          const std::vector<Flight>& flights) {
  std::string text = fmt::format("group {} of {} ranks", group, members.size());
  std::vector<int> silent;
  for (int member : members) {
    if (std::none_of(flights.begin(), flights.end(), [&](const Flight& flight) { return flight.rank == member; }))
      silent.push_back(member);
  }
  if (!silent.empty()) text += fmt::format(" (no dump of {})", list_of(silent));
  text += ":\n";
  int64_t first = 0, last = 0;
  for (const Flight& flight : flights) {
    // Records hold the last calls only: compare where all of them do.
    if (!flight.calls.empty()) first = std::max(first, flight.calls.begin()->first);
    last = std::max(last, flight.last());
  }
  for (int64_t number = first; number <= last; ++number) {
    std::map<std::string, std::vector<int>> camps;
    std::vector<int> behind;
    for (const Flight& flight : flights) {
      const auto found = flight.calls.find(number);
      if (found == flight.calls.end()) {
        behind.push_back(flight.rank);
      } else {
        camps[found->second.text].push_back(flight.rank);
      }
    }
    if (camps.size() > 1) {
      text += fmt::format("  call #{} is the first in which ranks differ:\n", number);
      for (const auto& [call, ranks] : camps) text += fmt::format("    {}: {}\n", list_of(ranks), call);
      return text;
    }
    if (!behind.empty() && !camps.empty()) {
      text += fmt::format("  {} never made call #{}, {}, which {} made\n", list_of(behind), number,
                          camps.begin()->first, list_of(camps.begin()->second));
      for (const Flight& flight : flights) {
        if (std::find(behind.begin(), behind.end(), flight.rank) != behind.end())
          text += fmt::format("    the last of rank {} was #{}{}\n", flight.rank, flight.last(),
                              flight.calls.empty() ? "" : ", " + flight.calls.rbegin()->second.text);
      }
      return text;
    }
  }
  text += fmt::format("  all made the same calls, up to #{}", last);
  std::map<std::string, std::vector<int>> states;
  for (const Flight& flight : flights) {
    if (!flight.calls.empty()) states[flight.calls.rbegin()->second.state].push_back(flight.rank);
  }
  for (const auto& [state, ranks] : states) text += fmt::format("; {} on {}", state, list_of(ranks));
  if (!silent.empty()) text += fmt::format("; look at {} first", list_of(silent));
  return text + "\n";
}

// The calls of functions on other workers that one worker has made last (rpc/call_log.h): how many, and those that were
// not answered, the oldest first.
std::string explain_remote_calls(const nlohmann::json& record) {
  const auto& calls = record.at("remote_calls");
  const auto names = record.at("names").get<std::vector<std::string>>();
  const auto name_of = [&](int64_t worker) {
    return worker >= 0 && worker < static_cast<int64_t>(names.size()) ? names[static_cast<size_t>(worker)]
                                                                      : std::to_string(worker);
  };
  std::string open;
  size_t failed = 0, pending = 0;
  for (const auto& call : calls) {
    const auto state = call.at("state").get<std::string>();
    failed += state == "failed" ? 1 : 0;
    if (state != "pending") continue;
    ++pending;
    const double seconds = (record.at("now_us").get<double>() - call.at("start_us").get<double>()) / 1e6;
    if (pending <= 10)
      open += fmt::format("    #{} {} on {}, {} bytes, for {:.3f} s\n", call.at("number").get<int64_t>(),
                          call.at("function").get<std::string>(), name_of(call.at("to").get<int64_t>()),
                          call.at("bytes").get<int64_t>(), seconds);
  }
  return fmt::format("  {} made {} calls lately, {} failed, {} were not answered{}\n{}",
                     name_of(record.at("rank").get<int64_t>()), calls.size(), failed, pending, pending > 0 ? ":" : "",
                     open);
}

}  // namespace

std::string explain_flights(const std::vector<nlohmann::json>& records) {
  struct Group {
    std::vector<int> members;
    std::vector<Flight> flights;
  };
  std::map<std::string, Group> groups;
  std::string remote;
  try {
    for (const auto& record : records) {
      CHORALE_CHECK(record.at("format") == "chorale-flight-1", "[flight] unknown format ", record.at("format").dump());
      if (record.contains("remote_calls")) {
        remote += explain_remote_calls(record);
        if (const auto said = record.at("error").get<std::string>(); !said.empty())
          remote += fmt::format("    it said: {}\n", said);
        continue;
      }
      Group& group = groups[record.at("group").get<std::string>()];
      group.members = record.at("members").get<std::vector<int>>();
      Flight flight;
      flight.rank = record.at("rank").get<int>();
      flight.error = record.at("error").get<std::string>();
      if (record.contains("events")) flight.events = record.at("events").get<std::vector<std::string>>();
      for (const auto& call : record.at("calls")) {
        if (const auto number = call.at("number").get<int64_t>(); number > 0)
          flight.calls[number] = {call.at("call").get<std::string>(), call.at("state").get<std::string>()};
      }
      group.flights.push_back(std::move(flight));
    }
  } catch (const nlohmann::json::exception& error) {
    throw InvalidArgument(concat("[flight] this is not a dump of a flight recorder: ", error.what()));
  }
  std::string text;
  for (auto& [name, group] : groups) {
    std::sort(group.flights.begin(), group.flights.end(), [](const auto& a, const auto& b) { return a.rank < b.rank; });
    text += explain_group(name, group.members, group.flights);
    for (const Flight& flight : group.flights) {
      if (!flight.error.empty()) text += fmt::format("  rank {} said: {}\n", flight.rank, flight.error);
      for (const std::string& event : flight.events)
        text += fmt::format("    before, on rank {}: {}\n", flight.rank, event);
    }
  }
  if (!remote.empty()) text += "calls of functions on other workers:\n" + remote;
  return text;
}

namespace {

// The files themselves, and those of folders.
std::vector<std::string> records_at(const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    if (!std::filesystem::is_directory(path)) {
      files.push_back(path);
      continue;
    }
    const size_t before = files.size();
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      if (entry.path().extension() == ".json") files.push_back(entry.path());
    }
    CHORALE_CHECK(files.size() > before, "[flight] there are no records (*.json) in ", path);
    std::sort(files.begin() + static_cast<ptrdiff_t>(before), files.end());
  }
  return files;
}

void explain_files(const std::vector<std::string>& paths) {
  std::vector<nlohmann::json> records;
  for (const std::string& path : records_at(paths)) {
    const auto file = io::MappedFile::open(path);
    records.push_back(nlohmann::json::parse(file->text(), nullptr, false));
    CHORALE_CHECK(!records.back().is_discarded(), "[flight] ", path, " is not JSON");
  }
  fmt::print("{}", explain_flights(records));
}

}  // namespace

void add_flight(CLI::App& program, Work& work) {
  CLI::App* command = program.add_subcommand("flight", "Say which rank diverged first, from the dumps of all ranks");
  auto paths = std::make_shared<std::vector<std::string>>();
  command->add_option("dumps", *paths, "files that a failed job left (CHORALE_FLIGHT_DIR), or their folder")
      ->required();
  command->callback([paths, &work] { work = [paths] { explain_files(*paths); }; });
}

}  // namespace chorale::app
