#include "chorale/launch/last_calls.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string_view>

#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/json/json.h"

namespace chorale::launch {
namespace {

namespace fs = std::filesystem;

// The process in "chorale-flight-PROCESS-NUMBER-rankR.json".
std::optional<pid_t> process_in(std::string_view name) {
  constexpr std::string_view kPrefix = "chorale-flight-";
  if (!name.starts_with(kPrefix) || !name.ends_with(".json")) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  pid_t process = 0;
  if (std::from_chars(name.data(), name.data() + name.size(), process).ec != std::errc()) return std::nullopt;
  return process;
}

std::string decisive_call_in(const fs::path& path) {
  std::ifstream file(path);
  const std::string text(std::istreambuf_iterator<char>(file), {});
  const json::Value record = json::parse(path.string(), text);
  const json::Value* calls = json::find(record.object("a flight record"), "calls");
  CHORALE_CHECK(calls && !calls->array("calls").empty(), "no calls in ", path);
  const auto word = [](const json::Value& call, const char* key) {
    const json::Value* value = json::find(call.object("a call"), key);
    return value ? value->string(key) : std::string("?");
  };
  // Where it got stuck; calls that were issued later wait behind it.
  const json::Array& all = calls->array("calls");
  const auto open =
      std::find_if(all.begin(), all.end(), [&](const json::Value& call) { return word(call, "state") != "done"; });
  const json::Value& last = open == all.end() ? all.back() : *open;
  const json::Value* number = json::find(last.object("a call"), "number");
  return concat(word(last, "call"), ", #", number ? number->size("number") : 0, ": ", word(last, "state"));
}

}  // namespace

std::string flight_folder() {
  if (const auto folder = config::env("CHORALE_FLIGHT_DIR")) return *folder;
  std::error_code error;
  const fs::path folder = fs::temp_directory_path(error);
  return error ? "/tmp" : folder.string();  // TMPDIR is not there: no reason to start nothing
}

std::vector<LastCall> last_calls(const std::string& folder, const std::map<pid_t, int>& rank_of_process) {
  // A rank with several groups may leave several: the latest counts.
  std::map<int, fs::directory_entry> newest;
  std::error_code trouble;
  for (const auto& entry : fs::directory_iterator(folder, trouble)) {
    if (!fs::is_regular_file(entry.symlink_status(trouble))) continue;  // of another user, for the folder is shared
    const auto process = process_in(entry.path().filename().string());
    const auto found = process ? rank_of_process.find(*process) : rank_of_process.end();
    if (found == rank_of_process.end()) continue;
    auto& best = newest[found->second];
    if (best.path().empty() || entry.last_write_time(trouble) > best.last_write_time(trouble)) best = entry;
  }
  std::vector<LastCall> calls;
  for (const auto& [rank, entry] : newest) {
    try {
      calls.push_back({rank, decisive_call_in(entry.path()), entry.path().string()});
    } catch (const InvalidArgument&) {
    }
  }
  return calls;
}

}  // namespace chorale::launch
