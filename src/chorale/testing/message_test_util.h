// What a call says when it fails.
#pragma once

#include <string>

#include "chorale/base/error.h"

namespace chorale {

// The message of the Kind that `call` throws; empty if it throws nothing.
template <class Kind = InvalidArgument, class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Kind& error) {
    return error.what();
  }
  return "";
}

}  // namespace chorale
