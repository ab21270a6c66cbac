// The fourth kind of error: a peer or a wire failed.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "chorale/base/error.h"

namespace chorale {

// What is known about a failed communication; -1 and empty mean unknown or not of that kind.
struct CommFailure {
  int rank = -1;                 // the rank that reports
  int peer = -1;                 // the culprit
  std::string collective;        // "all_reduce"
  int64_t sequence_number = -1;  // of the call within its group
};

class CommError : public Error {
 public:
  explicit CommError(const std::string& message, CommFailure failure = {})
      : Error(message), failure_(std::move(failure)) {}
  const CommFailure& failure() const noexcept { return failure_; }

 private:
  CommFailure failure_;
};

}  // namespace chorale
