// The signals that a launcher takes itself.
#pragma once

#include <pthread.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <csignal>
#include <vector>

#include "chorale/launch/descriptor.h"

namespace chorale::launch {

// The signals that the launcher reads from a descriptor. Threads that are made meanwhile inherit the mask, so that none
// of them is ended by a signal that was meant for us.
class Signals {
 public:
  // `gives_back`: SIGUSR1, with which a batch system asks for its node, is one of them.
  explicit Signals(bool gives_back = false) {
    sigemptyset(&stop_);
    if (gives_back) sigaddset(&stop_, SIGUSR1);
    // What was ignored at the start (nohup, trap '' INT) stays so, here and in the ranks.
    for (const int number : {SIGINT, SIGTERM, SIGHUP}) {
      struct sigaction now {};
      if (sigaction(number, nullptr, &now) != 0 || now.sa_handler != SIG_IGN) sigaddset(&stop_, number);
    }
    sigset_t all = stop_;
    sigaddset(&all, SIGCHLD);
    pthread_sigmask(SIG_BLOCK, &all, &before_);
    before_pipe_ = ::signal(SIGPIPE, SIG_IGN);
    // Where a shell has it ignored (trap '' CHLD), the kernel forgets children, and nobody hears how a rank ended.
    before_child_ = ::signal(SIGCHLD, SIG_DFL);
    // In the background of its terminal a launcher may print, as its ranks may (stty tostop).
    before_terminal_ = ::signal(SIGTTOU, SIG_IGN);
    // A limit on files is an error of a write, like a full disk. A handler, unlike SIG_IGN, is not handed on to ranks.
    before_size_ = ::signal(SIGXFSZ, [](int) {});
    if (before_size_ == SIG_IGN) ::signal(SIGXFSZ, SIG_IGN);
    reading_ = Descriptor(signalfd(-1, &all, SFD_CLOEXEC | SFD_NONBLOCK));
  }
  ~Signals() {
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    ::signal(SIGPIPE, before_pipe_);
    ::signal(SIGCHLD, before_child_);
    ::signal(SIGTTOU, before_terminal_);
    ::signal(SIGXFSZ, before_size_);
  }
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  int descriptor() const { return reading_.get(); }
  std::vector<int> take() const {
    std::vector<int> numbers;
    signalfd_siginfo info{};
    while (read(reading_.get(), &info, sizeof info) == sizeof info) numbers.push_back(static_cast<int>(info.ssi_signo));
    return numbers;
  }
  // While there are no ranks, a signal to stop simply ends the launcher.
  template <class Body>
  auto let_through(const Body& body) const {
    pthread_sigmask(SIG_UNBLOCK, &stop_, nullptr);
    struct Block {
      const sigset_t* set;
      ~Block() { pthread_sigmask(SIG_BLOCK, set, nullptr); }
    } const block{&stop_};
    return body();
  }

 private:
  sigset_t stop_, before_;
  sighandler_t before_pipe_, before_size_, before_child_, before_terminal_;
  Descriptor reading_;
};

}  // namespace chorale::launch
