// Epochs of a job whose ranks may change: from one change to the next it has the same members. Launchers decide who is
// in the next one, ranks read it here. docs/dev/elastic.md has the whole protocol.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "chorale/transport/store/store.h"

namespace chorale::transport {

// The entries of a start of the job in the launcher's store.
std::string elastic_prefix(int restarts);
// Names of entries below it.
inline constexpr const char* kElasticDone = "done";  // all steps were, on every member
std::string ready_key(int member);                   // a process has prepared what it needs to take part
std::string joined_key(int member);                  // it has taken part, and has the state of the job
std::string epoch_key(int64_t number);
std::string epoch_prefix(int64_t number);  // of the entries of those who join an epoch, in its store
std::string report_key(int member);        // below that: how far a member has come

// A node of a job on several, whose launcher has a store of its own.
struct EpochNode {
  int number = 0;
  std::string place;  // of the store: HOST:PORT
  friend bool operator==(const EpochNode&, const EpochNode&) = default;
};

struct Epoch {
  int64_t number = 0;        // the first is 1
  std::vector<int> members;  // a process has one number for all its life; its place in this list is its rank
  std::string cause;         // of the change, for messages
  int64_t stated_ns = 0;     // when, by the steady clock of the launcher's host
  int founders = 0;          // members below this number are those of the first epoch
  // Ascending; the first one has the store in which ranks meet. Empty: a job on one node, which has one store.
  std::vector<EpochNode> nodes{};

  std::string text() const;
  // CommError for anything else.
  static Epoch parse(const std::string& text);
  // -1: not a member.
  int rank_of(int member) const;
  bool has_node(int node) const;
};

// A page that the launcher of a node shares with its ranks: reading it costs a load, so every step may.
class EpochBoard {
 public:
  static std::shared_ptr<EpochBoard> create();
  // What a launcher has handed on. InvalidArgument when the descriptor is something else.
  static std::shared_ptr<EpochBoard> attach(int descriptor);
  ~EpochBoard();
  EpochBoard(const EpochBoard&) = delete;
  EpochBoard& operator=(const EpochBoard&) = delete;

  int descriptor() const { return descriptor_; }
  // The number of the last epoch that was stated; 0: none. Its entry is in the store.
  int64_t latest() const { return page_->latest.load(std::memory_order_acquire); }
  void announce(int64_t number) { page_->latest.store(number, std::memory_order_release); }
  // A death is known, and the launcher waits for more ranks before it states the next epoch.
  bool is_waiting() const { return page_->waiting.load(std::memory_order_acquire) != 0; }
  void set_waiting(bool waiting) { page_->waiting.store(waiting ? 1 : 0, std::memory_order_release); }
  // The launcher ends the job, and states no epoch any more.
  bool is_stopping() const { return page_->stopping.load(std::memory_order_acquire) != 0; }
  void stop() { page_->stopping.store(1, std::memory_order_release); }

 private:
  struct Page {
    std::atomic<int64_t> latest, waiting, stopping;
  };
  explicit EpochBoard(int descriptor);

  int descriptor_;
  Page* page_;
};

// The epoch that was to be joined is over before it began.
class EpochOver : public StoreLost {
 public:
  using StoreLost::StoreLost;
};

// A view of a store for the ranks that join one epoch: calls that wait for other ranks end with EpochOver as soon as
// the board shows a later epoch, since a rank of this one may be gone. A store that does not answer for a while may be
// gone as well: then they look at the board, too.
class EpochStore final : public Store {
 public:
  EpochStore(std::shared_ptr<Store> store, std::shared_ptr<const EpochBoard> board, int64_t epoch);

  void set(std::string_view key, std::string_view value, Deadline deadline) override;
  std::string get(std::string_view key, Deadline deadline) override;
  void wait(std::span<const std::string> keys, Deadline deadline) override;
  bool contains(std::string_view key, Deadline deadline) override;
  int64_t add(std::string_view key, int64_t delta, Deadline deadline) override;
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline deadline) override;
  bool remove(std::string_view key, Deadline deadline) override;
  std::vector<std::string> keys(std::string_view prefix, Deadline deadline) override;
  int64_t count(Deadline deadline) override;

  // Asked in waits that do not go through this store.
  bool is_over() const { return board_->latest() > epoch_; }

 private:
  void check() const;
  template <class Call>
  auto answered(Deadline deadline, const Call& call) const;

  const std::shared_ptr<Store> store_;
  const std::shared_ptr<const EpochBoard> board_;
  const int64_t epoch_;
};

}  // namespace chorale::transport
