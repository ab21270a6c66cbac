#include "chorale/transport/store/meeting.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <sstream>
#include <utility>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/base/log.h"
#include "chorale/transport/host_identity.h"
#include "chorale/transport/security/secret.h"
#include "chorale/transport/shm/peer_process.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;

constexpr std::string_view kComplete = "complete";
constexpr auto kFirstLook = 50ms, kLongestLook = 1000ms;
constexpr auto kFirstWord = 4s;

std::string new_token() {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  const Digest random = random_bytes();
  for (const char byte : view(random).substr(0, 16)) {
    text += kDigits[static_cast<unsigned char>(byte) >> 4];
    text += kDigits[static_cast<unsigned char>(byte) & 15];
  }
  return text;
}

// Processes of different PID namespaces cannot look at each other.
std::string process_space() {
  struct stat space {};
  return concat(host_identity(), "/", stat("/proc/self/ns/pid", &space) == 0 ? space.st_ino : 0);
}

// One line, then what the rank wants to tell.
struct Seat {
  shm::ProcessId process;
  std::string nonce;  // two threads of a process are two
  std::string space, host;
  std::string tell;

  std::string text() const {
    return concat(process.pid, " ", process.start_time, " ", nonce, " ", space, " ", host, "\n", tell);
  }
  static Seat parse(const std::string& text, std::string_view where) {
    const size_t end = text.find('\n');
    std::istringstream words(text.substr(0, end));
    Seat seat;
    words >> seat.process.pid >> seat.process.start_time >> seat.nonce >> seat.space >> seat.host;
    if (!words || end == std::string::npos)
      throw CommError(
          concat("[meeting] what a rank has left at ", where, " is not ours; does it run another version?"));
    seat.tell = text.substr(end + 1);
    return seat;
  }
  std::string who() const { return concat("process ", process.pid, " on ", host); }
};

// What the first comer writes.
struct Opening {
  int64_t number = 0;
  std::string token;
  int size = 0;
  std::string run;  // may be empty

  std::string text() const { return concat(number, " ", token, " ", size, " ", run); }
  static Opening parse(const std::string& text, std::string_view where) {
    std::istringstream words(text);
    Opening opening;
    words >> opening.number >> opening.token >> opening.size;
    if (!words) throw CommError(concat("[meeting] what a rank has left at ", where, " is not ours: '", text, "'"));
    std::getline(words >> std::ws, opening.run);
    return opening;
  }
};

std::string list_of(const std::vector<int>& ranks) {
  constexpr size_t kMost = 16;
  std::string text;
  for (size_t i = 0; i < ranks.size() && i < kMost; ++i) text += concat(i == 0 ? "" : ", ", ranks[i]);
  return ranks.size() > kMost ? concat(text, " and ", ranks.size() - kMost, " more") : text;
}

std::string seconds_text(Deadline::Clock::duration time) {
  return concat(std::chrono::round<std::chrono::seconds>(time).count(), " s");
}

class Attendance {
 public:
  Attendance(Store& store, const MeetingPlan& plan, std::string_view tell, Deadline deadline)
      : store_(store), plan_(plan), deadline_(deadline), space_(process_space()) {
    own_ = {shm::this_process(), new_token(), space_, host_name(), std::string(tell)};
  }

  Meeting attend() {
    while (true) {
      enter();
      if (!take_seat()) continue;
      const std::string outcome = await_outcome();
      if (outcome == kComplete) return complete();
      // The outcome may be that of a meeting that was over when this rank sat down.
      if (!counts_me(outcome)) continue;
      throw CommError(concat("[rendezvous] rank ", plan_.rank, " of ", plan_.size, " at ", plan_.where, ": ",
                             outcome.substr(outcome.find('\n') + 1)),
                      {plan_.rank, culprit_of(outcome), "rendezvous", -1});
    }
  }

 private:
  std::string key(std::string_view entry) const { return concat(plan_.name, "/", opening_.token, "/", entry); }
  std::string record_key() const { return concat(plan_.name, "/meeting"); }
  std::string seat_key(int rank) const { return key(concat("seat/", rank)); }
  // The time of calls that wait for nobody: a rank whose time is over still has to say so.
  Deadline call_time() const { return Deadline(std::max(deadline_.end(), within(5s).end())); }

  // Finds the open meeting, or opens one.
  void enter() {
    const std::string record = record_key();
    opening_ = {0, new_token(), plan_.size, plan_.run};
    std::string found = store_.compare_set(record, "", opening_.text(), call_time());
    while (true) {
      opening_ = Opening::parse(found, plan_.where);
      seats_.clear();
      if (!store_.contains(key("outcome"), call_time())) return;
      const Opening next{opening_.number + 1, new_token(), plan_.size, plan_.run};
      found = store_.compare_set(record, found, next.text(), call_time());
    }
  }

  // False: this meeting is over, look for the next.
  bool take_seat() {
    look_at_seats();
    if (const int gone = ended_seat(); gone >= 0) return abandon_stale(gone);
    // Before anybody has sat down it is nobody's.
    if ((opening_.size != plan_.size || !fits(opening_.run)) && seats_.empty()) return abandon_stale(-1);
    CHORALE_CHECK(fits(opening_.run), "[rendezvous] the ranks at ", plan_.where, " belong to another job: its run is '",
                  opening_.run, "' (", seats_.begin()->second.who(), "), this one's is '", plan_.run,
                  "'; choose another place (MASTER_PORT)");
    CHORALE_CHECK(opening_.size == plan_.size, "[rendezvous] this rank (", plan_.rank, ") expects a world of ",
                  plan_.size, " ranks, another one of ", opening_.size, " (", seats_.begin()->second.who(), ")");
    store_.add(key("arrived"), 1, call_time());  // before the seat, so that a rank that counts none sees none
    const std::string mine = own_.text();
    const std::string found = store_.compare_set(seat_key(plan_.rank), "", mine, call_time());
    if (found == mine) {
      seats_[plan_.rank] = own_;
      if (store_.add(key("seats"), 1, call_time()) == plan_.size)
        store_.compare_set(key("outcome"), "", kComplete, call_time());
      return true;
    }
    const Seat other = Seat::parse(found, plan_.where);
    if (has_ended(other)) return abandon_stale(plan_.rank);
    if (store_.contains(key("outcome"), call_time())) return false;
    throw InvalidArgument(concat("[rendezvous] rank ", plan_.rank, " is there already at ", plan_.where, " (",
                                 other.who(),
                                 "); is a job still running there, or is something left of one that was "
                                 "killed on another host?"));
  }

