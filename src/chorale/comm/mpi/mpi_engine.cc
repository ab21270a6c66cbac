#include "chorale/comm/mpi/mpi_engine.h"

#include <sched.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <iostream>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/base/host.h"
#include "chorale/comm/flight_file.h"
#include "chorale/vec/combine.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;
using transport::Mpi;

// MPI cannot wake a sleeping thread: so waits yield for longer, and sleep for short.
constexpr int64_t kYields = 20000;
constexpr Deadline::Clock::duration kSleep = 200us;
// After this long, or a quarter of the time that a call has, a rank tells the others what it waits in.
constexpr Deadline::Clock::duration kTellAfter = 50ms;
// Ranks that wait answer within this time, also where many share a core.
constexpr Deadline::Clock::duration kAnswerPatience = 200ms;

void combine_two(Reduce op, DType dtype, const void* in, void* in_out, int64_t elems) {
  const void* sources[] = {in, in_out};
  void* destinations[] = {in_out};
  vec::combine(op, dtype, sources, destinations, elems);
}

// The job is called by the number that mpirun has given it, in letters that a folder's name may have.
void name_job_of_mpi() {
  std::string job = config::env("PMIX_NAMESPACE").value_or("");
  std::erase_if(job, [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); });
  if (!job.empty()) name_job("mpi" + job);
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
  name_job_of_mpi();
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
    // The handle does not lie on the stack: MPI writes there, also after the deadline.
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
      call_(group_, roll_call_),
      messages_(group_),
      peers_(static_cast<size_t>(whose.size())) {
  patience_.yields = kYields;
  enlist();
}

std::shared_ptr<Engine> MpiEngine::make_subgroup(const Membership& wanted) {
  std::vector<int> ranks;
  for (int member : wanted.members) ranks.push_back(membership().find(member));
  Mpi::Comm comm = 0;
  {
    const std::lock_guard lock(context().mutex);
    comm = group_.mpi.subgroup(group_.comm, ranks);
  }
  return std::make_shared<MpiEngine>(shared_context(), wanted, group_.mpi, comm);
}

// The communicator is not freed: a notice that is still on its way to it would end up in the next one with its number.
MpiEngine::~MpiEngine() {
  std::unique_lock lock(context().mutex);
  drain(lock);
  call_.abandon();
  end_the_rest();
  try {
    if (!said_goodbye_) tell(is_thrown_away() ? Notice::Kind::kThrew : Notice::Kind::kLeft, completed_print_);
    for (const Deadline patience = within(100ms); !outgoing_.empty() && !patience.passed();) send_on();
  } catch (const std::exception& error) {
    std::cerr << concat("[group] the others could not be told that this rank leaves: ", error.what(), "\n");
  }
  delist();
}

bool MpiEngine::step(const base::Intrusive<Operation>& operation, bool is_new) {
  if (is_new) call_.begin(operation, piece_bytes_);
  if (!call_.step()) return false;
  completed_print_ = operation->print;
  for (Peer& peer : peers_) {
    if (static_cast<int32_t>(operation->number - peer.number) < 0) continue;
    peer.number = operation->number;
    peer.print = operation->print;
  }
  return true;
}

// ---- notices

