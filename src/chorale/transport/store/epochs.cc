#include "chorale/transport/store/epochs.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <sstream>
#include <thread>

#include "chorale/base/error.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;

constexpr size_t kBoardBytes = 4096;
// The pause between two looks at the store is short at first, since most waits for other ranks are.
constexpr std::chrono::microseconds kShortestPause = 100us, kLongestPause = 4ms;
// The time of a call that waits for nobody. A node that is gone does not answer, and may be excluded before the call's
// time is over.
constexpr auto kStoreAnswers = 3s;
constexpr auto kStoreChanges = 10s;  // of one that cannot be repeated

}  // namespace

std::string elastic_prefix(int restarts) { return concat("elastic ", restarts); }
std::string ready_key(int member) { return concat("ready/", member); }
std::string joined_key(int member) { return concat("joined/", member); }
std::string epoch_key(int64_t number) { return concat("epoch/", number); }
std::string epoch_prefix(int64_t number) { return concat("in/", number); }
std::string report_key(int member) { return concat("report/", member); }

std::string Epoch::text() const {
  std::string list;
  for (const int member : members) list += concat(" ", member);
  list += concat(" ", nodes.size());
  for (const EpochNode& node : nodes) list += concat(" ", node.number, " ", node.place);
  return concat(number, " ", stated_ns, " ", founders, " ", members.size(), list, "\n", cause);
}

Epoch Epoch::parse(const std::string& text) {
  const size_t end = std::min(text.find('\n'), text.size());
  std::istringstream words(text.substr(0, end));
  Epoch epoch;
  size_t count = 0, nodes = 0;
  words >> epoch.number >> epoch.stated_ns >> epoch.founders >> count;
  for (int member = 0; epoch.members.size() < count && words >> member;) epoch.members.push_back(member);
  words >> nodes;
  for (EpochNode node; epoch.nodes.size() < nodes && words >> node.number >> node.place;) epoch.nodes.push_back(node);
  if (!words || epoch.members.size() != count || count == 0 || epoch.nodes.size() != nodes || end == text.size())
    throw CommError(concat("[elastic] the store has an epoch that is not ours: '", text, "'"));
  epoch.cause = text.substr(end + 1);
  return epoch;
}

int Epoch::rank_of(int member) const {
  const auto found = std::find(members.begin(), members.end(), member);
  return found == members.end() ? -1 : static_cast<int>(found - members.begin());
}

bool Epoch::has_node(int node) const {
  return std::any_of(nodes.begin(), nodes.end(), [&](const EpochNode& other) { return other.number == node; });
}

// ---- the board

std::shared_ptr<EpochBoard> EpochBoard::create() {
  // The descriptor lies above the standard ones, of which a daemon may have closed some.
  const int low = memfd_create("chorale-epochs", MFD_CLOEXEC);
  const int file = low < 0 ? low : fcntl(low, F_DUPFD_CLOEXEC, 3);
  const int problem = errno;
  if (low >= 0) close(low);
  CHORALE_CHECK_STATE(file >= 0 && ftruncate(file, kBoardBytes) == 0,
                      "[elastic] no page for epochs: ", std::strerror(problem));
  return std::shared_ptr<EpochBoard>(new EpochBoard(file));
}

std::shared_ptr<EpochBoard> EpochBoard::attach(int descriptor) {
  struct stat status {};
  CHORALE_CHECK(fstat(descriptor, &status) == 0 && status.st_size == kBoardBytes, "[elastic] descriptor ", descriptor,
                " is not the page of a launcher; CHORALE_ELASTIC_FD is set by chorale run --elastic");
  return std::shared_ptr<EpochBoard>(new EpochBoard(fcntl(descriptor, F_DUPFD_CLOEXEC, 3)));
}

EpochBoard::EpochBoard(int descriptor) : descriptor_(descriptor) {
  static_assert(std::atomic<int64_t>::is_always_lock_free);
  void* page =
      descriptor < 0 ? MAP_FAILED : mmap(nullptr, kBoardBytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (page == MAP_FAILED) {
    const std::string problem = std::strerror(errno);
    if (descriptor >= 0) close(descriptor);
    throw StateError(concat("[elastic] the launcher's page cannot be mapped: ", problem));
  }
  page_ = static_cast<Page*>(page);
}

EpochBoard::~EpochBoard() {
  munmap(page_, kBoardBytes);
  close(descriptor_);
}

// ---- the view

EpochStore::EpochStore(std::shared_ptr<Store> store, std::shared_ptr<const EpochBoard> board, int64_t epoch)
    : store_(std::move(store)), board_(std::move(board)), epoch_(epoch) {}

void EpochStore::check() const {
  if (is_over())
    throw EpochOver(concat("[elastic] epoch ", epoch_, " is over: epoch ", board_->latest(), " was stated"));
}

// The answer of a call that changes nothing, or the same when it is repeated.
template <class Call>
auto EpochStore::answered(Deadline deadline, const Call& call) const {
  while (true) {
    check();
    const Deadline next_look = deadline.earlier(within(kStoreAnswers));
    try {
      return call(next_look);
    } catch (const CommError&) {
      check();
      if (deadline.passed() || !next_look.passed()) throw;
    }
  }
}

void EpochStore::wait(std::span<const std::string> keys, Deadline deadline) {
  auto pause = kShortestPause;
  for (const std::string& key : keys) {
    while (true) {
      if (contains(key, deadline)) break;
      if (deadline.passed()) throw CommError(concat("[elastic] nobody has set '", key, "' in time, in epoch ", epoch_));
      std::this_thread::sleep_for(std::min<Deadline::Clock::duration>(pause, deadline.left()));
      pause = std::min(pause * 2, kLongestPause);
    }
  }
}

std::string EpochStore::get(std::string_view key, Deadline deadline) {
  const std::string name(key);
  wait({&name, 1}, deadline);
  return answered(deadline, [&](Deadline soon) { return store_->get(key, soon); });
}

void EpochStore::set(std::string_view key, std::string_view value, Deadline deadline) {
  answered(deadline, [&](Deadline soon) { store_->set(key, value, soon); });
}
bool EpochStore::contains(std::string_view key, Deadline deadline) {
  return answered(deadline, [&](Deadline soon) { return store_->contains(key, soon); });
}
int64_t EpochStore::add(std::string_view key, int64_t delta, Deadline deadline) {
  check();
  return store_->add(key, delta, deadline.earlier(within(kStoreChanges)));
}
std::string EpochStore::compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                                    Deadline deadline) {
  check();
  return store_->compare_set(key, expected, desired, deadline.earlier(within(kStoreChanges)));
}
bool EpochStore::remove(std::string_view key, Deadline deadline) {
  check();
  return store_->remove(key, deadline);
}
std::vector<std::string> EpochStore::keys(std::string_view prefix, Deadline deadline) {
  check();
  return store_->keys(prefix, deadline);
}
int64_t EpochStore::count(Deadline deadline) {
  check();
  return store_->count(deadline);
}

}  // namespace chorale::transport
