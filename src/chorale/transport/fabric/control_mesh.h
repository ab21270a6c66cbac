// What a fabric knows of its peers' lives, and what ranks tell each other beside the messages: one TLS connection to
// every rank of another host, and the thread that serves them. The data of messages is the business of the fabric that
// owns the mesh; a fabric over sockets lets the mesh's thread serve them, too (loop()).
//
// Note [How a peer ends]
// A peer that leaves says goodbye; one that is killed does not: its kernel closes the connection. Its last messages may
// arrive after either, by other connections: so its end is announced when the owner has read those (`drained`), or
// after a moment. A host that cannot be reached closes nothing: it acknowledges nothing any more. (TCP_USER_TIMEOUT
// would also end the connection with a peer that is stopped and does not read, so the kernel is asked.)
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "chorale/transport/event_count.h"
#include "chorale/transport/fabric/fabric.h"
#include "chorale/transport/io_loop.h"
#include "chorale/transport/tls/tls_stream.h"

namespace chorale::transport {

// Every function may be called by any thread, if it does not say otherwise.
class ControlMesh {
 public:
  // Called in the mesh's thread.
  class Owner {
   public:
    // Whether nothing of this peer is on its way any more. Asked when the peer has ended.
    virtual bool drained(int peer) = 0;
    // Called once for each peer that has gone, before life() shows it.
    virtual void on_gone(int peer, const Life& life) = 0;

   protected:
    ~Owner() = default;
  };

  // `streams` has the peers' ranks as keys. The owner must stay until leave() has returned.
  ControlMesh(std::map<int, TlsStream>&& streams, std::chrono::milliseconds keep_alive, Owner& owner);
  ~ControlMesh();

  void start();
  // Says goodbye to everybody, gives them a moment to hear it, and ends the thread. May be called once.
  void leave();

  // These do what the functions of Fabric do.
  void tell(std::span<const int> peers, std::string_view notice);
  void on_notice(std::function<void(int peer, std::string_view notice)> hear);
  void set_status(const std::array<uint64_t, 8>& status);
  Life life(int peer) const;
  EventCount& events() { return events_; }

  // The owner has noticed that a connection of the peer broke: if its control connection does not explain it
  // within the keep-alive, the peer is lost.
  void suspect(int peer, const std::string& why);
  // It has broken the protocol: lost at once.
  void lose(int peer, const std::string& why);

  IoLoop& loop() { return loop_; }

 private:
  class Peer;

  Peer& peer(int rank) const;
  void tick();
  void deliver(int rank, const std::string& notice);
  void deliver_early();
  void deliver_locked();

  const std::chrono::milliseconds keep_alive_;
  Owner& owner_;
  EventCount events_;
  IoLoop loop_;
  std::map<int, std::unique_ptr<Peer>> peers_;
  uint64_t ticks_ = 0;
  std::chrono::steady_clock::time_point last_tick_;
  // How long this thread has watched its peers. Only time that it had itself counts: on a busy machine it runs late,
  // after a signal or a debugger very late, and must not blame others for what it could not hear meanwhile.
  std::chrono::steady_clock::duration watched_{};

  std::mutex hearing_;  // held while somebody listens
  std::function<void(int, std::string_view)> hear_;
  std::vector<std::pair<int, std::string>> early_;  // came before anybody listened

  std::mutex status_mutex_;
  std::array<uint64_t, 8> status_{};
};

}  // namespace chorale::transport
