#include "chorale/comm/timeout_extension.h"

#include <atomic>
#include <memory>

#include "chorale/base/error.h"
#include "chorale/comm/operation.h"

namespace chorale::comm {
namespace {

// Withdrawn (0) by whatever thread finishes a call that has it.
using Extension = std::atomic<int64_t>;
thread_local std::shared_ptr<Extension> extension;

}  // namespace

void extend_timeouts(std::chrono::milliseconds by) {
  CHORALE_CHECK(by.count() >= 0, "[extend_timeouts] a timeout cannot be extended by ", by.count(), " ms");
  if (by.count() == 0) return;
  // One that was withdrawn is left to the calls that have it.
  if (timeout_extension().count() == 0) extension = std::make_shared<Extension>(0);
  extension->fetch_add(by.count(), std::memory_order_relaxed);
}

std::chrono::milliseconds timeout_extension() {
  return std::chrono::milliseconds(extension ? extension->load(std::memory_order_relaxed) : 0);
}

void take_extension(Operation& operation) {
  if (!extension) [[likely]]
    return;
  const std::chrono::milliseconds by = timeout_extension();
  if (by.count() == 0) return extension.reset();
  operation.timeout += by;
  operation.deadline = Deadline(operation.issued + operation.timeout);
  // A message may be done before its receiver has come.
  if (!operation.is_message())
    operation.finish.push_back([taken = extension] { taken->store(0, std::memory_order_relaxed); });
}

}  // namespace chorale::comm
