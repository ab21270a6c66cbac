// What we need of UCX, without its types: a module (base/shared_object.h) has the other side. Messages between workers
// are matched by tags.
//
// One thread at a time calls a worker. An error of UCX's is a std::runtime_error with its text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace chorale::transport {

class UcxWorker {
 public:
  using Request = void*;  // null: nothing is in flight
  enum class Status : uint8_t { kPending, kDone, kFailed };

  UcxWorker() = default;
  virtual ~UcxWorker() = default;
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  // The address that the others connect to.
  virtual std::string address() = 0;
  virtual void connect(int peer, std::string_view address) = 0;
  // Done when all that was sent to the peer has gone, which it may prevent.
  virtual Request flush(int peer) = 0;
  // Cuts the connection at once and without a word: what is in flight with this peer fails. The request is to be tested
  // until it is done.
  virtual Request disconnect(int peer) = 0;

  // One message of two parts.
  virtual Request send(int peer, uint64_t tag, std::span<const std::byte> head, std::span<const std::byte> body) = 0;
  virtual Request receive(uint64_t tag, std::span<std::byte> into) = 0;
  // A message that has arrived, taken from the queue; receive_found() must follow.
  struct Found {
    void* message = nullptr;
    uint64_t tag = 0;
    size_t bytes = 0;
  };
  virtual std::optional<Found> find(uint64_t tag, uint64_t mask) = 0;
  virtual Request receive_found(const Found& found, std::span<std::byte> into) = 0;

  // When it is not pending any more, the request is gone.
  virtual Status test(Request& request) = 0;
  // It is still to be tested: it may end as if nothing had been asked.
  virtual void cancel(Request request) = 0;

  // True when something has moved.
  virtual bool progress() = 0;
  // Becomes readable when there is something to do, after arm() has returned true; false: there is already.
  virtual int descriptor() = 0;
  virtual bool arm() = 0;
  // Peers whose connection has broken since the last time, and how.
  virtual std::vector<std::pair<int, std::string>> take_broken() = 0;
};

class Ucx {
 public:
  // The module's. Throws StateError without it.
  static Ucx& get();

  Ucx() = default;
  virtual ~Ucx() = default;
  Ucx(const Ucx&) = delete;
  Ucx& operator=(const Ucx&) = delete;

  // Uses the devices of UCX_NET_DEVICES if `device` is empty. Never goes through shared memory (UCX_TLS, if it is set,
  // says which transports instead): its peers are other hosts, even if UCX thinks otherwise.
  virtual std::unique_ptr<UcxWorker> make_worker(const std::string& device) = 0;
};

}  // namespace chorale::transport
