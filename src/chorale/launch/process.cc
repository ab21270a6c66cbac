#include "chorale/launch/process.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <csignal>
#include <string_view>

#include "chorale/base/config.h"

namespace chorale::launch {
namespace {

bool is_executable_file(const std::string& path) {
  struct stat state {};
  return stat(path.c_str(), &state) == 0 && S_ISREG(state.st_mode) && access(path.c_str(), X_OK) == 0;
}

// Everything the child needs, made before it is: between fork and exec only system calls are allowed, because another
// thread may have held any lock.
struct ChildPlan {
  const char* program;
  char* const* arguments;
  char* const* environment;
  const cpu_set_t* cpus;  // or null
  const std::vector<int>* inherited;
  pid_t launcher;
  int input, output, errors, go, failure;
};

[[noreturn]] void be_the_child(const ChildPlan& plan) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  char go = 0;
  // Without the launcher there is no go.
  if (getppid() != plan.launcher || read(plan.go, &go, 1) != 1) _exit(127);
  signal(SIGPIPE, SIG_DFL);
  // A rank is in the background of its terminal, and may write to it all the same (stty tostop).
  signal(SIGTTOU, SIG_IGN);
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  dup2(plan.input, 0);
  dup2(plan.output, 1);
  dup2(plan.errors, 2);
  for (const int descriptor : *plan.inherited) fcntl(descriptor, F_SETFD, 0);
  if (plan.cpus) sched_setaffinity(0, sizeof *plan.cpus, plan.cpus);
  execve(plan.program, plan.arguments, plan.environment);
  const int error = errno;
  if (write(plan.failure, &error, sizeof error) < 0) _exit(126);
  _exit(127);
}

}  // namespace

std::vector<char*> pointers_to(const std::vector<std::string>& words) {
  std::vector<char*> array;
  array.reserve(words.size() + 1);
  for (const std::string& word : words) array.push_back(const_cast<char*>(word.c_str()));
  array.push_back(nullptr);
  return array;
}

std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) {
    CHORALE_CHECK(access(name.c_str(), F_OK) == 0, "[launch] no program '", name, "': ", std::strerror(errno));
    CHORALE_CHECK(is_executable_file(name), "[launch] '", name, "' is not an executable file; chmod +x?");
    return name;
  }
  const std::string path = config::env("PATH").value_or("/usr/local/bin:/usr/bin:/bin");
  for (size_t begin = 0; begin <= path.size();) {
    const size_t end = std::min(path.find(':', begin), path.size());
    const std::string folder = path.substr(begin, end - begin);
    if (const std::string file = (folder.empty() ? "." : folder) + "/" + name; is_executable_file(file)) return file;
    begin = end + 1;
  }
  throw InvalidArgument(concat("[launch] no program '", name, "' in PATH; one in this folder is ./", name));
}

StartedProcess start_process(const ProcessPlan& plan, const std::function<void(pid_t)>& before_it_runs) {
  Pipe output, errors, go, failure;
  const Descriptor input(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const auto arguments = pointers_to(plan.arguments), environment = pointers_to(plan.environment);
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  for (const int cpu : plan.cpus) {
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &cpus);
  }
  const ChildPlan child{
      plan.program.c_str(), arguments.data(), environment.data(),   plan.cpus.empty() ? nullptr : &cpus,
      &plan.inherited,      getpid(),         input.get(),          output.writing.get(),
      errors.writing.get(), go.reading.get(), failure.writing.get()};
  const pid_t pid = fork();
  if (pid == 0) be_the_child(child);
  CHORALE_CHECK_STATE(pid > 0, "[launch] cannot start ", plan.program, ": ", std::strerror(errno),
                      errno == EAGAIN ? "; a limit on processes is reached (ulimit -u, or pids.max of a container). "
                                        "Raise it, or start fewer ranks (-n)"
                                      : "");
  setpgid(pid, pid);  // also here: it may be signalled before it runs
  failure.writing.reset();
  go.reading.reset();
  before_it_runs(pid);
  int error = 0;
  if (write(go.writing.get(), "g", 1) != 1 || read(failure.reading.get(), &error, sizeof error) > 0) {
    waitpid(pid, nullptr, 0);
    throw StateError(concat("[launch] cannot execute ", plan.program, ": ", std::strerror(error)));
  }
  return {pid, std::move(output.reading), std::move(errors.reading)};
}

}  // namespace chorale::launch
