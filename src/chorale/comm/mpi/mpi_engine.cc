#include "chorale/comm/mpi/mpi_engine.h"

#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <iostream>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/base/host.h"
#include "chorale/vec/combine.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;
using transport::Mpi;

// Waiting, by the number of rounds without progress: as for shm, but MPI cannot wake who sleeps.
constexpr int64_t kSpins = 2000, kYields = 20000;
constexpr Deadline::Clock::duration kSleep = 200us;
constexpr Deadline::Clock::duration kLookInterval = 5ms;
constexpr Deadline::Clock::duration kFirstWord = 5s;
// After this long, or a quarter of the time that a call has, a rank tells the others what it waits in.
constexpr Deadline::Clock::duration kTellAfter = 50ms;
// Ranks that wait answer within this time, also where many share a core.
constexpr Deadline::Clock::duration kAnswerPatience = 200ms;

void combine_two(Reduce op, DType dtype, const void* in, void* in_out, int64_t elems) {
  const void* sources[] = {in, in_out};
  void* destinations[] = {in_out};
  vec::combine(op, dtype, sources, destinations, elems);
}

// One per process, as MPI is: its lock is what serialises calls of MPI.
std::shared_ptr<RankContext> context_of_process() {
  static std::mutex mutex;
  static std::weak_ptr<RankContext> known;
  const std::lock_guard lock(mutex);
  auto context = known.lock();
  if (!context) {
    context = std::make_shared<RankContext>();
    const auto local = config::env("OMPI_COMM_WORLD_LOCAL_SIZE");
    context->core_each = !local || std::atoi(local->c_str()) <= machine_cores();
    known = context;
  }
  return context;
}

}  // namespace

std::shared_ptr<MpiEngine> MpiEngine::connect(const std::string& name, int rank, int size, Deadline deadline) {
  CHORALE_CHECK_STATE(Mpi::started_by_mpi(), "[mpi] groups over MPI need ranks that mpirun has started: mpirun -n ",
                      size, " PROGRAM, with CHORALE_FABRIC=mpi");
  auto context = context_of_process();
  Membership membership{name, rank, {}};
  for (int r = 0; r < size; ++r) membership.members.push_back(r);
  Mpi& mpi = Mpi::get();
  Mpi::Comm comm = 0;
  {
    const std::lock_guard lock(context->mutex);
    mpi.set_combine(combine_two);
    CHORALE_CHECK_STATE(mpi.rank(mpi.world()) == rank && mpi.size(mpi.world()) == size, "[mpi] this is rank ", rank,
                        " of ", size, ", but for MPI it is rank ", mpi.rank(mpi.world()), " of ", mpi.size(mpi.world()),
                        ": an mpi group has all ranks that mpirun started, in its order");
    // Not on the stack: MPI writes there, also after the deadline.
    auto* made = new Mpi::Comm(0);
    auto request = mpi.duplicate(mpi.world(), *made);
    while (!mpi.test(request)) {
      if (deadline.passed())
        throw CommError(concat("[new_group] not all ", size, " ranks came to group ", name),
                        {rank, -1, "new_group", -1});
      sched_yield();
    }
    comm = *made;
    delete made;
  }
  return std::make_shared<MpiEngine>(std::move(context), membership, mpi, comm);
}

MpiEngine::MpiEngine(std::shared_ptr<RankContext> whose_context, const Membership& whose, Mpi& mpi, Mpi::Comm comm)
    : Engine(std::move(whose_context), whose),
      group_{mpi, comm, membership()},
      call_(group_),
      messages_(group_),
      peers_(static_cast<size_t>(whose.size())),
      exceptions_at_birth_(std::uncaught_exceptions()) {
  enlist();
}

std::shared_ptr<Engine> MpiEngine::make_subgroup(const Membership& wanted) {
  std::vector<int> ranks;
  for (int member : wanted.members) {
    const auto& all = membership().members;
    ranks.push_back(static_cast<int>(std::lower_bound(all.begin(), all.end(), member) - all.begin()));
  }
  Mpi::Comm comm = 0;
  {
    const std::lock_guard lock(context().mutex);
    comm = group_.mpi.subgroup(group_.comm, ranks);
  }
  return std::make_shared<MpiEngine>(shared_context(), wanted, group_.mpi, comm);
}

