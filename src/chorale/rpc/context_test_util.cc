#include "chorale/rpc/context_test_util.h"

#include <algorithm>
#include <thread>

#include "chorale/transport/store/file_store.h"

namespace chorale::rpc {
namespace {

using autograd::Edge;
using autograd::Node;

std::string text_of(const Node& node, std::map<const Node*, int>& receives) {
  if (std::string_view(node.name()) == "receive")
    return concat("receive", receives.emplace(&node, static_cast<int>(receives.size())).first->second);
  std::string inner;
  for (const Edge& edge : node.edges) {
    inner += inner.empty() ? "" : ",";
    inner += edge.node ? text_of(*edge.node, receives) : edge.leaf.defined() ? "leaf" : "-";
  }
  return concat(node.name(), "[", inner, "]");
}

}  // namespace

Recorded recorded(const dist_autograd::Contexts& contexts, uint64_t context) {
  const auto state = contexts.get(context);
  const std::lock_guard lock(state->mutex);
  Recorded found;
  std::map<const Node*, int> receives;
  for (const auto& [hop, node] : state->sends) found.sends.push_back(text_of(*node, receives));
  found.receives = static_cast<int64_t>(state->receives.size());
  found.known.assign(state->known.begin(), state->known.end());
  return found;
}

Recorded recorded_here() { return recorded(here(), dist_autograd::current_context()); }
bool knows_context(uint64_t context) {
  dist_autograd::Contexts& contexts = here();
  return contexts.find(context) != nullptr;
}
std::vector<std::pair<Tensor, Tensor>> gradients_here(uint64_t context) {
  dist_autograd::Contexts& contexts = here();
  std::vector<std::pair<Tensor, Tensor>> found;
  for (const auto& [leaf, gradient] : contexts.get(context)->gradients.entries())
    found.emplace_back(leaf.alias(), gradient);
  return found;
}

namespace served {
Tensor plus(const Tensor& a, const Tensor& b) { return add(a, b); }
Tensor times(const Tensor& a, const Tensor& b) { return mul(a, b); }
Tensor product(const Tensor& a, const Tensor& b) { return matmul(a, b); }
int64_t add_ints(int64_t a, int64_t b) { return a + b; }
Future<int64_t> by_hand(int64_t x) {
  Future<int64_t> future;
  std::thread([future, x] { future.set(2 * x); }).detach();
  return future;
}
Future<int64_t> chained(int64_t x) {
  Agent agent = here();
  return agent.call_async<add_ints>(agent.info(), x, 1).then([agent](const Future<int64_t>& f) mutable {
    return agent.call_async<add_ints>(agent.info(), f.wait(), 10);
  });
}
Future<int64_t> nested(int64_t x) { return here().call_async<chained>(here().info(), x); }
Future<int64_t> fan_out(int64_t n) {
  Agent agent = here();
  std::vector<Future<int64_t>> all;
  for (int64_t i = 0; i < n; ++i)
    all.push_back(agent.call_async<add_ints>(i % static_cast<int64_t>(agent.workers().size()), i, 0));
  return collect_all(all).then([](const Future<std::vector<Future<int64_t>>>& done) {
    int64_t sum = 0;
    for (const auto& one : done.wait()) sum += one.wait();
    return sum;
  });
}
}  // namespace served

std::shared_ptr<transport::Store> common_store(const comm::Group& group, std::optional<TemporaryFolder>& folder) {
  std::vector<uint8_t> bytes(256);
  if (group.rank() == 0) {
    const std::string path = (folder.emplace().path() / "store").string();
    std::copy(path.begin(), path.end(), bytes.begin());
  }
  group.broadcast(std::span(bytes), 0).wait();
  return std::make_shared<transport::FileStore>(std::string(bytes.begin(), std::find(bytes.begin(), bytes.end(), 0)));
}

const std::vector<Served>& context_functions() {
  static const std::vector<Served> functions{remote<recorded_here>,   remote<knows_context>, remote<gradients_here>,
                                             remote<served::plus>,    remote<served::times>, remote<served::product>,
                                             remote<served::add_ints>};
  return functions;
}

AgentOptions for_context_tests(std::vector<Served> functions) {
  functions.insert(functions.end(), context_functions().begin(), context_functions().end());
  return for_tests(std::move(functions));
}

AgentOptions BothModes::options(const std::vector<Served>& functions) {
  AgentOptions options = for_context_tests(functions);
  options.backward = GetParam();
  return options;
}

std::string name_of_mode(const testing::TestParamInfo<dist_autograd::Mode>& mode) {
  return mode.param == dist_autograd::Mode::kSmart ? "Smart" : "Fast";
}

void expect_near(const Tensor& a, const Tensor& b, const std::string& what) {
  ASSERT_EQ(a.defined(), b.defined()) << what;
  if (!a.defined()) return;
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  EXPECT_EQ(a.dtype(), b.dtype()) << what;
  const auto va = to_dense(a).to_vector<double>(), vb = to_dense(b).to_vector<double>();
  for (size_t i = 0; i < va.size(); ++i) EXPECT_NEAR(va[i], vb[i], 1e-4 * (1 + std::abs(vb[i]))) << what;
}

Tensor wanting(const Tensor& t) { return set_requires_grad(t.alias()); }

Tensor pattern(const Shape& sizes, double seed) {
  const int64_t count = count_elems(sizes);
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i)
    values.push_back(
        static_cast<float>(std::sin(seed + 0.7 * static_cast<double>(i)) + 0.1 * static_cast<double>(i % 3)));
  return Tensor::from(values, sizes);
}

Tensor sparse_example() {
  return Tensor::sparse_coo(Tensor::from<int64_t>({0, 1, 1, 2, 0, 2}, {2, 3}),
                            Tensor::from<float>({3.2f, 4.1f, 5.3f}, {3}), {3, 3});
}

}  // namespace chorale::rpc