void MpiEngine::tell(Notice::Kind kind, const Fingerprint& print, int whom, const std::string& text) {
  const uint32_t number = kind == Notice::Kind::kEntered ? told_ : finished();
  auto& [bytes, requests] = outgoing_.emplace_back();
  bytes = encode({kind, whom, number, print, text});
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

bool MpiEngine::read_notices() {
  if (!outgoing_.empty()) send_on();
  bool asked = false;
  while (const auto found = group_.mpi.find(group_.comm, Mpi::kAnySource, kNoticeTag)) {
    std::string bytes(found->bytes, '\0');
    auto request = group_.mpi.receive_found(*found, bytes.data());
    while (!group_.mpi.test(request)) {
    }
    const auto notice = decode_notice(bytes);
    CHORALE_INVARIANT(notice, "rank ", group_.global(found->source), " sent ", bytes.size(),
                      " bytes that are no notice");
    Peer& peer = peers_[static_cast<size_t>(found->source)];
    const auto number = static_cast<uint32_t>(notice->number);
    switch (notice->kind) {
      case Notice::Kind::kFailed:
        if (is_broken()) break;
        failure_ = {group_.global(found->source), notice->whom, notice->text};
        has_failure_.store(true, std::memory_order_release);
        break;
      case Notice::Kind::kAsk:
        asked = true;
        break;
      case Notice::Kind::kAnswer:
        peer.answered = true;
        peer.awaits = notice->whom;
        break;
      case Notice::Kind::kException:
        peer.thrown = notice->text;
        peer.thrown_after = number;
        break;
      case Notice::Kind::kEntered:
      case Notice::Kind::kLeft:
      case Notice::Kind::kThrew:
        peer.state = notice->kind;
        // A rank that leaves may have completed a call that this rank is still in, and then shows how it made that one.
        if (notice->kind == Notice::Kind::kEntered && static_cast<int32_t>(number - peer.number) <= 0) break;
        peer.number = number;
        peer.print = notice->print;
        break;
    }
  }
  return asked;
}

void MpiEngine::hear(const Operation& operation) {
  const bool asked = read_notices();
  // What has just been heard of may be about a later call, or this one may be done by now.
  progress();
  if (!operation.pending() || is_broken()) return;
  if (asked) {
    const std::vector<int> missing = awaited(operation);
    tell(Notice::Kind::kAnswer, operation.print, missing.size() == 1 ? missing.front() : -1);
  }
  if (first_call() && told_ != (*first_call())->number) {
    const Operation& first = **first_call();
    if (Clock::now() - first.issued > std::min<Clock::duration>(kTellAfter, first.timeout / 4)) {
      told_ = first.number;
      tell(Notice::Kind::kEntered, first.print);
    }
  }
  compare_with_heard(operation);
}

// ---- waiting

void MpiEngine::sleep(std::unique_lock<std::mutex>& lock, const Operation&, Clock::duration at_most) {
  lock.unlock();
  std::this_thread::sleep_for(std::min(kSleep, at_most));
  lock.lock();
}

std::optional<CallFailed> MpiEngine::gone(int rank) const {
  const Notice::Kind state = peers_[static_cast<size_t>(rank)].state;
  if (state != Notice::Kind::kLeft && state != Notice::Kind::kThrew) return std::nullopt;
  return CallFailed{concat("rank ", group_.global(rank),
                           state == Notice::Kind::kThrew ? " left the group because of an exception; it "
                                                         : " has left the group; it ",
                           where_is(rank)),
                    group_.global(rank)};
}

void MpiEngine::say_goodbye() {
  said_goodbye_ = true;
  tell(Notice::Kind::kLeft, completed_print_);
}

Leaver::Does MpiEngine::after_goodbye(int rank) {
  read_notices();
  const Peer& peer = peers_[static_cast<size_t>(rank)];
  if (static_cast<int32_t>(peer.number - last_number()) > 0) return Does::kCalled;
  if (peer.state == Notice::Kind::kThrew) return Does::kThrew;
  return peer.state == Notice::Kind::kLeft ? Does::kLeft : Does::kStays;
}

// Calls that move data are compared when everybody has entered. A monitored barrier is entered in another way, so that
// a rank in one never sees the records of the rest: the notices tell.
void MpiEngine::compare_with_heard(const Operation& operation) {
  if (!first_call() || first_call()->get() != &operation) return;
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
  // A rank that has not been heard of yet may show which call is the odd one.
  const auto now = Clock::now();
  if (std::exchange(differs_in_, operation.number) != operation.number) differs_since_ = now;
  if (all || now - differs_since_ > kAnswerPatience) raise_difference(membership(), prints);
}

std::vector<int> MpiEngine::awaited_by_call(const Operation& first) const {
  std::vector<int> ranks;
  for (int peer = 0; peer < group_.size(); ++peer) {
    if (peer == group_.rank()) continue;
    if (static_cast<int32_t>(peers_[static_cast<size_t>(peer)].number - first.number) < 0) ranks.push_back(peer);
  }
  return ranks;
}

std::optional<int> MpiEngine::find_culprit(const Operation&, const std::vector<int>& missing) {
  const auto now = Clock::now();
  if (!asked_) {
    asked_ = now;
    for (Peer& peer : peers_) peer.answered = false;
    tell(Notice::Kind::kAsk);
  }
  const int holding_up = who_holds_up(missing);
  if (holding_up >= 0 && !peers_[static_cast<size_t>(holding_up)].answered && now - *asked_ < kAnswerPatience)
    return std::nullopt;
  return holding_up;
}

// Note [Finding the culprit], over MPI: an awaited rank may itself wait for a third. Waiting ranks answer which one; a
// rank that computes, or is stopped, does not. So from rank to rank up to the first that does not answer; where all
// wait for each other, it is the one that this rank waits for.
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

std::string MpiEngine::who_is(int rank) const { return concat("rank ", group_.global(rank), " ", where_is(rank)); }

std::string MpiEngine::where_is(int rank) const {
  const Peer& peer = peers_[static_cast<size_t>(rank)];
  const bool since = static_cast<int32_t>(peer.thrown_after - peer.number) >= 0;
  return where_and_thrown(
      peer.number == 0 ? std::string() : concat(describe(membership(), peer.print), " #", peer.number),
      since ? peer.thrown : std::string());
}

void MpiEngine::note_exception(const std::string& what) {
  try {
    if (!is_broken()) tell(Notice::Kind::kException, {}, -1, what);
  } catch (const std::exception&) {  // then the others do without it: what is being thrown here must not be replaced
  }
}

void MpiEngine::record_failure(const Operation& operation, const std::string& reason, int culprit) {
  if (is_broken()) return;
  failure_ = {group_.global(group_.rank()), culprit, reason};
  has_failure_.store(true, std::memory_order_release);
  try {
    tell(Notice::Kind::kFailed, operation.print, culprit, reason);
  } catch (const std::exception&) {  // then the others see it at their deadlines
  }
}

}  // namespace chorale::comm