// The communicator is not freed: a notice that is still on its way to it would end up in the next one with its number.
MpiEngine::~MpiEngine() {
  const bool threw = std::uncaught_exceptions() > exceptions_at_birth_;
  std::unique_lock lock(context().mutex);
  // Work that was started and dropped is still owed to the others.
  for (int64_t rounds = 0; !threw && !broken_ && !idle(); ++rounds) {
    progress();
    const auto rest = calls_.empty() ? messages_.pending() : calls_.front();
    if (rest) wait_a_little(lock, *rest, rounds, Deadline::never());
  }
  if (!idle()) end_all(std::make_exception_ptr(StateError("[group] the group was destroyed before the work was done")));
  try {
    tell(threw ? News::kThrew : News::kLeft, completed_print_);
    for (const Deadline patience = within(100ms); !outgoing_.empty() && !patience.passed();) send_on();
  } catch (const std::exception& error) {
    std::cerr << concat("[group] the others could not be told that this rank leaves: ", error.what(), "\n");
  }
  delist();
}

void MpiEngine::submit(const Intrusive<Operation>& operation) {
  if (!broken_ && heard_) fail_as_heard(*operation);
  if (broken_) [[unlikely]]
    std::rethrow_exception(broken_);
  const bool message = operation->kind == CallKind::kSend || operation->kind == CallKind::kRecv;
  if (!message) operation->number = ++number_;
  operation->flight = flight_.enter(*operation);
  if (message) {
    guarded(*operation, [&] { messages_.submit(operation); });
  } else {
    calls_.push_back(operation);
  }
  progress();
}

template <class F>
void MpiEngine::guarded(Operation& operation, const F& run) {
  try {
    run();
  } catch (const GroupFailed&) {
    fail_as_heard(operation);
  } catch (const CallFailed& failure) {
    fail(operation, failure.reason, failure.culprit);
  } catch (const std::exception& error) {
    fail(operation, error.what(), group_.global(group_.rank()));
  }
}

void MpiEngine::progress() {
  while (!calls_.empty()) {
    const Intrusive<Operation> operation = calls_.front();
    bool done = false;
    guarded(*operation, [&] {
      if (operation->phase == Operation::Phase::kQueued) call_.begin(operation, piece_bytes_);
      done = call_.step();
    });
    if (!done || broken_) break;
    calls_.pop_front();
    completed_ = operation->number;
    completed_print_ = operation->print;
    for (Peer& peer : peers_) {
      if (static_cast<int32_t>(operation->number - peer.number) < 0) continue;
      peer.number = operation->number;
      peer.print = operation->print;
    }
    finish(*operation, nullptr);
  }
  if (!messages_.idle()) {
    const Intrusive<Operation> any = messages_.pending();
    guarded(*any, [&] { messages_.progress(done_); });
    for (const auto& operation : done_) finish(*operation, nullptr);
    done_.clear();
  }
}

void MpiEngine::finish(Operation& operation, const std::exception_ptr& error) {
  flight_.leave(operation.flight, error != nullptr);
  complete(operation, error);
}

// ---- notices

void MpiEngine::tell(News news, const Fingerprint& print, int whom, const std::string& text) {
  const Notice notice{news, news == News::kEntered ? told_ : completed_, print, whom,
                      static_cast<uint32_t>(text.size())};
  auto& [bytes, requests] = outgoing_.emplace_back();
  bytes.resize(sizeof(notice) + text.size());
  std::memcpy(bytes.data(), &notice, sizeof(notice));
  if (!text.empty()) std::memcpy(bytes.data() + sizeof(notice), text.data(), text.size());
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer != group_.rank())
      requests.push_back(group_.mpi.send(group_.comm, peer, kNoticeTag, bytes.data(), bytes.size()));
  }
  send_on();
}

void MpiEngine::send_on() {
  std::erase_if(outgoing_, [&](auto& one) {
    std::erase_if(one.second, [&](Mpi::Request& request) { return group_.mpi.test(request); });
    return one.second.empty();
  });
}

void MpiEngine::hear(const Operation& operation) {
  if (!outgoing_.empty()) send_on();
  bool asked = false;
  while (const auto found = group_.mpi.find(group_.comm, Mpi::kAnySource, kNoticeTag)) {
    std::vector<char> bytes(found->bytes);
    auto request = group_.mpi.receive_found(*found, bytes.data());
    while (!group_.mpi.test(request)) {
    }
    Notice notice;
    CHORALE_INVARIANT(bytes.size() >= sizeof(notice), "a notice of ", bytes.size(), " bytes");
    std::memcpy(&notice, bytes.data(), sizeof(notice));
    Peer& peer = peers_[static_cast<size_t>(found->source)];
    if (notice.news == News::kFailed) {
      if (!heard_) {
        heard_ = CallFailed{concat("rank ", group_.global(found->source),
                                   " says: ", std::string(bytes.begin() + sizeof(notice), bytes.end())),
                            notice.whom};
      }
      continue;
    }
    if (notice.news == News::kAsks) {
      asked = true;
      continue;
    }
    if (notice.news == News::kAnswers) {
      peer.answered = true;
      peer.awaits = notice.whom;
      continue;
    }
    if (notice.news == News::kException) {
      peer.thrown.assign(bytes.begin() + sizeof(notice), bytes.end());
      peer.thrown_after = notice.number;
      continue;
    }
    peer.state = notice.news;
    // Who leaves may have completed a call that this rank is still in, and then shows how it made that one.
    if (notice.news != News::kEntered || static_cast<int32_t>(notice.number - peer.number) > 0) {
      peer.number = notice.number;
      peer.print = notice.print;
    }
  }
  if (!asked) return;
  const std::vector<int> missing = awaited(operation);
  tell(News::kAnswers, operation.print, missing.size() == 1 ? missing.front() : -1);
}

