#include "chorale/base/stacks.h"

#include <dirent.h>
#include <execinfo.h>
#include <semaphore.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <mutex>
#include <sstream>
#include <vector>

#define BACKWARD_HAS_DW 1
#include <backward.hpp>

namespace chorale {
namespace {

// A thread can only unwind itself, so each one in turn is sent kSignal and its handler writes the addresses of its
// frames into `capture`. The handler allocates nothing (the thread may have been interrupted inside malloc): names and
// lines are looked up by the caller afterwards.
constexpr int kSignal = SIGURG;  // ignored by default, so a late delivery harms nobody
constexpr int kMaxFrames = 96;
struct Capture {
  std::array<void*, kMaxFrames> frames;
  int count;
  sem_t done;
} capture;
// The thread that is asked, 0 for none. The thread that sets it back to 0 owns `capture`: the one that was
// asked, or the caller that withdraws the question.
std::atomic<pid_t> asked_thread{0};

pid_t current_thread() { return static_cast<pid_t>(syscall(SYS_gettid)); }

void on_signal(int) {
  const int saved_errno = errno;
  pid_t self = current_thread();
  if (asked_thread.compare_exchange_strong(self, 0)) {
    capture.count = backtrace(capture.frames.data(), kMaxFrames);
    sem_post(&capture.done);
  }
  errno = saved_errno;
}

std::vector<pid_t> thread_ids() {
  std::vector<pid_t> ids;
  if (DIR* folder = opendir("/proc/self/task")) {
    while (const dirent* entry = readdir(folder)) {
      if (const int id = std::atoi(entry->d_name); id > 0) ids.push_back(id);
    }
    closedir(folder);
  }
  return ids;
}

std::string thread_name(pid_t id) {
  std::ifstream file("/proc/self/task/" + std::to_string(id) + "/comm");
  std::string name;
  std::getline(file, name);
  return name;
}

// Fills `capture` with the frames of a thread; false if it did not answer.
bool capture_thread(pid_t id) {
  asked_thread = id;
  bool answered = false;
  if (syscall(SYS_tgkill, getpid(), id, kSignal) == 0) {
    timespec until{};
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 1;
    do {
      answered = sem_timedwait(&capture.done, &until) == 0;
    } while (!answered && errno == EINTR);
  }
  if (!answered && asked_thread.exchange(0) != id) {
    sem_wait(&capture.done);  // it began to answer just now
    answered = true;
  }
  return answered;
}

// Our own files as they are named in the repository; the compiler was started in build/PRESET.
std::string short_name(const std::string& file) {
  const size_t ours = file.rfind("src/chorale/");
  return ours == std::string::npos ? file : file.substr(ours);
}

bool is_of_caller(const std::string& file) {
  if (file.empty() || file.starts_with("/usr/")) return false;
  return !short_name(file).starts_with("src/chorale/") || file.ends_with("_test.cc");
}

void print_call(std::ostream& out, const std::string& function, const std::string& file, size_t line) {
  out << "  " << (function.empty() ? "?" : function) << "  at ";
  out << short_name(file);
  if (line != 0) out << ':' << line;
  out << '\n';
}

void print_frames(std::ostream& out, backward::TraceResolver& resolver) {
  // The handler and the trampoline that called it are of no interest.
  for (size_t i = 2; i < static_cast<size_t>(capture.count); ++i) {
    // A frame's address is where the call returns to; one byte earlier is inside the call.
    void* inside_call = static_cast<char*>(capture.frames[i]) - 1;
    const backward::ResolvedTrace frame = resolver.resolve(backward::ResolvedTrace(backward::Trace(inside_call, i)));
    // `source` is the innermost position; an inliner names an inlined function and the position it was called from.
    std::string file = frame.source.filename;
    size_t line = frame.source.line;
    for (const auto& inlined : frame.inliners) {
      print_call(out, inlined.function, file, line);
      file = inlined.filename;
      line = inlined.line;
    }
    const std::string& function = frame.object_function.empty() ? frame.source.function : frame.object_function;
    print_call(out, function, file.empty() ? frame.object_filename : file, line);
  }
}

}  // namespace

std::string stacks_of_all_threads() {
  static std::mutex turn;
  const std::lock_guard lock(turn);

  // The first call of backtrace() loads a library, which a signal handler must not do.
  void* unused[1];
  backtrace(unused, 1);
  struct sigaction action {};
  struct sigaction previous {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigaction(kSignal, &action, &previous);

  sem_init(&capture.done, 0, 0);

  std::ostringstream text;
  backward::TraceResolver resolver;
  for (const pid_t id : thread_ids()) {
    text << "thread " << id << " (" << thread_name(id) << ')';
    if (capture_thread(id)) {
      text << ":\n";
      print_frames(text, resolver);
    } else {
      text << " did not answer; it blocks signals, has ended, or is stopped\n";
    }
  }
  sem_destroy(&capture.done);
  sigaction(kSignal, &previous, nullptr);
  return std::move(text).str();
}

// Libraries of the system, whose lines nobody wants to be told.
static bool is_of_system(const std::string& object) {
  const std::string name = object.substr(object.rfind('/') + 1);
  return name.starts_with("libc.so") || name.starts_with("libc-") || name.starts_with("libstdc++") ||
         name.starts_with("ld-");
}

std::string line_of_caller() {
  std::string function;  // the innermost one that is not of this library
  std::array<void*, kMaxFrames> frames{};
  const int count = backtrace(frames.data(), kMaxFrames);
  backward::TraceResolver resolver;
  for (int i = 1; i < count; ++i) {
    void* inside_call = static_cast<char*>(frames[static_cast<size_t>(i)]) - 1;
    const backward::ResolvedTrace frame =
        resolver.resolve(backward::ResolvedTrace(backward::Trace(inside_call, static_cast<size_t>(i))));
    if (is_of_system(frame.object_filename)) continue;
    const bool is_own = frame.object_function.starts_with("chorale::") ||
                        frame.object_function.starts_with("void chorale::") ||
                        frame.object_filename.find("libchorale") != std::string::npos;
    if (function.empty() && !is_own) function = frame.object_function;
    if (is_of_caller(frame.source.filename)) {
      return short_name(frame.source.filename) + ":" + std::to_string(frame.source.line);
    }
    for (const auto& inlined : frame.inliners) {
      if (is_of_caller(inlined.filename)) return short_name(inlined.filename) + ":" + std::to_string(inlined.line);
    }
  }
  return function;
}

}  // namespace chorale
