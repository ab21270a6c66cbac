// Inside comm: what ranks of a group tell each other out of turn, whatever they wait for. (On one host it is read in
// their segment instead: transport/shm/group_segment.h.)
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "chorale/comm/fingerprint.h"

namespace chorale::comm {

struct Notice {
  enum class Kind : uint32_t {
    kEntered,    // the call that the sender is in
    kLeft,       // the group
    kThrew,      // and left because of that
    kFailed,     // the group has failed
    kException,  // the sender has thrown, or caught, what the text says
    kAsk,        // where are you?
    kAnswer,     // the call that the sender is in
  };
  Kind kind = Kind::kEntered;
  int32_t whom = -1;  // of a failure, the culprit (global rank); of an answer, the rank awaited (group rank)
  uint64_t number = 0;
  Fingerprint print = {};  // of the call with that number, where it is told
  std::string text = {};
};

// The notice as bytes; at most 2 KiB of the text travel.
std::string encode(const Notice& notice);
// Nothing for bytes that are no notice.
std::optional<Notice> decode_notice(std::string_view bytes);

}  // namespace chorale::comm
