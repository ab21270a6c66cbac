#include "chorale/launch/ranks.h"

#include <sys/stat.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string_view>
#include <utility>

#include "chorale/base/config.h"

namespace chorale::launch {
namespace {

bool write_all(int descriptor, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t size = write(descriptor, bytes.data(), bytes.size());
    if (size < 0 && errno == EINTR) continue;
    if (size < 0) return false;
    bytes.remove_prefix(static_cast<size_t>(size));
  }
  return true;
}

// Goes on behind what another job has left under this name. A pipe without a reader must not keep the launcher.
Descriptor open_log(const std::string& path) {
  Descriptor log(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOCTTY, 0644));
  struct stat status {};
  const bool is_file = log && fstat(log.get(), &status) == 0 && S_ISREG(status.st_mode);
  CHORALE_CHECK_STATE(is_file, "[launch] cannot write ", path, ": ",
                      log || errno == ENXIO ? "it is not a regular file" : std::strerror(errno));
  return log;
}

// The letter that /proc has for it: 'T' is a process that a signal has stopped; 0: there is none.
char state_of_process(pid_t pid) {
  std::ifstream file(concat("/proc/", pid, "/stat"));
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t name_end = text.rfind(')');  // the program's name may have anything in it
  return name_end == std::string::npos || name_end + 2 >= text.size() ? '\0' : text[name_end + 2];
}

}  // namespace

int exit_status_of(int wait_status) {
  return WIFSIGNALED(wait_status) ? 128 + WTERMSIG(wait_status) : WEXITSTATUS(wait_status);
}

std::string describe(int wait_status) {
  if (!WIFSIGNALED(wait_status)) return concat("exit code ", WEXITSTATUS(wait_status));
  const int number = WTERMSIG(wait_status);
  const char* name = sigabbrev_np(number);
  return concat("killed by ", name ? concat("SIG", name) : concat("signal ", number),
                WCOREDUMP(wait_status) ? " (core dumped)" : "");
}

// One of a rank's two outputs.
struct Ranks::Stream {
  Stream(Descriptor from, Output& where, std::function<void(std::string_view)> take_line)
      : pipe(std::move(from)), output(where), lines(std::move(take_line)) {}
  Descriptor pipe;  // closed at its end
  Output& output;
  LineCutter lines;
};

struct Ranks::Rank {
  int rank = 0;
  pid_t pid = -1;
  bool running = false;
  std::optional<std::chrono::steady_clock::time_point> stopped_since;
  Descriptor log;
  LastLines last_errors;
  std::vector<std::unique_ptr<Stream>> streams;
};

Ranks::Ranks(Plan plan, Guardian& guardian) : plan_(std::move(plan)), guardian_(guardian) {}

std::string Ranks::log_path(int rank) const { return concat(plan_.log_dir, "/rank_", rank, plan_.log_suffix, ".log"); }

Ranks::~Ranks() {
  signal(SIGKILL);
  for (const auto& rank : ranks_) {
    if (!rank->running) continue;
    waitpid(rank->pid, nullptr, 0);
    guardian_.forget(rank->pid);
  }
}

bool Ranks::start_some(int most) {
  const int local_size = static_cast<int>(plan_.cores.size()), first = static_cast<int>(ranks_.size());
  if (first == 0 && !plan_.log_dir.empty()) std::filesystem::create_directories(plan_.log_dir);
  for (int local = first; local < std::min(first + most, local_size); ++local)
    start(local, plan_.nodes.first_rank + local);
  return std::ssize(ranks_) < local_size;
}

void Ranks::start_in_place(int local, int number) {
  try {
    start(local, number);
  } catch (...) {
    ranks_.pop_back();
    throw;
  }
}

const Ranks::Rank* Ranks::find(int number) const {
  const auto found = std::find_if(ranks_.begin(), ranks_.end(), [&](const auto& rank) { return rank->rank == number; });
  return found == ranks_.end() ? nullptr : found->get();
}

void Ranks::start(int local, int number) {
  // An elastic job may have grown: then ranks share cores.
  const RankCores& cores = plan_.cores[static_cast<size_t>(local) % plan_.cores.size()];
  Rank& rank = *ranks_.emplace_back(std::make_unique<Rank>());
  rank.rank = number;
  auto variables = plan_.environment;
  variables["RANK"] = variables["ROLE_RANK"] = std::to_string(rank.rank);
  variables["LOCAL_RANK"] = std::to_string(local);
  // The user's choice stays.
  if (!config::env("OMP_NUM_THREADS")) variables["OMP_NUM_THREADS"] = std::to_string(cores.threads);
  ProcessPlan process = plan_.process;
  process.environment = config::environment_with(variables);
  process.cpus = cores.cpus;
  if (!plan_.log_dir.empty()) {
    const std::string path = log_path(rank.rank);
    rank.log = open_log(path);
  }
  StartedProcess started = start_process(process, [this](pid_t pid) { guardian_.watch(pid); });
  rank.pid = started.pid;
  rank.running = true;
  // Written in one piece, so that lines of several ranks do not mix.
  const auto print = [&rank](Output& output, std::string_view line) {
    output.write(concat("[", rank.rank, "] ", line, "\n"));
  };
  rank.streams.push_back(
      std::make_unique<Stream>(std::move(started.output), *plan_.output,
                               [print, output = plan_.output](std::string_view line) { print(*output, line); }));
  rank.streams.push_back(std::make_unique<Stream>(std::move(started.errors), *plan_.errors,
                                                  [print, &rank, errors = plan_.errors](std::string_view line) {
                                                    rank.last_errors.add(line);
                                                    print(*errors, line);
                                                  }));
}

