#include "chorale/graph/split.h"

#include <algorithm>
#include <set>

#include "chorale/base/error.h"

namespace chorale::graph {
namespace {
constinit thread_local const ActiveDdp* active = nullptr;
}

const ActiveDdp* active_ddp() { return active; }
ActiveDdpScope::ActiveDdpScope(const ActiveDdp& module) : before_(active) { active = &module; }
ActiveDdpScope::~ActiveDdpScope() { active = before_; }

int64_t bucket_bytes(double megabytes) { return static_cast<int64_t>(megabytes * 1048576); }

std::vector<Bucket> split_calls(const std::vector<CallToSplit>& calls, const std::vector<int64_t>& parameter_bytes,
                                const std::function<bool(uint32_t value)>& is_result, int64_t cap, int64_t first_cap) {
  CHORALE_CHECK(first_cap <= cap, "[compile] the first bucket's cap of ", first_cap,
                " bytes is larger than that of the others, ", cap);
  std::set<uint32_t> read_later;   // by calls behind the current bucket
  std::set<uint32_t> read_here;    // by calls of the current bucket
  std::vector<Bucket> buckets(1);  // from the last to the first
  buckets[0].begin = buckets[0].end = calls.size();
  for (size_t at = calls.size(); at-- > 0;) {
    const CallToSplit& call = calls[at];
    Bucket* bucket = &buckets.back();
    const bool is_tied = call.region != 0 && at + 1 < calls.size() && calls[at + 1].region == call.region;
    if (!is_tied && (bucket->bytes >= cap || (buckets.size() == 1 && bucket->bytes >= first_cap))) {
      bool is_read = false;
      for (size_t i = bucket->begin; i < bucket->end && !is_read; ++i) {
        is_read = std::any_of(calls[i].out.begin(), calls[i].out.end(),
                              [&](uint32_t y) { return is_result(y) || read_later.count(y) > 0; });
      }
      if (is_read) {
        read_later.merge(read_here);
        read_here.clear();
        const size_t end = bucket->begin;
        bucket = &buckets.emplace_back();
        bucket->begin = bucket->end = end;
      } else {
        ++bucket->extended;
      }
    }
    for (const uint32_t parameter : call.parameters) {
      bucket->bytes += parameter_bytes[parameter];
      bucket->parameters.push_back(parameter);
    }
    for (const uint32_t x : call.in) read_here.insert(x);
    bucket->begin = at;
  }
  if (buckets.size() > 1 && buckets.back().bytes == 0) {
    buckets[buckets.size() - 2].begin = 0;
    buckets.pop_back();
  }
  std::reverse(buckets.begin(), buckets.end());
  return buckets;
}

}  // namespace chorale::graph
