#include "chorale/launch/guardian.h"

#include <spawn.h>
#include <sys/wait.h>

#include <charconv>
#include <csignal>
#include <set>

#include "chorale/base/config.h"
#include "chorale/base/log.h"
#include "chorale/launch/process.h"

namespace chorale::launch {

Guardian::Guardian(const std::string& program) {
  const std::vector<std::string> words{"chorale", "run", "--guardian", std::to_string(pipe_.reading.get())};
  const std::vector<std::string> variables = config::environment_with({});
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  // The descriptor is copied to its own number, which takes close-on-exec away in the child only.
  posix_spawn_file_actions_adddup2(&files, pipe_.reading.get(), pipe_.reading.get());
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSID);
  const int error = posix_spawn(&pid_, program.c_str(), &files, &attributes, pointers_to(words).data(),
                                pointers_to(variables).data());
  posix_spawn_file_actions_destroy(&files);
  posix_spawnattr_destroy(&attributes);
  CHORALE_CHECK_STATE(error == 0, "[launch] cannot start the guardian ", program, ": ", std::strerror(error));
  pipe_.reading.reset();
}

Guardian::~Guardian() {
  pipe_.writing.reset();
  waitpid(pid_, nullptr, 0);
}

void Guardian::watch(pid_t group) { tell('+', group); }
void Guardian::forget(pid_t group) { tell('-', group); }

void Guardian::tell(char what, pid_t group) {
  const std::string line = concat(what, group, "\n");
  // Shorter than PIPE_BUF: written whole.
  if (write(pipe_.writing.get(), line.data(), line.size()) != static_cast<ssize_t>(line.size())) {
    log_warning(concat("[launch] the guardian is gone (", std::strerror(errno),
                       "): ranks may be left behind if this process is killed"));
  }
}

int be_the_guardian(int descriptor) {
  for (const int number : {SIGINT, SIGTERM, SIGHUP, SIGQUIT}) signal(number, SIG_IGN);
  std::set<pid_t> groups;
  std::string text;
  char bytes[4096];
  while (true) {
    const ssize_t size = read(descriptor, bytes, sizeof bytes);
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) break;
    text.append(bytes, static_cast<size_t>(size));
    for (size_t end = text.find('\n'); end != std::string::npos; end = text.find('\n')) {
      pid_t group = 0;
      std::from_chars(text.data() + 1, text.data() + end, group);
      if (group > 1 && text[0] == '+') groups.insert(group);
      if (text[0] == '-') groups.erase(group);
      text.erase(0, end + 1);
    }
  }
  for (const pid_t group : groups) kill(-group, SIGKILL);
  return 0;
}

}  // namespace chorale::launch
