#include "chorale/comm/rank_context.h"

#include "chorale/device/shared_pages.h"

namespace chorale::comm {

CachingAllocator& RankContext::scratch() {
  if (!scratch_) scratch_ = std::make_shared<CachingAllocator>(shared_pages());
  return *scratch_;
}

std::shared_ptr<RankContext> RankContext::inner() {
  auto context = std::make_shared<RankContext>();
  scratch();
  context->scratch_ = scratch_;
  context->core_each = core_each;
  context->checksum = checksum;
  context->chaos = chaos;
  context->algorithms = algorithms;
  return context;
}

}  // namespace chorale::comm