// ---- waiting

void MpiEngine::wait_a_little(std::unique_lock<std::mutex>& lock, Operation& operation, int64_t rounds,
                              Deadline deadline) {
  if (rounds == 0) {
    next_look_ = {};
    word_interval_ = kFirstWord;
  }
  const int64_t spins = context().core_each ? kSpins : 1;
  if (rounds < spins) {
    _mm_pause();
    return;
  }
  if (rounds == spins) {
    next_look_ = Clock::now() + kLookInterval;
    next_word_ = operation.issued + word_interval_;
  }
  lock.unlock();  // another thread of this rank may want to start something
  if (rounds < spins + kYields) {
    sched_yield();
  } else {
    std::this_thread::sleep_for(kSleep);
  }
  lock.lock();
  if (!operation.pending()) return;
  const auto now = Clock::now();
  const bool late = deadline.earlier(operation.deadline).end() <= now;
  if (!late && now < next_look_) return;
  next_look_ = now + kLookInterval;
  guarded(operation, [&] {
    look_around(operation, deadline);
    if (operation.pending() && now >= next_word_) say_who_is_awaited(operation, awaited(operation));
  });
}

void MpiEngine::look(Operation& operation) {
  guarded(operation, [&] { look_around(operation, Deadline::never()); });
}

void MpiEngine::look_around(Operation& operation, Deadline deadline) {
  hear(operation);
  // What has just been heard of may be about a later call, or this one may be done by now.
  progress();
  if (!operation.pending()) return;
  if (heard_) throw GroupFailed{};
  if (!calls_.empty() && told_ != calls_.front()->number) {
    const Operation& first = *calls_.front();
    if (Clock::now() - first.issued > std::min<Clock::duration>(kTellAfter, first.timeout / 4)) {
      told_ = first.number;
      tell(News::kEntered, first.print);
    }
  }
  compare_with_heard(operation);
  const std::vector<int> missing = awaited(operation);
  for (int rank : missing) {
    const Peer& peer = peers_[static_cast<size_t>(rank)];
    if (peer.state != News::kLeft && peer.state != News::kThrew) continue;
    throw CallFailed{
        concat("rank ", group_.global(rank),
               peer.state == News::kThrew ? " left the group because of an exception; it " : " has left the group; it ",
               where_is(rank)),
        group_.global(rank)};
  }
  look_at_deadline(operation, deadline, missing);
}

// Calls that move data are compared when everybody has entered. A monitored barrier is entered in another way, so that
// who is in one never sees the records of the rest: the notices tell.
void MpiEngine::compare_with_heard(const Operation& operation) {
  if (calls_.empty() || calls_.front().get() != &operation) return;
  std::vector<Fingerprint> prints(peers_.size(), operation.print);
  bool differ = false, all = true;
  for (size_t r = 0; r < peers_.size(); ++r) {
    const auto ahead = static_cast<int32_t>(peers_[r].number - operation.number);
    if (static_cast<int>(r) == group_.rank() || ahead > 0) continue;
    prints[r] = ahead == 0 ? peers_[r].print : Fingerprint{};
    all = all && ahead == 0;
    differ = differ || (ahead == 0 && !(prints[r] == operation.print));
  }
  if (!differ) return;
  // Who has not been heard of yet may show who is the odd one out.
  const auto now = Clock::now();
  if (std::exchange(differs_in_, operation.number) != operation.number) differs_since_ = now;
  if (all || now - differs_since_ > kAnswerPatience) raise_difference(membership(), prints);
}

