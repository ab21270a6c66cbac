// Our ops against values and gradients recorded from PyTorch (tools/oracle/record_ops.py), which need not be there.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "chorale/api/oracle_calls_test_util.h"
#include "chorale/autograd/autograd.h"
#include "chorale/base/parallel_for.h"
#include "chorale/eager/sim_kernels.h"
#include "chorale/op/functions.h"
#include "chorale/op/samples.h"

namespace chorale::oracle {
namespace {

std::filesystem::path folder() {
  for (auto at = std::filesystem::current_path();; at = at.parent_path()) {
    if (std::filesystem::exists(at / "tests" / "oracle")) return at / "tests" / "oracle";
    if (at == at.root_path()) throw std::runtime_error("no folder tests/oracle above the working directory");
  }
}

complex128 number(const Json& value) {
  if (value.is_array()) return {number(value[0]).real(), number(value[1]).real()};
  if (value.is_string()) return value == "nan" ? NAN : value == "inf" ? INFINITY : -INFINITY;
  return value.get<double>();
}

Tensor make(const Json& spec) {
  if (spec.is_null()) return {};
  const DType dtype = dtype_from_name(spec["d"].get<std::string>());
  const Shape sizes(std::span<const int64_t>(spec["s"].get<std::vector<int64_t>>()));
  if (spec.contains("v")) {
    Tensor x = Tensor::empty(sizes, is_complex(dtype)          ? DType::kC128
                                    : is_differentiable(dtype) ? DType::kF64
                                                               : DType::kI64);
    for (size_t i = 0; i < spec["v"].size(); ++i) {
      const Json& value = spec["v"][i];
      if (x.dtype() == DType::kC128) x.span<complex128>()[i] = number(value);
      if (x.dtype() == DType::kF64) x.span<double>()[i] = number(value).real();
      if (x.dtype() == DType::kI64) x.span<int64_t>()[i] = value.get<int64_t>();
    }
    return clone(to(x, dtype));
  }
  const int seed = spec["seed"];
  if (dtype == DType::kBool) return op::sample_bools(sizes, seed);
  if (is_complex(dtype)) return to(op::sample_complex(sizes, seed), dtype);
  const double low = spec["low"], high = spec["high"];
  if (is_differentiable(dtype)) return to(op::sample(sizes, seed, low, high), dtype);
  return to(op::sample_ints(sizes, static_cast<int64_t>(low), static_cast<int64_t>(high), seed), dtype);
}

double tolerance_of(DType dtype) {
  switch (real_of(dtype)) {
    case DType::kF64:
      return 1e-11;
    case DType::kF32:
      return 1e-5;
    case DType::kF16:
      return 4e-3;
    case DType::kBF16:
      return 3e-2;
    default:
      return 0;
  }
}

// A call is as exact as the coarsest floating dtype in it.
double tolerance_of(const Json& test) {
  if (test.contains("tol")) return test["tol"];
  double tolerance = 0;
  for (const char* side : {"in", "out"}) {
    for (const Json& entry : test[side]) {
      if (!entry.is_null())
        tolerance = std::max(tolerance, tolerance_of(dtype_from_name(entry["d"].get<std::string>())));
    }
  }
  return tolerance;
}

bool close(double a, double b, double tolerance) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  if (std::isinf(a) || std::isinf(b)) return a == b;
  return std::abs(a - b) <= tolerance * std::max(1.0, std::abs(b));
}

void compare(const Tensor& got, const Json& expected, double tolerance, const std::string& what) {
  ASSERT_EQ(std::string(name_of(got.dtype())), expected["d"].get<std::string>()) << what;
  ASSERT_EQ(got.sizes(), Shape(std::span<const int64_t>(expected["s"].get<std::vector<int64_t>>()))) << what;
  const auto values = got.to_vector<complex128>();
  const size_t step = expected.value("step", size_t{1});
  ASSERT_EQ((values.size() + step - 1) / step, expected["v"].size()) << what;
  for (size_t i = 0; i < expected["v"].size(); ++i) {
    const complex128 want = number(expected["v"][i]), have = values[i * step];
    if (close(have.real(), want.real(), tolerance) && close(have.imag(), want.imag(), tolerance)) continue;
    FAIL() << what << ": element " << i * step << " is " << have << ", PyTorch has " << want;
  }
  if (!expected.contains("sum")) return;
  complex128 sum = 0;
  double magnitude = 1;
  for (const complex128& value : values) {
    sum += value;
    magnitude += std::abs(value);
  }
  EXPECT_LE(std::abs(sum - number(expected["sum"])), tolerance * magnitude) << what << ": the sum of all elements";
}

void check(const Call& call, const Json& test) {
  std::vector<Tensor> in;
  for (const Json& spec : test["in"]) in.push_back(make(spec));
  const std::string what = test["f"].get<std::string>() + " " + test["in"].dump().substr(0, 160) + " " +
                           test.value("a", Json::object()).dump();
  SCOPED_TRACE(what);
  std::vector<Tensor> wanted;
  for (size_t i = 0; i < in.size(); ++i) {
    if (in[i].defined() && test["in"][i].contains("g")) wanted.push_back(set_requires_grad(in[i]));
  }
  const std::vector<Tensor> out = call(in, test.value("a", Json::object()));
  ASSERT_EQ(out.size(), test["out"].size());
  for (size_t i = 0; i < out.size(); ++i)
    compare(out[i], test["out"][i], tolerance_of(test), what + " output " + std::to_string(i));
  if (!test.contains("grad")) return;
  ASSERT_EQ(wanted.size(), test["grad"].size());
  std::vector<Tensor> roots;
  GradOptions options;
  options.allow_unused = true;
  for (size_t i = 0; i < out.size(); ++i) {
    if (!requires_grad(out[i])) continue;
    roots.push_back(out[i]);
    const int seed = 1000 + static_cast<int>(i);
    const Tensor weights = is_complex(out[i].dtype()) ? op::sample_complex(out[i].sizes(), seed)
                                                      : op::sample(out[i].sizes(), seed, 0.5, 1.5);
    options.grad_outputs.push_back(to(weights, out[i].dtype()));
  }
  const auto gradients = grad(roots, wanted, options);
  for (size_t i = 0; i < gradients.size(); ++i) {
    const Json& expected = test["grad"][i];
    if (expected.is_null()) {
      // No gradient and a gradient of zeros mean the same.
      EXPECT_TRUE(!gradients[i].defined() || !any(gradients[i]).item<bool>()) << what << " gradient " << i;
      continue;
    }
    const Tensor g = gradients[i].defined() ? gradients[i] : zeros_like(wanted[i]);
    compare(g, expected, tolerance_of(test), what + " gradient " + std::to_string(i));
  }
}

// The bytes of results and gradients, with inputs on a device.
std::vector<std::vector<complex128>> computed_on(Device device, const Call& call, const Json& test) {
  std::vector<Tensor> in, wanted, roots;
  for (const Json& spec : test["in"]) {
    const Tensor x = make(spec);
    in.push_back(x.defined() ? to(x, device) : x);
    if (x.defined() && spec.contains("g")) wanted.push_back(set_requires_grad(in.back()));
  }
  std::vector<std::vector<complex128>> all;
  GradOptions options{.allow_unused = true};
  for (const Tensor& y : call(in, test.value("a", Json::object()))) {
    EXPECT_EQ(y.device(), device);
    all.push_back(y.to_vector<complex128>());
    if (!requires_grad(y)) continue;
    roots.push_back(y);
    options.grad_outputs.push_back(ones_like(y));
  }
  if (!test.contains("grad") || roots.empty()) return all;
  for (const Tensor& g : grad(roots, wanted, options)) {
    if (!g.defined()) continue;
    EXPECT_EQ(g.device(), device);
    all.push_back(g.to_vector<complex128>());
  }
  return all;
}

bool same_bits(const std::vector<std::vector<complex128>>& a, const std::vector<std::vector<complex128>>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(x[0])) == 0);
  });
}

