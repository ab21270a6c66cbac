// Inside comm: this rank's end of what connects the hosts of a job, shared by all its groups that span hosts.
//
// Groups tell their members some things out of turn, whatever those wait for: that the group has failed, that a rank
// has left, and, when they are asked, where they are. Such a notice may overtake messages that were sent before it;
// therefore its number is that of the first call that its sender did not finish (net_group.h); of kAnswer and
// kException, that of the last one that it entered.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "chorale/comm/notice.h"
#include "chorale/transport/fabric/fabric.h"

namespace chorale::comm {

// Hears the notices of one group, in the fabric's thread.
class NetListener {
 public:
  virtual void hear(int from, const Notice& notice) = 0;

 protected:
  ~NetListener() = default;
};

class NetHub {
 public:
  explicit NetHub(std::unique_ptr<transport::Fabric> fabric);

  transport::Fabric& fabric() const { return *fabric_; }

  // `listener` hears the group's notices from here to delist(), which waits for one that is being heard. Those that
  // came before are heard at once.
  void enlist(uint64_t group, NetListener& listener);
  void delist(uint64_t group);

  void tell(std::span<const int> peers, uint64_t group, const Notice& notice) const;

  // The last call that this rank has entered, for peers that ask where it is.
  void note_call(uint64_t group, uint32_t number, const Fingerprint& print) const;
  // The call that a peer has noted so; 0 when its last call was in another group.
  static uint32_t last_call(const transport::Life& life, uint64_t group, Fingerprint& print);

 private:
  void hear(int from, std::string_view bytes);

  std::mutex mutex_;
  std::map<uint64_t, NetListener*> listeners_;
  // Notices for groups that are not there yet, or not any more; the oldest are forgotten.
  struct Unheard {
    int from;
    uint64_t group;
    Notice notice;
  };
  std::vector<Unheard> unheard_;
  // Last: it hears until it is gone.
  std::unique_ptr<transport::Fabric> fabric_;
};

}  // namespace chorale::comm