  bool fits(const std::string& run) const { return run.empty() || plan_.run.empty() || run == plan_.run; }

  bool has_ended(const Seat& seat) const { return seat.space == space_ && !shm::is_running(seat.process); }
  int ended_seat() const {
    const auto ended = std::find_if(seats_.begin(), seats_.end(), [&](const auto& s) { return has_ended(s.second); });
    return ended == seats_.end() ? -1 : ended->first;
  }

  void look_at_seats() {
    if (store_.add(key("arrived"), 0, call_time()) == 0) return;
    for (int rank = 0; rank < plan_.size; ++rank) {
      if (seats_.contains(rank) || !store_.contains(seat_key(rank), call_time())) continue;
      seats_[rank] = Seat::parse(store_.get(seat_key(rank), call_time()), plan_.where);
    }
  }
  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int rank = 0; rank < plan_.size; ++rank) {
      if (!seats_.contains(rank)) ranks.push_back(rank);
    }
    return ranks;
  }

  // An outcome is the word, the culprit, and the ranks that were there when it was written; then the reason.
  std::string abandon(int culprit, const std::string& why) {
    std::string text = concat("abandoned ", culprit, " :");
    for (const auto& [rank, seat] : seats_) text += concat(" ", rank, "=", seat.nonce);
    return store_.compare_set(key("outcome"), "", concat(text, "\n", why), call_time());
  }
  bool abandon_stale(int gone) {
    const auto seat = seats_.find(gone);
    abandon(gone, seat == seats_.end()
                      ? std::string("it was opened for another number of ranks, or by another job")
                      : concat("rank ", gone, " (", seat->second.who(), ") ended before all had come"));
    return false;
  }
  bool counts_me(const std::string& outcome) const {
    return outcome.substr(0, outcome.find('\n')).find(concat(" ", plan_.rank, "=", own_.nonce)) != std::string::npos;
  }
  static int culprit_of(const std::string& outcome) {
    int culprit = -1;
    std::istringstream(outcome.substr(std::min(outcome.size(), outcome.find(' ')))) >> culprit;
    return culprit;
  }

  // A look costs the store something: they get rarer.
  std::string await_outcome() {
    const auto start = Deadline::Clock::now();
    Deadline::Clock::duration next_word = kFirstWord, pause = kFirstLook;
    while (true) {
      if (const auto outcome = outcome_within(deadline_.earlier(within(pause)))) return *outcome;
      pause = std::min<Deadline::Clock::duration>(pause * 2, kLongestLook);
      look_at_seats();
      if (const int gone = ended_seat(); gone >= 0) {
        return abandon(gone, concat("rank ", gone, " (", seats_[gone].who(), ") ended before all had come"));
      }
      const auto waited = Deadline::Clock::now() - start;
      const std::string whom = list_of(missing());
      if (deadline_.passed()) {
        return abandon(missing().empty() ? -1 : missing().front(),
                       concat("waited ", seconds_text(waited), " for rank ", whom, " of ", plan_.size,
                              " in vain (rank ", plan_.rank, " gave up first)"));
      }
      if (waited < next_word) continue;
      next_word *= 4;
      log_info(concat("[rendezvous] rank ", plan_.rank, " of ", plan_.size, " waits at ", plan_.where, " for rank ",
                      whom, ", ", seconds_text(waited), " so far; it gives up ", seconds_text(deadline_.end() - start),
                      " after it came"));
    }
  }

  std::optional<std::string> outcome_within(Deadline deadline) {
    const std::string outcome = key("outcome");
    try {
      return store_.get(outcome, deadline);
    } catch (const StoreLost&) {
      throw;
    } catch (const CommError&) {  // its time is over, or the store is in trouble: then this throws
      if (!store_.contains(outcome, call_time())) return std::nullopt;
    }
    return store_.get(outcome, call_time());
  }

  Meeting complete() {
    Meeting meeting{opening_.token, record_key(), opening_.text(), {}};
    meeting.told.reserve(static_cast<size_t>(plan_.size));
    for (int rank = 0; rank < plan_.size; ++rank) {
      const auto known = seats_.find(rank);
      meeting.told.push_back(known != seats_.end()
                                 ? std::move(known->second.tell)
                                 : Seat::parse(store_.get(seat_key(rank), call_time()), plan_.where).tell);
    }
    return meeting;
  }

  Store& store_;
  const MeetingPlan& plan_;
  const Deadline deadline_;
  const std::string space_;
  Seat own_;
  Opening opening_;
  std::map<int, Seat> seats_;  // that are known
};

}  // namespace

Meeting meet(Store& store, const MeetingPlan& plan, std::string_view tell, Deadline deadline) {
  return Attendance(store, plan, tell, deadline).attend();
}

std::string meeting_key(const MeetingPlan& plan, const Meeting& meeting, std::string_view entry) {
  return concat(plan.name, "/", meeting.token, "/", entry);
}

}  // namespace chorale::transport
