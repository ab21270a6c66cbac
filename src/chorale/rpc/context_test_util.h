// Contexts of distributed autograd in tests: what is recorded in one, as text, and questions to other workers.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chorale/api/api.h"
#include "chorale/dist_autograd/context.h"
#include "chorale/rpc/agents_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::rpc {

// The send nodes of a context and what they lead to, in the order of hops: "send[add[receive,receive]]"; then the
// number of receive nodes. Different receive nodes have different numbers.
struct Recorded {
  std::vector<std::string> sends;
  int64_t receives = 0;
  std::vector<int> known;
  CHORALE_MESSAGE(Recorded, sends, receives, known)
};
Recorded recorded(const dist_autograd::Contexts& contexts, uint64_t context);

// Served functions. What the worker has recorded in the caller's context,
Recorded recorded_here();
// whether it knows a context,
bool knows_context(uint64_t context);
// and the gradients it has in one: by the values of the leaf.
std::vector<std::pair<Tensor, Tensor>> gradients_here(uint64_t context);

// Functions that many tests call, served as well.
namespace served {
Tensor plus(const Tensor& a, const Tensor& b);
Tensor times(const Tensor& a, const Tensor& b);
Tensor product(const Tensor& a, const Tensor& b);
int64_t add_ints(int64_t a, int64_t b);
// Functions that are answered later. Twice x, set by another thread;
Future<int64_t> by_hand(int64_t x);
// x + 11, by two calls of add_ints to the worker itself;
Future<int64_t> chained(int64_t x);
// the same, by a call of chained() to the worker itself;
Future<int64_t> nested(int64_t x);
// the sum of the numbers below n, each asked of one of all workers.
Future<int64_t> fan_out(int64_t n);
}  // namespace served

const std::vector<Served>& context_functions();
// Serves these as well.
AgentOptions for_context_tests(std::vector<Served> functions);

// A store that all ranks see, processes too, in a folder that rank 0 makes and keeps.
std::shared_ptr<transport::Store> common_store(const comm::Group& group, std::optional<TemporaryFolder>& folder);

// Tests that run in both modes of backward:
//   INSTANTIATE_TEST_SUITE_P(Rpc, DistBackward, kBothModes, name_of_mode);
class BothModes : public testing::TestWithParam<dist_autograd::Mode> {
 protected:
  static AgentOptions options(const std::vector<Served>& functions);
};
inline const auto kBothModes = testing::Values(dist_autograd::Mode::kSmart, dist_autograd::Mode::kFast);
std::string name_of_mode(const testing::TestParamInfo<dist_autograd::Mode>& mode);

// Expects tensors of equal size and dtype whose values are equal within rounding, or two undefined ones: gradients from
// several workers add up in the order in which they come.
void expect_near(const Tensor& a, const Tensor& b, const std::string& what = {});

// t as a leaf that requires a gradient.
Tensor wanting(const Tensor& t);
// Each element depends on its place.
Tensor pattern(const Shape& sizes, double seed);
// The sparse twin of the catalogue: 3.2 at (0, 2), 4.1 at (1, 0), 5.3 at (1, 2).
Tensor sparse_example();

}  // namespace chorale::rpc
