// Small messages go before anybody asks for them, so the receiver must keep them. How much it keeps for one sender is
// bounded: the sender spends credit, and gets it back as the receiver's caller takes the messages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/transport/fabric/frame.h"

namespace chorale::transport {

// The credit of one pair, in both directions. Throws InvalidArgument where no peer of ours would do what this one did.
class Credit {
 public:
  // Takes credit for a message to the peer; false when there is not enough.
  bool spend(size_t bytes) {
    if (cost_of(bytes) > left_) return false;
    left_ -= cost_of(bytes);
    return true;
  }
  // The peer has given back so much.
  void refund(uint64_t credit) {
    left_ += credit;
    CHORALE_CHECK(left_ <= kCreditBytes, "it gave more credit than there is");
  }

  // A message of the peer has come.
  void hold(size_t bytes) {
    held_ += cost_of(bytes);
    CHORALE_CHECK(held_ + owed_ <= kCreditBytes, "it sent more than it has credit for");
  }
  // A message of the peer was taken. Returns the credit to give back now; 0: none yet. It goes back in portions, since
  // a frame for each message would double their number.
  uint64_t release(size_t bytes) {
    held_ -= cost_of(bytes);
    owed_ += cost_of(bytes);
    return owed_ < kCreditBytes / 4 ? 0 : std::exchange(owed_, 0);
  }

 private:
  // Empty ones take memory, too.
  static uint64_t cost_of(size_t bytes) { return bytes + kFrameBytes; }

  uint64_t left_ = kCreditBytes;
  uint64_t held_ = 0;  // what the peer has spent on messages that are still here
  uint64_t owed_ = 0;  // what is to be given back to the peer
};

}  // namespace chorale::transport
