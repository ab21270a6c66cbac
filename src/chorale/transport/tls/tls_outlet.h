// A connection on which this rank only writes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "chorale/transport/fabric/chaos.h"
#include "chorale/transport/fabric/frame.h"
#include "chorale/transport/io_loop.h"
#include "chorale/transport/tls/tls_stream.h"

namespace chorale::transport {

// Every function may be called by any thread.
class TlsOutlet final : public IoLoop::Handler {
 public:
  // Calls write() with the next frame of bulk; false when there is none.
  using Produce = std::function<bool(TlsOutlet&)>;
  using Broken = std::function<void(const std::string& why)>;
  TlsOutlet(TlsStream stream, IoLoop& loop, std::shared_ptr<Chaos> chaos, Produce produce, Broken broken);

  // Encrypts it, and sends what the socket takes now; the loop sends the rest. The memory is free when this returns. On
  // a broken connection it does nothing.
  void send(const Frame& frame, std::span<const std::byte> body = {});
  // Sends what produce() gives, as much as the socket takes; the loop goes on.
  void pump();
  // produce() calls it. The memory is free when this returns.
  void write(const Frame& frame, std::span<const std::byte> body);
  // Returns when nobody encrypts from a caller's memory that produce() has handed out before.
  void fence() const { const std::lock_guard lock(mutex_); }

  // Waits until all is sent.
  void flush(Deadline deadline);
  // No more will come.
  void end();
  void close();

  void on_ready(uint32_t events) override;

 private:
  template <class Action>
  void guarded(const Action& action);
  bool flush_now();
  void write_with_faults(Frame& frame, std::span<const std::byte> body);
  void watch_room(bool wanted);
  void produce_and_flush();

  mutable std::mutex mutex_;  // of all that follows
  TlsStream stream_;
  IoLoop& loop_;
  const std::shared_ptr<Chaos> chaos_;
  const Produce produce_;
  const Broken broken_;
  bool waits_for_room_ = false;
  bool is_closed_ = false;
  size_t most_bytes_ = SIZE_MAX;  // that leave with the next system call: a short write on purpose
};

}  // namespace chorale::transport
