#include "chorale/codegen/toolchain.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <fstream>
#include <iterator>

#include "chorale/base/config.h"
#include "chorale/base/cpu.h"
#include "chorale/base/error.h"

namespace chorale::codegen {
namespace {

constexpr size_t kMostWords = 2000;  // of what a compiler complains

std::filesystem::path find_in_path(const std::string& name) {
  if (name.find('/') != std::string::npos) return ::access(name.c_str(), X_OK) == 0 ? name : "";
  const std::string all = config::env("PATH").value_or("/usr/bin:/bin");
  for (size_t at = 0; at <= all.size();) {
    const size_t end = std::min(all.find(':', at), all.size());
    const std::filesystem::path path = std::filesystem::path(all.substr(at, end - at)) / name;
    if (path.is_absolute() && ::access(path.c_str(), X_OK) == 0) return path;
    at = end + 1;
  }
  return {};
}

// Waits until the process has ended, and ends it and what it started at the deadline. Whether it ended by itself.
bool wait_for(pid_t pid, std::chrono::milliseconds deadline, int& status) {
  const auto end = std::chrono::steady_clock::now() + deadline;
  const int descriptor = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  bool in_time = true;
  for (pid_t ended = 0; (ended = ::waitpid(pid, &status, WNOHANG)) != pid;) {
    if (ended < 0 && errno != EINTR) {
      status = -1;  // somebody else took its status
      break;
    }
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    if (left.count() <= 0) {
      in_time = false;
      ::kill(-pid, SIGKILL);
      while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
      }
      break;
    }
    pollfd wait{descriptor, POLLIN, 0};
    // Without a descriptor (old systems) it looks again every few milliseconds.
    ::poll(&wait, descriptor >= 0 ? 1 : 0, descriptor >= 0 ? static_cast<int>(left.count()) : 5);
  }
  if (descriptor >= 0) ::close(descriptor);
  return in_time;
}

}  // namespace

std::string Toolchain::identity() const {
  std::string all = compiler.string();
  struct stat file {};
  if (::stat(compiler.c_str(), &file) == 0) {
    all += concat(" ", file.st_size, " ", file.st_mtim.tv_sec, ".", file.st_mtim.tv_nsec);
  }
  for (const std::string& flag : flags) all += " " + flag;
  all += " on " + cpu_brand();
  for (const CpuFeature feature : all_cpu_features()) {
    if (cpu_has(feature)) all += concat(" ", name_of(feature));
  }
  return all;
}

Toolchain find_toolchain(const std::string& wanted) {
  Toolchain found;
  const std::string asked = !wanted.empty() ? wanted : config::env("CHORALE_CC").value_or("");
  if (!asked.empty()) {
    found.compiler = find_in_path(asked);
  } else {
    for (const char* name : {"cc", "gcc", "clang"}) {
      if (found.compiler.empty()) found.compiler = find_in_path(name);
    }
  }
  if (found.compiler.empty()) {
    found.why_not = asked.empty() ? "there is no C compiler (cc, gcc or clang) in PATH; install gcc, or set CHORALE_CC"
                                  : concat("there is no program ", asked, " that could be the C compiler");
  }
  // No contraction: a multiplication and an addition round apart, as they do in the eager loops. What is turned off
  // besides are traps and errno, which nothing here reads; values stay what they are.
  found.flags = {
      "-std=gnu11", "-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared",
      "-fPIC",      "-w"};
  return found;
}

std::string run_compiler(const Toolchain& toolchain, const std::filesystem::path& source,
                         const std::filesystem::path& result, std::chrono::milliseconds deadline) {
  if (toolchain.compiler.empty()) return toolchain.why_not;
  std::vector<std::string> words{toolchain.compiler.string()};
  words.insert(words.end(), toolchain.flags.begin(), toolchain.flags.end());
  words.insert(words.end(), {"-x", "c", source.string(), "-o", result.string()});
  std::vector<std::string> environment = config::environment_with({{"LC_ALL", "C"}});
  const auto pointers = [](std::vector<std::string>& from) {
    std::vector<char*> list;
    list.reserve(from.size() + 1);
    for (std::string& word : from) list.push_back(word.data());
    list.push_back(nullptr);
    return list;
  };
  const std::filesystem::path complaints = source.string() + ".log";
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, complaints.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_adddup2(&actions, STDOUT_FILENO, STDERR_FILENO);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setpgroup(&attributes, 0);  // a group of its own, so that all of it can be ended
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK);
  pid_t pid = -1;
  const int error =
      posix_spawn(&pid, words[0].c_str(), &actions, &attributes, pointers(words).data(), pointers(environment).data());
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) return concat("cannot start ", words[0], ": ", std::strerror(error));
  int status = 0;
  if (!wait_for(pid, deadline, status)) return concat(words[0], " took longer than ", deadline.count(), " ms");
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0 && std::filesystem::exists(result)) return {};
  std::ifstream file(complaints);
  std::string said(std::istreambuf_iterator<char>(file), {});
  said.resize(std::min(said.size(), kMostWords));
  return WIFSIGNALED(status) ? concat(words[0], " was ended by signal ", WTERMSIG(status), "; ", said)
                             : concat(words[0], " failed with status ", WEXITSTATUS(status), ": ", said);
}

}  // namespace chorale::codegen
