#include "chorale/launch/mps.h"

#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>

#include "chorale/base/config.h"
#include "chorale/base/env_number.h"
#include "chorale/base/error.h"

namespace chorale::launch {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

constexpr const char* kControl = "nvidia-cuda-mps-control";
constexpr auto kStartTime = 5s, kEndTime = 3s;
constexpr auto kLook = 10ms;

// Whether it is to be waited for; it stays until somebody does, so that its number is nobody else's.
bool has_ended_process(pid_t pid) {
  siginfo_t info{};
  return waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid;
}

// Kills what has not ended by then.
void end_within(pid_t pid, std::chrono::milliseconds time) {
  const auto until = Clock::now() + time;
  while (!has_ended_process(pid) && Clock::now() < until) std::this_thread::sleep_for(kLook);
  kill(-pid, SIGKILL);  // and what it has started
  waitpid(pid, nullptr, 0);
}

}  // namespace

int count_gpus() {
  if (const auto listed = config::env("CUDA_VISIBLE_DEVICES")) {
    // A list ends where a number is negative.
    if (listed->empty() || listed->front() == '-') return 0;
    const size_t end = listed->find(",-");
    return static_cast<int>(
        1 + std::count(listed->begin(),
                       end == std::string::npos ? listed->end() : listed->begin() + static_cast<ptrdiff_t>(end), ','));
  }
  int count = 0;
  std::error_code ignored;
  for (const auto& entry : std::filesystem::directory_iterator("/dev", ignored)) {
    const std::string name = entry.path().filename().string();
    constexpr std::string_view kBegin = "nvidia";
    if (name.size() > kBegin.size() && name.starts_with(kBegin) &&
        std::all_of(name.begin() + kBegin.size(), name.end(), [](unsigned char c) { return c >= '0' && c <= '9'; }))
      ++count;
  }
  return count;
}

Mps::Mps(int ranks, Guardian& guardian, const Say& say) : guardian_(guardian) {
  const bool is_wanted = config::is_on("CHORALE_MPS", true);
  const int gpus = count_gpus();
  if (gpus == 0 || ranks <= gpus || !is_wanted || config::env("CUDA_MPS_PIPE_DIRECTORY")) return;
  try {
    program_ = find_program(kControl);
  } catch (const InvalidArgument&) {
    return;
  }
  std::string folder = "/tmp/chorale-mps-XXXXXX";
  if (!mkdtemp(folder.data())) {
    say(concat("without MPS: cannot make a folder in /tmp: ", std::strerror(errno)));
    return;
  }
  folder_ = folder;
  try {
    daemon_ = start_process({.program = program_,
                             .arguments = {kControl, "-f"},
                             .environment = config::environment_with(environment()),
                             .cpus = {},
                             .inherited = {}},
                            [&](pid_t pid) { guardian_.watch(pid); });
  } catch (const StateError& error) {
    say(concat("without MPS: ", error.what()));
    end();
    return;
  }
  const auto until = Clock::now() + kStartTime;
  while (!has_come_up() && Clock::now() < until && !has_ended()) std::this_thread::sleep_for(kLook);
  if (!has_come_up()) {
    say(concat("without MPS: ", program_, " did not come up; CHORALE_MPS=0 keeps it from being tried"));
    end();
    return;
  }
  say(concat(ranks, " ranks share ", gpus, gpus == 1 ? " GPU" : " GPUs",
             " under NVIDIA's MPS, which is started for them; CHORALE_MPS=0 leaves it out"));
}

Mps::~Mps() { end(); }

std::map<std::string, std::string> Mps::environment() const {
  if (folder_.empty()) return {};
  return {{"CUDA_MPS_PIPE_DIRECTORY", folder_}, {"CUDA_MPS_LOG_DIRECTORY", folder_}};
}

// The pipe on which clients ask for a server.
bool Mps::has_come_up() const {
  struct stat found {};
  return stat((folder_ + "/control").c_str(), &found) == 0;
}
bool Mps::has_ended() const { return has_ended_process(daemon_.pid); }

void Mps::end() noexcept {
  if (folder_.empty()) return;
  if (daemon_.pid > 0) {
    if (has_come_up() && !has_ended()) ask_to_quit();
    end_within(daemon_.pid, has_come_up() ? kEndTime : 0s);
    guardian_.forget(daemon_.pid);
    daemon_.pid = -1;
  }
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
  folder_.clear();
}

// "quit" on the standard input of another such program, which a shell gives it: that of what start_process starts is
// empty.
void Mps::ask_to_quit() noexcept {
  try {
    const StartedProcess asked = start_process({.program = "/bin/sh",
                                                .arguments = {"sh", "-c", concat("echo quit | '", program_, "'")},
                                                .environment = config::environment_with(environment()),
                                                .cpus = {},
                                                .inherited = {}},
                                               [](pid_t) {});
    end_within(asked.pid, kEndTime);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the daemon is killed then
  }
}

}  // namespace chorale::launch
