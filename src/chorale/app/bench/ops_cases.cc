#include "chorale/app/bench/ops_cases.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "chorale/base/error.h"
#include "chorale/op/functions.h"

namespace chorale::app {
namespace {

using In = const std::vector<Tensor>&;
constexpr int64_t kMi = 1 << 20;

std::string shape_text(const Shape& sizes) {
  return sizes.empty() ? "1" : fmt::format("{}", fmt::join(sizes.begin(), sizes.end(), "x"));
}

struct Builder {
  std::vector<OpCase> cases;

  void add(const std::string& op, std::vector<OpInput> in, bool grad = false, double passes = 0) {
    OpCase c{.name = {}, .op = op, .in = std::move(in), .grad = grad, .bytes = 0};
    const auto shown = std::find_if(c.in.begin(), c.in.end(), [](const OpInput& i) { return i.below == 0; });
    const OpInput& first = shown == c.in.end() ? c.in[0] : *shown;
    std::string shapes = shape_text(c.in[0].sizes);
    if (c.in.size() > 1 && !(c.in[1].sizes == c.in[0].sizes))
      shapes = fmt::format("{},{}", shapes, shape_text(c.in[1].sizes));
    c.name = fmt::format("{}/{}/{}{}", op, name_of(first.dtype), shapes, grad ? "/grad" : "");
    if (passes > 0)
      c.bytes = static_cast<size_t>(passes * static_cast<double>(count_elems(c.in[0].sizes)) *
                                    static_cast<double>(size_of(first.dtype)));
    cases.push_back(std::move(c));
  }
};

void add_pointwise(Builder& b) {
  for (int64_t n : {int64_t{1}, int64_t{1000}, int64_t{65536}, kMi, 16 * kMi}) {
    const bool large = n >= kMi;
    b.add("add", {{{n}}, {{n}}}, false, large ? 3 : 0);
    b.add("relu", {{{n}}}, false, large ? 2 : 0);
    b.add("tanh", {{{n}}});
  }
  for (const char* op : {"mul", "div", "add_"}) {
    b.add(op, {{{1000}}, {{1000}}});
    b.add(op, {{{kMi}}, {{kMi}}}, false, 3);
  }
  for (const char* op : {"mul_scalar", "exp", "log", "sigmoid", "gelu", "silu", "erf", "sin", "sqrt", "pow2"}) {
    b.add(op, {{{100}}});
    b.add(op, {{{kMi}}}, false, std::string(op) == "mul_scalar" ? 2 : 0);
  }
  b.add("where", {{{kMi}}, {{kMi}}});
  b.add("add", {{{1024, 1024}}, {{1024}}}, false, 2);
  b.add("add", {{{8, 4}}, {{4}}});
  for (const char* op : {"add", "mul"}) b.add(op, {{{1}}, {{1}}}, true);
  for (const char* op : {"tanh", "gelu", "relu"}) {
    b.add(op, {{{1}}}, true);
    b.add(op, {{{kMi}}}, true);
  }
  for (int64_t n : {int64_t{1000}, kMi}) {
    b.add("add", {{{n}, DType::kBF16}, {{n}, DType::kBF16}});
    b.add("gelu", {{{n}, DType::kBF16}});
  }
}

void add_copies_and_reductions(Builder& b) {
  b.add("clone", {{{16 * kMi}}}, false, 2);
  b.add("clone", {{{1000}}});
  b.add("to_bf16", {{{kMi}}}, false, 1.5);
  b.add("to_f32", {{{kMi}, DType::kBF16}}, false, 3);
  b.add("transpose_copy", {{{1024, 1024}}});
  for (int64_t n : {int64_t{1}, int64_t{1000}, kMi, 16 * kMi}) b.add("sum", {{{n}}}, false, n >= kMi ? 1 : 0);
  for (const char* op : {"sum0", "sum1", "amax1", "argmax1", "cumsum1", "logsumexp1", "var1"}) {
    b.add(op, {{{16, 16}}});
    b.add(op, {{{1024, 1024}}}, false, std::string(op).starts_with("sum") || std::string(op) == "amax1" ? 1 : 0);
  }
  b.add("sum0", {{{1024, 1024}, DType::kBF16}});
  b.add("mean", {{{1000}}}, true);
  b.add("norm", {{{kMi}}});
}

void add_products(Builder& b) {
  for (int64_t n : {4, 16, 64, 256, 1024}) b.add("matmul", {{{n, n}}, {{n, n}}});
  for (int64_t n : {64, 512}) b.add("matmul", {{{n, n}, DType::kBF16}, {{n, n}, DType::kBF16}});
  b.add("matmul", {{{32, 512}}, {{512, 512}}});
  b.add("matmul", {{{1, 1024}}, {{1024, 1024}}});
  b.add("matmul", {{{32, 128, 64}}, {{32, 64, 128}}});
  b.add("matmul", {{{64, 64}}, {{64, 64}}}, true);
  b.add("linear", {{{8, 20}}, {{32, 20}}, {{32}}});
  b.add("linear", {{{32, 512}}, {{512, 512}}, {{512}}}, true);
  b.add("einsum", {{{8, 32, 32}}, {{8, 32, 32}}});
  b.add("conv2d", {{{32, 1, 28, 28}}, {{32, 1, 3, 3}}});
  b.add("conv2d", {{{32, 32, 14, 14}}, {{64, 32, 3, 3}}});
  b.add("conv2d", {{{32, 32, 14, 14}}, {{64, 32, 3, 3}}}, true);
  b.add("conv2d", {{{4, 64, 56, 56}}, {{64, 64, 3, 3}}});
}

void add_indices_and_shapes(Builder& b) {
  b.add("view", {{{4, 4}}});
  b.add("slice", {{{100}}});
  b.add("zeros", {{{1000}}});
  b.add("cat", {{{16, 16}}, {{16, 16}}});
  b.add("cat", {{{512, 1024}}, {{512, 1024}}});
  b.add("pad", {{{256, 256}}});
  b.add("index_select", {{{8192, 256}}, {{1024}, DType::kI64, 8192}});
  b.add("embedding", {{{8, 128}, DType::kI64, 8192}, {{8192, 256}}});
  b.add("embedding", {{{8, 128}, DType::kI64, 8192}, {{8192, 256}}}, true);
  b.add("gather", {{{1024, 64}}, {{1024, 16}, DType::kI64, 64}});
  b.add("masked_fill", {{{256, 256}}, {{256, 256}}});
}

void add_networks(Builder& b) {
  for (bool grad : {false, true}) {
    b.add("softmax", {{{16, 10}}}, grad);
    b.add("softmax", {{{1024, 1024}}}, grad);
    b.add("layer_norm", {{{1024, 256}}, {{256}}, {{256}}}, grad);
    b.add("batch_norm", {{{32, 32, 28, 28}}, {{32}}, {{32}}}, grad);
    b.add("max_pool2d", {{{32, 32, 28, 28}}}, grad);
    b.add("cross_entropy", {{{32, 10}}, {{32}, DType::kI64, 10}}, grad);
    b.add("cross_entropy", {{{1024, 8192}}, {{1024}, DType::kI64, 8192}}, grad);
    b.add("attention", {{{8, 4, 128, 64}}, {{8, 4, 128, 64}}, {{8, 4, 128, 64}}}, grad);
  }
  b.add("log_softmax", {{{1024, 100}}});
  b.add("avg_pool2d", {{{32, 32, 28, 28}}});
  b.add("layer_norm", {{{8, 16}}, {{16}}, {{16}}});
  b.add("dropout", {{{kMi}}});
  b.add("sort", {{{1000}}});
  b.add("sort", {{{kMi}}});
  b.add("topk", {{{64, 1000}}});
  b.add("uniform", {{{kMi}}});
  b.add("normal", {{{kMi}}});
}

}  // namespace

int64_t OpCase::elements() const {
  int64_t most = 0;
  for (const OpInput& input : in) most = std::max(most, count_elems(input.sizes));
  return most;
}

std::vector<OpCase> op_cases() {
  Builder builder;
  add_pointwise(builder);
  add_copies_and_reductions(builder);
  add_products(builder);
  add_indices_and_shapes(builder);
  add_networks(builder);
  return std::move(builder.cases);
}

OpCall op_call(const std::string& op) {
  static const std::map<std::string, OpCall> calls = {
      {"add", [](In x) { return add(x[0], x[1]); }},
      {"mul", [](In x) { return mul(x[0], x[1]); }},
      {"div", [](In x) { return div(x[0], x[1]); }},
      {"add_", [](In x) { return add_(x[0], x[1]); }},
      {"where", [](In x) { return where(gt(x[0], 0), x[0], x[1]); }},
      {"mul_scalar", [](In x) { return mul(x[0], 2.5); }},
      {"exp", [](In x) { return exp(x[0]); }},
      {"log", [](In x) { return log(x[0]); }},
      {"tanh", [](In x) { return tanh(x[0]); }},
      {"sigmoid", [](In x) { return sigmoid(x[0]); }},
      {"relu", [](In x) { return relu(x[0]); }},
      {"gelu", [](In x) { return gelu(x[0]); }},
      {"silu", [](In x) { return silu(x[0]); }},
      {"erf", [](In x) { return erf(x[0]); }},
      {"sin", [](In x) { return sin(x[0]); }},
      {"sqrt", [](In x) { return sqrt(x[0]); }},
      {"pow2", [](In x) { return pow(x[0], 2.0); }},
      {"clone", [](In x) { return clone(x[0]); }},
      {"to_bf16", [](In x) { return to(x[0], DType::kBF16); }},
      {"to_f32", [](In x) { return to(x[0], DType::kF32); }},
      {"transpose_copy", [](In x) { return contiguous(t(x[0])); }},
      {"sum", [](In x) { return sum(x[0]); }},
      {"sum0", [](In x) { return sum(x[0], 0); }},
      {"sum1", [](In x) { return sum(x[0], 1); }},
      {"mean", [](In x) { return mean(x[0]); }},
      {"amax1", [](In x) { return amax(x[0], 1); }},
      {"argmax1", [](In x) { return argmax(x[0], 1); }},
      {"cumsum1", [](In x) { return cumsum(x[0], 1); }},
      {"logsumexp1", [](In x) { return logsumexp(x[0], 1); }},
      {"var1", [](In x) { return var(x[0], 1); }},
      {"norm", [](In x) { return norm(x[0]); }},
      {"matmul", [](In x) { return matmul(x[0], x[1]); }},
      {"linear", [](In x) { return linear(x[0], x[1], x[2]); }},
      {"einsum", [](In x) { return einsum("bij,bjk->bik", x); }},
      {"conv2d", [](In x) { return conv2d(x[0], x[1], {}, 1, 1); }},
      {"view", [](In x) { return view(x[0], {-1}); }},
      {"slice", [](In x) { return slice(x[0], 0, 1); }},
      {"zeros", [](In x) { return zeros(x[0].sizes()); }},
      {"cat",
       [](In x) {
         return cat({x[0], x[1]});
       }},
      {"pad",
       [](In x) {
         return pad(x[0], {1, 1});
       }},
      {"index_select", [](In x) { return index_select(x[0], 0, x[1]); }},
      {"embedding", [](In x) { return embedding(x[0], x[1]); }},
      {"gather", [](In x) { return gather(x[0], 1, x[1]); }},
      {"masked_fill", [](In x) { return masked_fill(x[0], gt(x[1], 0), 0.0); }},
      {"softmax", [](In x) { return softmax(x[0]); }},
      {"log_softmax", [](In x) { return log_softmax(x[0]); }},
      {"layer_norm", [](In x) { return layer_norm(x[0], x[1].sizes(), x[1], x[2]); }},
      {"batch_norm", [](In x) { return batch_norm(x[0], {}, {}, x[1], x[2], true); }},
      {"max_pool2d", [](In x) { return max_pool2d(x[0], 2); }},
      {"avg_pool2d", [](In x) { return avg_pool2d(x[0], 2); }},
      {"cross_entropy", [](In x) { return cross_entropy(x[0], x[1]); }},
      {"attention", [](In x) { return scaled_dot_product_attention(x[0], x[1], x[2]); }},
      {"dropout", [](In x) { return dropout(x[0], 0.5); }},
      {"sort", [](In x) { return sort(x[0]).values; }},
      {"topk", [](In x) { return topk(x[0], 10).values; }},
      {"uniform", [](In x) { return uniform(x[0].sizes()); }},
      {"normal", [](In x) { return normal(x[0].sizes()); }},
  };
  const auto found = calls.find(op);
  CHORALE_INVARIANT(found != calls.end(), "the benchmark has no call for ", op);
  return found->second;
}

}  // namespace chorale::app
