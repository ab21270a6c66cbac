// The splitter of data-parallel training: cuts a forward pass into pieces at the boundaries of gradient buckets, so
// that the gradients of a bucket are ready before the backward of all pieces has run.
//
// Note [Splitting] Calls are walked from the last to the first, and fill a bucket. When the next call comes and the
// bucket holds at least the cap (while it is the only one: the first cap), a new one is opened in front, provided that
// something outside reads a result of the full one; else it goes on filling. A call is charged with every parameter
// that is an operand of it itself, whole storages, each use again. Calls of a checkpointed part are as one call. A
// first piece without parameters joins the next.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "chorale/tensor/tensor.h"

namespace chorale::graph {

inline constexpr int64_t kFirstBucketBytes = 1 << 20;
inline constexpr int64_t kBucketBytes = int64_t{25} << 20;

// What the splitter knows of one call of the forward pass; calls are in order.
struct CallToSplit {
  std::vector<uint32_t> in, out;     // values
  std::vector<uint32_t> parameters;  // numbers of parameters among the operands that are charged
  uint32_t region = 0;               // calls of one region are not cut apart
};

struct Bucket {
  size_t begin = 0, end = 0;  // calls
  int64_t bytes = 0;
  std::vector<uint32_t> parameters;  // as charged
  int extended = 0;                  // calls that it took beyond its cap because nothing outside read its results
};

// Buckets in the order of the forward pass. `is_result` says whether a value is a result of the whole. Throws
// InvalidArgument where the first cap is larger than the cap.
std::vector<Bucket> split_calls(const std::vector<CallToSplit>& calls, const std::vector<int64_t>& parameter_bytes,
                                const std::function<bool(uint32_t value)>& is_result, int64_t cap = kBucketBytes,
                                int64_t first_cap = kFirstBucketBytes);
// Megabytes as options say them: 3.5 is 3,670,016 bytes.
int64_t bucket_bytes(double megabytes);

// What data-parallel training tells the compiler: set while the forward of such a module runs.
struct ActiveDdp {
  int64_t cap = kBucketBytes;
  std::function<bool(const Tensor& leaf)> is_ignored{};      // or no parameter at all
  std::function<std::string(const Tensor& leaf)> name_of{};  // for people
};
const ActiveDdp* active_ddp();
class ActiveDdpScope {
 public:
  explicit ActiveDdpScope(const ActiveDdp& module);
  ~ActiveDdpScope();
  ActiveDdpScope(const ActiveDdpScope&) = delete;
  ActiveDdpScope& operator=(const ActiveDdpScope&) = delete;

 private:
  const ActiveDdp* before_;
};

}  // namespace chorale::graph