std::vector<int> MpiEngine::awaited(const Operation& operation) const {
  std::vector<int> ranks;
  if (operation.kind == CallKind::kSend || operation.kind == CallKind::kRecv) {
    if (operation.peer >= 0) return {operation.peer};
    for (int peer = 0; peer < group_.size(); ++peer) {
      if (peer != group_.rank()) ranks.push_back(peer);
    }
    return ranks;
  }
  // A call that is not at the head waits for whoever the head waits for.
  const Operation& first = calls_.empty() ? operation : *calls_.front();
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank()) continue;
    if (static_cast<int32_t>(peers_[static_cast<size_t>(peer)].number - first.number) < 0) ranks.push_back(peer);
  }
  return ranks;
}

void MpiEngine::look_at_deadline(Operation& operation, Deadline deadline, const std::vector<int>& missing) {
  if (!deadline.earlier(operation.deadline).passed()) return;
  if (operation.kind == CallKind::kMonitoredBarrier && group_.rank() == 0 && !calls_.empty() &&
      calls_.front().get() == &operation) {
    return note_absence(membership(), operation);
  }
  const auto now = Clock::now();
  if (!asked_) {
    asked_ = now;
    for (Peer& peer : peers_) peer.answered = false;
    tell(News::kAsks);
  }
  const int holding_up = who_holds_up(missing);
  if (holding_up >= 0 && !peers_[static_cast<size_t>(holding_up)].answered && now - *asked_ < kAnswerPatience) return;
  const std::string time = in_seconds(now - operation.issued);
  if (holding_up < 0) throw CallFailed{concat("timed out after ", time), -1};
  const int culprit = group_.global(holding_up);
  throw CallFailed{
      concat("timed out: nothing from rank ", culprit, " for ", time, "; rank ", culprit, " ", where_is(holding_up)),
      culprit};
}

// Note [Who is to blame], over MPI: whom I wait for may itself wait for a third. Ranks that wait answer for whom; one
// that computes, or is stopped, does not. So from rank to rank up to the first that does not answer; where all wait for
// each other, it is the one that this rank waits for.
int MpiEngine::who_holds_up(const std::vector<int>& missing) const {
  const auto silent = [&](int rank) { return rank != group_.rank() && !peers_[static_cast<size_t>(rank)].answered; };
  if (const auto one = std::find_if(missing.begin(), missing.end(), silent); one != missing.end()) return *one;
  const int first = missing.empty() ? -1 : missing.front();
  int rank = first;
  for (int step = 0; step < group_.size() && rank >= 0; ++step) {
    if (silent(rank)) return rank;
    rank = rank == group_.rank() ? first : peers_[static_cast<size_t>(rank)].awaits;
  }
  for (int other = 0; rank < 0 && other < group_.size(); ++other) {
    if (silent(other)) return other;
  }
  return first;
}

void MpiEngine::say_who_is_awaited(const Operation& operation, const std::vector<int>& missing) {
  word_interval_ *= 2;
  next_word_ = operation.issued + word_interval_;
  if (missing.empty()) return;
  std::string who;
  for (int peer : missing) who += concat(who.empty() ? "" : "; ", "rank ", group_.global(peer), " ", where_is(peer));
  // One write, so that lines of several ranks stay whole.
  std::cerr << concat(prefix_of(membership(), operation), "waiting since ", in_seconds(Clock::now() - operation.issued),
                      " for ", who, "\n")
            << std::flush;
}

std::string MpiEngine::where_is(int rank) const {
  const Peer& peer = peers_[static_cast<size_t>(rank)];
  const bool since = static_cast<int32_t>(peer.thrown_after - peer.number) >= 0;
  return where_and_thrown(
      peer.number == 0 ? std::string() : concat(describe(membership(), peer.print), " #", peer.number),
      since ? peer.thrown : std::string());
}

void MpiEngine::note_exception(const std::string& what) {
  try {
    if (!broken_) tell(News::kException, {}, -1, what);
  } catch (const std::exception&) {  // then the others do without it: what is being thrown here must not be replaced
  }
}

// ---- failing

void MpiEngine::fail(const Operation& operation, const std::string& reason, int culprit) {
  try {
    if (!heard_) tell(News::kFailed, operation.print, culprit, reason);
  } catch (const std::exception&) {  // then the others see it at their deadlines
  }
  end_all(error_of(membership(), operation, reason, culprit, flight_));
}

void MpiEngine::fail_as_heard(const Operation& operation) {
  fail(operation, reason_of_a_broken_group(membership(), operation, heard_->reason), heard_->culprit);
}

void MpiEngine::end_all(const std::exception_ptr& error) {
  broken_ = error;
  is_broken_.store(true, std::memory_order_release);
  call_.abandon();
  for (const auto& operation : std::exchange(calls_, {})) finish(*operation, error);
  for (const auto& operation : messages_.abandon()) finish(*operation, error);
}

}  // namespace chorale::comm
