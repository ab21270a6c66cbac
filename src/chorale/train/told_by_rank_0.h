// Work that one rank does for all, or all do together: where it fails, all ranks end.
#pragma once

#include <exception>

#include "chorale/base/error.h"
#include "chorale/comm/group.h"
#include "chorale/snapshot/snapshot.h"
#include "chorale/tensor/tensor.h"

namespace chorale::train {

// Another rank has failed and says why: this one need not.
class ToldByRank0 : public StateError {
 public:
  using StateError::StateError;
};

// Runs `work` on rank 0; if it throws there, all ranks throw.
template <class Work>
void on_rank_0(const comm::Group& group, const Work& work) {
  std::exception_ptr error;
  if (group.rank() == 0) {
    try {
      work();
    } catch (...) {
      error = std::current_exception();
    }
  }
  const Tensor failed = Tensor::scalar(error ? 1 : 0, DType::kI32);
  group.all_reduce(failed).wait();
  if (error) std::rethrow_exception(error);
  if (failed.item<int32_t>() != 0) throw ToldByRank0("rank 0 failed");
}

// What failed on some rank is thrown on all: rank 0 says it.
template <class Work>
void with_all_ranks(const comm::Group& group, const Work& work) {
  try {
    work();
  } catch (const snapshot::CheckpointError& error) {
    if (group.rank() == 0) throw;
    throw ToldByRank0(error.what());
  }
}

}  // namespace chorale::train