class Oracle : public ::testing::TestWithParam<std::string> {
 protected:
  // Calls check(function, case) for every case of the family.
  static void for_each_case(const std::function<void(const Call&, const Json&)>& check_one) {
    std::ifstream file(folder() / (GetParam() + ".json"));
    const Json family = Json::parse(file);
    Calls calls = pointwise_calls();
    calls.merge(structured_calls());
    calls.merge(nn_calls());
    ASSERT_GT(family["cases"].size(), 10u);
    for (const Json& test : family["cases"]) {
      const auto call = calls.find(test["f"].get<std::string>());
      ASSERT_NE(call, calls.end()) << "the oracle knows " << test["f"] << ", this test does not";
      try {
        check_one(call->second, test);
      } catch (const Error& error) {
        ADD_FAILURE() << test["f"] << " " << test["in"].dump().substr(0, 160) << " "
                      << test.value("a", Json::object()).dump() << ": " << error.what();
      }
    }
  }
};

TEST_P(Oracle, AgreesWithPyTorch) { for_each_case(check); }

// Functions that are no rows make tensors on the way, which must lie where their inputs do.
TEST_P(Oracle, HasTheBitsOfTheCpuOnADevice) {
  constexpr Device sim{DeviceType::kSim, 0};
  eager::add_sim_device({.most_delay = std::chrono::microseconds(5)});
  const int threads = thread_count();
  set_thread_count(1);  // as kernels of the device do: sums are cut by the number of threads
  for_each_case([&](const Call& call, const Json& test) {
    EXPECT_TRUE(same_bits(computed_on(sim, call, test), computed_on(kCpu, call, test)))
        << test["f"] << " " << test["in"].dump().substr(0, 160) << " " << test.value("a", Json::object()).dump();
  });
  set_thread_count(threads);
}

INSTANTIATE_TEST_SUITE_P(Ops, Oracle,
                         ::testing::Values("unary", "binary", "reduce", "product", "index", "shape", "order", "nn",
                                           "loss"),
                         [](const ::testing::TestParamInfo<std::string>& family) { return family.param; });

}  // namespace
}  // namespace chorale::oracle
