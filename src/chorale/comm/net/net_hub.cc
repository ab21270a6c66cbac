#include "chorale/comm/net/net_hub.h"

#include <algorithm>
#include <cstring>

#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

constexpr size_t kMostUnheard = 256;
constexpr size_t kMostText = 2048;

// As it travels, followed by the text.
struct Head {
  NetNotice::Kind kind;
  int32_t culprit;
  uint64_t group, number;
};
static_assert(sizeof(Head) == 24 && std::is_trivially_copyable_v<Head>);

}  // namespace

NetHub::NetHub(std::unique_ptr<transport::Fabric> fabric) : fabric_(std::move(fabric)) {
  fabric_->on_notice([this](int from, std::string_view bytes) { hear(from, bytes); });
}

void NetHub::enlist(uint64_t group, NetListener& listener) {
  const std::lock_guard lock(mutex_);
  listeners_[group] = &listener;
  const auto ours = std::stable_partition(unheard_.begin(), unheard_.end(),
                                          [&](const auto& entry) { return entry.second.group != group; });
  for (auto at = ours; at != unheard_.end(); ++at) listener.hear(at->first, at->second);
  unheard_.erase(ours, unheard_.end());
}

void NetHub::delist(uint64_t group) {
  const std::lock_guard lock(mutex_);
  listeners_.erase(group);
}

void NetHub::tell(std::span<const int> peers, const NetNotice& notice) const {
  if (peers.empty()) return;
  const Head head{notice.kind, notice.culprit, notice.group, notice.number};
  std::string bytes(reinterpret_cast<const char*>(&head), sizeof(head));
  bytes += std::string_view(notice.text).substr(0, kMostText);
  fabric_->tell(peers, bytes);
}

void NetHub::hear(int from, std::string_view bytes) {
  Head head;
  if (bytes.size() < sizeof(head)) return;
  std::memcpy(&head, bytes.data(), sizeof(head));
  if (head.kind > NetNotice::Kind::kException) return;
  NetNotice notice{head.kind, head.culprit, head.group, head.number, std::string(bytes.substr(sizeof(head)))};
  {
    const std::lock_guard lock(mutex_);
    const auto found = listeners_.find(notice.group);
    if (found != listeners_.end()) {
      found->second->hear(from, notice);
    } else if (notice.kind == NetNotice::Kind::kWhereAreYou) {
      tell({&from, 1}, {NetNotice::Kind::kHere, -1, notice.group, 0, std::string()});
    } else if (notice.kind != NetNotice::Kind::kHere) {
      if (unheard_.size() >= kMostUnheard) unheard_.erase(unheard_.begin());
      unheard_.emplace_back(from, std::move(notice));
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
