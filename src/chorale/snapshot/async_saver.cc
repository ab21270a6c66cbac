#include "chorale/snapshot/async_saver.h"

#include "chorale/autograd/autograd.h"
#include "chorale/base/log.h"
#include "chorale/op/copy.h"

namespace chorale::snapshot {

AsyncSaver::~AsyncSaver() {
  try {
    wait();
  } catch (const std::exception& error) {
    log_warning(concat("a checkpoint was not saved: ", error.what()));
  }
}

void AsyncSaver::start(const std::filesystem::path& folder, const State& state, const SaveOptions& options) {
  wait();
  const NoGrad quiet;
  State staged = state;
  staged_.resize(state.chunks.size());
  for (size_t i = 0; i < staged.chunks.size(); ++i) {
    const Tensor& x = state.chunks[i].local;
    CHORALE_CHECK(x.defined(), "[checkpoint] ", state.chunks[i].key, " is an undefined tensor");
    Tensor& copy = staged_[i];
    if (copy.defined() && copy.sizes() == x.sizes() && copy.dtype() == x.dtype()) {
      copy_(copy, x);
    } else {
      copy = x.device() == kCpu ? clone(x) : to(x, kCpu);
    }
    staged.chunks[i].local = copy;
  }
  saving_ = std::async(std::launch::async,
                       [this, folder, options, staged = std::move(staged)] { save(group_, folder, staged, options); });
}

void AsyncSaver::wait() {
  if (saving_.valid()) saving_.get();
}

}  // namespace chorale::snapshot
