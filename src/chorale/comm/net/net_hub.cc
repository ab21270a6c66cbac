#include "chorale/comm/net/net_hub.h"

#include <algorithm>
#include <cstring>

#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

constexpr size_t kMostUnheard = 256;
}  // namespace

NetHub::NetHub(std::unique_ptr<transport::Fabric> fabric) : fabric_(std::move(fabric)) {
  fabric_->on_notice([this](int from, std::string_view bytes) { hear(from, bytes); });
}

void NetHub::enlist(uint64_t group, NetListener& listener) {
  const std::lock_guard lock(mutex_);
  listeners_[group] = &listener;
  const auto ours = std::stable_partition(unheard_.begin(), unheard_.end(),
                                          [&](const Unheard& entry) { return entry.group != group; });
  for (auto at = ours; at != unheard_.end(); ++at) listener.hear(at->from, at->notice);
  unheard_.erase(ours, unheard_.end());
}

void NetHub::delist(uint64_t group) {
  const std::lock_guard lock(mutex_);
  listeners_.erase(group);
}

void NetHub::tell(std::span<const int> peers, uint64_t group, const Notice& notice) const {
  if (peers.empty()) return;
  const std::string bytes(reinterpret_cast<const char*>(&group), sizeof(group));
  fabric_->tell(peers, bytes + encode(notice));
}

void NetHub::hear(int from, std::string_view bytes) {
  uint64_t group = 0;
  if (bytes.size() < sizeof(group)) return;
  std::memcpy(&group, bytes.data(), sizeof(group));
  const auto notice = decode_notice(bytes.substr(sizeof(group)));
  if (!notice) return;
  {
    const std::lock_guard lock(mutex_);
    const auto found = listeners_.find(group);
    if (found != listeners_.end()) {
      found->second->hear(from, *notice);
    } else if (notice->kind == Notice::Kind::kAsk) {
      tell({&from, 1}, group, {.kind = Notice::Kind::kAnswer});
    } else if (notice->kind != Notice::Kind::kAnswer) {
      if (unheard_.size() >= kMostUnheard) unheard_.erase(unheard_.begin());
      unheard_.push_back({from, group, *notice});
    }
  }
  fabric_->wake();
}

void NetHub::note_call(uint64_t group, uint32_t number, const Fingerprint& print) const {
  std::array<uint64_t, 8> status{group, number};
  std::memcpy(&status[2], &print, sizeof(print));
  fabric_->set_status(status);
}

uint32_t NetHub::last_call(const transport::Life& life, uint64_t group, Fingerprint& print) {
  if (life.status[0] != group) return 0;
  std::memcpy(static_cast<void*>(&print), &life.status[2], sizeof(print));
  return static_cast<uint32_t>(life.status[1]);
}

}  // namespace chorale::comm
