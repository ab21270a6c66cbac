#include "chorale/launch/output.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <condition_variable>
#include <mutex>
#include <thread>

#include "chorale/base/error.h"
#include "chorale/launch/descriptor.h"

namespace chorale::launch {

// The thread may stay in a write for ever, so it has its share of this.
struct Output::State {
  explicit State(int number) : descriptor(number), bell(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

  void run();
  // 0, or the error.
  int write_all(std::string_view bytes);

  const int descriptor;
  const Descriptor bell;
  std::mutex mutex;
  std::condition_variable changed;
  std::string text;       // not yet taken by the thread
  size_t bytes_left = 0;  // with what it has taken
  int error = 0;
  bool ending = false;
};

int Output::State::write_all(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t size = ::write(descriptor, bytes.data(), bytes.size());
    if (size < 0 && errno == EAGAIN) {  // somebody has made it non-blocking
      pollfd room{descriptor, POLLOUT, 0};
      poll(&room, 1, -1);
    } else if (size < 0 && errno != EINTR) {
      return errno;
    } else if (size > 0) {
      bytes.remove_prefix(static_cast<size_t>(size));
      const std::lock_guard lock(mutex);
      bytes_left -= static_cast<size_t>(size);
    }
  }
  return 0;
}

void Output::State::run() {
  std::string part;
  std::unique_lock lock(mutex);
  while (error == 0) {
    changed.wait(lock, [&] { return ending || !text.empty(); });
    if (ending) return;
    part.clear();
    part.swap(text);
    lock.unlock();
    const int problem = write_all(part);
    lock.lock();
    error = problem;
    eventfd_write(bell.get(), 1);
  }
}

Output::Output(int descriptor) : state_(std::make_shared<State>(descriptor)) {
  std::thread([state = state_] { state->run(); }).detach();
}

Output::~Output() {
  const std::lock_guard lock(state_->mutex);
  state_->ending = true;
  state_->changed.notify_one();
}

void Output::write(std::string_view text) {
  const std::lock_guard lock(state_->mutex);
  if (state_->error != 0) return;
  state_->text += text;
  state_->bytes_left += text.size();
  state_->changed.notify_one();
}

bool Output::has_room() const {
  const std::lock_guard lock(state_->mutex);
  return state_->error != 0 || state_->bytes_left < kMostBytes;
}

bool Output::is_drained() const {
  const std::lock_guard lock(state_->mutex);
  return state_->error != 0 || state_->bytes_left == 0;
}

bool Output::has_lost_its_reader() const {
  const std::lock_guard lock(state_->mutex);
  return state_->error == EPIPE;
}

std::string Output::problem() const {
  const std::lock_guard lock(state_->mutex);
  return state_->error == 0 || state_->error == EPIPE ? "" : std::strerror(state_->error);
}

int Output::wake_up() const { return state_->bell.get(); }

void Output::woken() const {
  eventfd_t count = 0;
  eventfd_read(state_->bell.get(), &count);
}

}  // namespace chorale::launch
