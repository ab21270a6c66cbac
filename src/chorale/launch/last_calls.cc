#include "chorale/launch/last_calls.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
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

FlightFolder::FlightFolder(const std::string& logs) : path_(config::env("CHORALE_FLIGHT_DIR").value_or("")) {
  is_users_ = !path_.empty();
  if (path_.empty()) path_ = logs;
  std::error_code error;
  if (path_.empty()) {
    const fs::path temporary = fs::temp_directory_path(error);
    std::string name = ((error ? fs::path("/tmp") : temporary) / "chorale-flights-XXXXXX").string();
    is_ours_ = mkdtemp(name.data()) != nullptr;
    path_ = is_ours_ ? name : fs::path(name).parent_path().string();  // no reason to start nothing
  }
  const fs::path whole = fs::absolute(path_, error);
  if (!error) path_ = whole.string();
}

FlightFolder::~FlightFolder() {
  if (is_ours_) rmdir(path_.c_str());  // fails where a record is
}

void FlightFolder::tidy(const std::map<pid_t, int>& rank_of_process) const {
  if (is_users_) return;
  std::error_code trouble;
  std::vector<fs::path> records;
  for (const auto& entry : fs::directory_iterator(path_, trouble)) {
    const auto process = process_in(entry.path().filename().string());
    if (process && (is_ours_ || rank_of_process.contains(*process))) records.push_back(entry.path());
  }
  for (const fs::path& record : records) fs::remove(record, trouble);
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
