#include "chorale/op/defs/reduce_common.h"

#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/index.h"
#include "chorale/op/view.h"

namespace chorale::op {

Tensor spread(const Tensor& results, const Shape& to, DimMask reduced) {
  const Shape kept = reduced_shape(to, reduced, true);
  return expand(results.sizes() == kept ? results : view(results, kept), to);
}

Tensor place(const Tensor& values, const Tensor& indices, const Shape& to, int64_t dim) {
  if (to.empty()) return values;
  return scatter(zeros(to, values.dtype(), values.device()), dim, indices, values);
}

void split_reduction(const ShardCall& call, ShardWays& ways, DimMask reduced, bool keepdim, Partial partial,
                     Parts parts) {
  // First with the reduced dimensions whole, then with the others whole.
  for (const bool along : {false, true}) {
    std::string from, to;
    for (int64_t d = 0; d < call.dims(0); ++d) {
      const auto letter = static_cast<char>('a' + d), capital = static_cast<char>('A' + d);
      const bool gone = reduced >> d & 1u;
      from += gone == along ? letter : capital;
      // What remains of a reduced dimension is another one, of size 1.
      if (!gone || keepdim) to += gone || along ? capital : letter;
    }
    const std::string labels = join({from}, std::vector<std::string>(call.out.size(), to));
    if (!along) ways.split(labels);
    if (along && !partial.none()) ways.split(labels, partial, parts);
  }
}

void check_not_empty(const char* op, const Shape& sizes, DimMask reduced) {
  CHORALE_CHECK(reduced_count(sizes, reduced) > 0, "[", op, "] nothing has no extreme: a reduced dimension of shape ",
                sizes, " has size 0");
}

Tensor elements_for(const char* op, const Tensor& x, std::optional<DType> wanted) {
  if (!wanted) return x;
  const DType from = x.dtype();
  CHORALE_CHECK(!is_complex(from) || is_complex(*wanted), "[", op, "] a result of ", from, " elements cannot be ",
                *wanted, "; take the real part first");
  const bool truncates = is_differentiable(from) && !is_differentiable(*wanted);
  return to(x, truncates ? *wanted : promote(from, *wanted));
}

}  // namespace chorale::op