std::vector<int> Ranks::kill_stopped(std::chrono::milliseconds patience) {
  std::vector<int> killed;
  const auto now = std::chrono::steady_clock::now();
  for (const auto& rank : ranks_) {
    if (!rank->running) continue;
    if (state_of_process(rank->pid) != 'T') {
      rank->stopped_since.reset();
    } else if (!rank->stopped_since) {
      rank->stopped_since = now;
    } else if (now - *rank->stopped_since >= patience) {
      kill(-rank->pid, SIGKILL);
      rank->stopped_since.reset();
      killed.push_back(rank->rank);
    }
  }
  return killed;
}

void Ranks::signal(int number) {
  for (const auto& rank : ranks_) {
    if (rank->running) kill(-rank->pid, number);
  }
}

void Ranks::kill_one(int number) {
  const Rank* rank = find(number);
  if (rank && rank->running) kill(-rank->pid, SIGKILL);
}

std::vector<RankEnd> Ranks::reap() {
  std::vector<RankEnd> ends;
  for (const auto& rank : ranks_) {
    siginfo_t info{};
    const auto pid = static_cast<id_t>(rank->pid);
    if (!rank->running || waitid(P_PID, pid, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) continue;
    // While it is not reaped yet, its number, which is also its group's, belongs to nobody else.
    kill(-rank->pid, SIGKILL);
    RankEnd& end = ends.emplace_back();
    end.rank = rank->rank;
    end.pid = rank->pid;
    end.when = std::chrono::system_clock::now();
    waitpid(rank->pid, &end.wait_status, 0);
    guardian_.forget(rank->pid);
    rank->running = false;
  }
  return ends;
}

bool Ranks::any_running() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const auto& rank) { return rank->running; });
}

std::vector<pollfd> Ranks::streams() const {
  std::vector<pollfd> open;
  for (const auto& rank : ranks_) {
    for (const auto& stream : rank->streams) {
      if (stream->pipe && stream->output.has_room()) open.push_back({stream->pipe.get(), POLLIN, 0});
    }
  }
  return open;
}

bool Ranks::may_print() const {
  return std::any_of(ranks_.begin(), ranks_.end(), [](const auto& rank) {
    return std::any_of(rank->streams.begin(), rank->streams.end(),
                       [](const auto& stream) { return bool{stream->pipe}; });
  });
}

void Ranks::forward(const std::vector<pollfd>& ready) {
  std::vector<char> bytes(size_t{64} << 10);
  for (const auto& rank : ranks_) {
    for (const auto& stream : rank->streams) {
      const bool is_ready = std::any_of(ready.begin(), ready.end(), [&](const pollfd& state) {
        return state.revents != 0 && state.fd == stream->pipe.get();
      });
      if (!is_ready) continue;
      const ssize_t size = read(stream->pipe.get(), bytes.data(), bytes.size());
      if (size < 0 && errno == EINTR) continue;
      if (size <= 0) {
        stream->lines.finish();
        stream->pipe.reset();
        continue;
      }
      const std::string_view text(bytes.data(), static_cast<size_t>(size));
      if (rank->log && !write_all(rank->log.get(), text) && log_problem_.empty())
        log_problem_ = concat("cannot write ", log_path(rank->rank), ": ", std::strerror(errno),
                              "; what the rank printed is not all there");
      stream->lines.feed(text);
    }
    // A job whose ranks are replaced has ever more of them.
    const bool is_silent =
        std::none_of(rank->streams.begin(), rank->streams.end(), [](const auto& stream) { return bool{stream->pipe}; });
    if (!is_silent) continue;
    rank->streams.clear();
    rank->log.reset();
  }
}

const std::deque<std::string>& Ranks::last_errors(int rank) const {
  const Rank* found = find(rank);
  CHORALE_INVARIANT(found, "rank ", rank, " was not started here");
  return found->last_errors.lines();
}

std::map<pid_t, int> Ranks::rank_of_process() const {
  std::map<pid_t, int> ranks;
  for (const auto& rank : ranks_) ranks.emplace(rank->pid, rank->rank);
  return ranks;
}

}  // namespace chorale::launch
