// What connects the ranks of a job that are on different hosts: messages between pairs of ranks, short notices, and
// news of the peers' lives. One Fabric per rank; all groups of the rank share it. tls is built in (folder
// tls/), ucx is a module.
//
// Note [Threads of a fabric]
// Each fabric has one thread of its own that receives, sends what did not go at once, and keeps peers informed that
// this rank lives, however busy its caller is. Every function here may be called by any thread.
//
// Note [Peers that are gone]
// A peer that has ended closes its connections: seen at once. A host that cannot be reached any more acknowledges
// nothing: seen after the keep-alive (CHORALE_KEEP_ALIVE, 10 s). A peer that was stopped (a signal, a debugger) is
// neither: its kernel still acknowledges. It is `silent`, and comm decides how long to wait for it (stop_watch.h).
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chorale/base/deadline.h"
#include "chorale/transport/security/secret.h"

namespace chorale::transport {

// Travels in front of every message, as it is. What the words mean is the caller's business (comm: which call of which
// group, and its fingerprint).
struct Envelope {
  std::array<uint64_t, 6> words{};
  friend bool operator==(const Envelope&, const Envelope&) = default;
};

class Chaos;

// A message on its way. Sent: done when its memory may be used again. Received: done when all of it is there.
class Transfer {
 public:
  enum class State : uint32_t { kPending, kDone, kFailed };

  State state() const { return state_.load(std::memory_order_acquire); }
  bool pending() const { return state() == State::kPending; }

  // These describe a message that was received.
  int source = -1;
  Envelope envelope;
  size_t bytes = 0;  // of the message; when they are not as many as were asked for, none were stored
  // What happened to the peer where the transfer failed, fit for an error message.
  std::string error;

 protected:
  std::atomic<State> state_{State::kPending};
};
using TransferHandle = std::shared_ptr<Transfer>;

struct Life {
  enum class State : uint8_t {
    kConnected,
    kSilent,  // connected, but nothing was heard for longer than it should be: stopped, or the network is slow
    kLeft,    // said goodbye
    kLost,    // the connection broke, or nothing is acknowledged any more
  };
  State state = State::kConnected;
  bool accuses = false;              // lost because it has dropped this rank, which sent it something damaged
  std::string text;                  // "connection reset", "silent for 3.2 s: stopped by a signal or a debugger?"
  std::string address;               // of its host
  std::array<uint64_t, 8> status{};  // the last that it told about itself
  bool gone() const { return state == State::kLeft || state == State::kLost; }
};

// Where a rank can be reached; travels through the store. Peers of the same `host` are not connected.
struct FabricAddress {
  uint64_t host = 0;
  std::string endpoint;  // of the control connections and of tls
  std::string data;      // what else the fabric wants to tell, such as the address of a UCX worker
};

struct FabricOptions {
  int rank = 0;
  std::optional<Secret> secret;  // tls refuses to start without
  std::chrono::milliseconds keep_alive{10'000};
  // A message that is given up halfway may still end by itself for so long, before the connection is cut. Only ucx has
  // to wait: Note [Both must not cut].
  std::chrono::milliseconds time_to_cancel{200};
  int streams = 2;               // per pair, for large messages
  bool checksum = false;         // of payloads, end to end
  std::string congestion;        // control of TCP; empty: Note [Congestion control]
  std::shared_ptr<Chaos> chaos;  // faults on purpose (transport/fabric/chaos.h); null: none
  // Asked while ranks connect: true ends that with a CommError, since one of them may be gone. Null: never.
  std::function<bool()> is_over = {};
};

class Fabric {
 public:
  static constexpr size_t kEagerBytes = 64 << 10;  // up to here a message is sent before anybody asks for it
  static constexpr int kAnySource = -1;

  virtual ~Fabric() = default;
  Fabric(const Fabric&) = delete;
  Fabric& operator=(const Fabric&) = delete;

  virtual const char* name() const = 0;

  // Peers are named by their rank in the job. Messages of one sender on one channel are received in the order in which
  // they were sent; channels are independent of each other. Data and destination must stay until the transfer is done.
  virtual TransferHandle send(int peer, uint64_t channel, const Envelope& envelope,
                              std::span<const std::byte> data) = 0;
  // Receives from one peer, or from whichever comes first.
  virtual TransferHandle receive(int peer, uint64_t channel, std::span<std::byte> into) = 0;
  // The message that a receive would get now, for a receiver that does not know what comes; it stays where it is.
  // Nothing when there is none: from then on a message that comes on this channel is an event.
  struct Found {
    int source = -1;
    Envelope envelope;
    size_t bytes = 0;
  };
  virtual std::optional<Found> find(int peer, uint64_t channel) = 0;
  // Afterwards the fabric does not touch the transfer's memory any more, and the transfer has failed. False when it had
  // ended already. A receive that had not begun leaves the message for another; one that had begun loses it. The
  // receive of a message that its sender cancels halfway fails.
  virtual bool cancel(const TransferHandle& transfer) = 0;
  // Cancels a receive that has not begun: its message is there for another, and none is lost. False when it has begun.
  virtual bool withdraw(const TransferHandle& transfer) = 0;

  // A short message (at most 4 KiB) that is heard at once, whatever the receiver waits for: by the function that was
  // set with on_notice, in the fabric's thread.
  virtual void tell(std::span<const int> peers, std::string_view notice) = 0;
  virtual void on_notice(std::function<void(int peer, std::string_view notice)> hear) = 0;

  // What the peers' life() shows of this rank.
  virtual void set_status(const std::array<uint64_t, 8>& status) = 0;
  virtual Life life(int peer) const = 0;

  // A count of all that has happened: transfers that ended, lives that changed. Waits until it differs from `seen`, or
  // until the deadline.
  virtual uint32_t events() const = 0;
  virtual void await_event(uint32_t seen, Deadline deadline) = 0;
  // Counts one more, so that waiting threads look again.
  virtual void wake() = 0;

 protected:
  Fabric() = default;
};

// A fabric in two steps, because every rank must know where the others are before it can connect.
class FabricBuilder {
 public:
  virtual ~FabricBuilder() = default;
  // Listens, and says where. Its `host` is the caller's to fill in.
  virtual FabricAddress address() = 0;
  // Connects to every rank of another host (addresses by rank) and returns when all are connected.
  virtual std::unique_ptr<Fabric> connect(const std::vector<FabricAddress>& addresses, Deadline deadline) = 0;
};
// Goes over the network devices that UCX finds, or the one that is named; TLS at the address does authentication and
// tells who lives. `own_address` is that of the interface to listen at.
std::unique_ptr<FabricBuilder> make_ucx_fabric(const FabricOptions& options, const std::string& own_address,
                                               const std::string& device);
// Makes the fabric that the user has named. Throws InvalidArgument for one that does not connect hosts.
struct FabricName;
std::unique_ptr<FabricBuilder> make_fabric(const FabricName& name, const FabricOptions& options,
                                           const std::string& own_address);

}  // namespace chorale::transport
