#include "chorale/kernel/cpu/pointwise.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "chorale/base/parallel_for.h"

namespace chorale::kernel::cpu {
namespace {

using vec::ScalarOp;

struct Number {
  Scalar value;
};
CHORALE_FIELDS(Number, value)

void run(ScalarOp op, const std::vector<Tensor>& in, const Tensor& out, const Attrs& attrs = {},
         Promotion promotion = Promotion::kSame) {
  Tensor target = out;
  const Pointwise what{op, promotion};
  pointwise({in, {&target, 1}, attrs, Stream{}, &what});
}

// Element offsets of a view, in row-major order, after broadcasting it to `sizes`.
std::vector<int64_t> offsets(const Tensor& x, const Shape& sizes) {
  const Strides strides = broadcast_strides(x.sizes(), x.strides(), sizes);
  std::vector<int64_t> result;
  Shape index(sizes.size(), 0);
  for (int64_t n = count_elems(sizes); n > 0; --n) {
    int64_t offset = 0;
    for (size_t d = 0; d < index.size(); ++d) offset += index[d] * strides[d];
    result.push_back(offset);
    for (size_t d = index.size(); d-- > 0;) {
      if (++index[d] < sizes[d]) break;
      index[d] = 0;
    }
  }
  return result;
}

std::vector<double> broadcast_values(const Tensor& x, const Shape& sizes) {
  std::vector<double> result;
  visit_dtype(x.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T* data = static_cast<const T*>(x.raw());
    for (int64_t at : offsets(x, sizes))
      result.push_back(Scalar(Tensor::from({data[at]}, {}).template item<double>()).real());
  });
  return result;
}

// Views of memory full of small integers, which every dtype holds exactly.
class Views {
 public:
  explicit Views(unsigned seed) : engine_(seed) {}

  int64_t pick(int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(engine_); }
  template <class T>
  T one_of(std::initializer_list<T> list) {
    return list.begin()[pick(0, static_cast<int64_t>(list.size()) - 1)];
  }

  // Any layout whose elements lie in places of their own.
  Tensor any_layout(const Shape& sizes, DType dtype) {
    std::vector<size_t> order(sizes.size());
    for (size_t d = 0; d < order.size(); ++d) order[d] = d;
    if (pick(0, 2) == 0) std::shuffle(order.begin(), order.end(), engine_);
    const bool has_gaps = pick(0, 2) == 0;
    Strides strides(sizes.size());
    int64_t step = has_gaps ? pick(1, 3) : 1;
    for (size_t i = order.size(); i-- > 0;) {
      strides[order[i]] = step;
      step *= std::max<int64_t>(sizes[order[i]], 1);
      if (has_gaps) step += pick(0, 2);
    }
    const int64_t offset = pick(0, 3);
    const Tensor base = Tensor::empty({step + offset + 1}, dtype);
    visit_dtype(dtype, [&](auto tag) {
      using T = typename decltype(tag)::type;
      for (T& value : base.span<T>()) value = Scalar(pick(0, 9)).to<T>();
    });
    return base.view_as(sizes, strides, offset);
  }

  // Something that broadcasts to these sizes.
  Tensor input(const Shape& sizes, DType dtype) {
    Shape own = sizes;
    if (pick(0, 2) == 0) {
      for (int64_t& size : own) size = pick(0, 1) ? size : 1;
      while (!own.empty() && pick(0, 2) == 0) own.erase(0);
    }
    const Tensor x = any_layout(own, dtype);
    if (pick(0, 7) != 0) return x;
    return x.view_as(sizes, broadcast_strides(x.sizes(), x.strides(), sizes), x.offset());  // expanded
  }

 private:
  std::mt19937 engine_;
};

// Runs into `out` and expects f of the inputs there, and nothing changed beside it.
void expect_values(ScalarOp op, const std::vector<Tensor>& in, const Tensor& out, const Attrs& attrs,
                   const std::function<double(const std::vector<double>&)>& f) {
  std::vector<std::vector<double>> values;
  values.reserve(in.size());
  for (const Tensor& x : in) values.push_back(broadcast_values(x, out.sizes()));
  std::vector<double> expected;
  for (size_t i = 0; i < static_cast<size_t>(out.elems()); ++i) {
    std::vector<double> arguments;
    arguments.reserve(values.size());
    for (const auto& value : values) arguments.push_back(value[i]);
    const double result = f(arguments);
    expected.push_back(out.dtype() == DType::kBool ? result != 0 : result);
  }
  const auto* bytes = reinterpret_cast<const char*>(out.storage()->data());
  const std::vector<char> before(bytes, bytes + out.storage()->bytes());

  run(op, in, out, attrs);

  std::vector<bool> is_shown(before.size());
  for (int64_t at : offsets(out, out.sizes())) {
    for (size_t b = 0; b < out.elem_bytes(); ++b) {
      is_shown[static_cast<size_t>(out.offset() + at) * out.elem_bytes() + b] = true;
    }
  }
  bool kept = true;
  for (size_t i = 0; i < before.size(); ++i) kept &= is_shown[i] || before[i] == bytes[i];
  EXPECT_TRUE(kept) << "a byte outside of the result was written";
  EXPECT_EQ(out.to_vector<double>(), expected)
      << vec::info(op).name << " into " << out.dtype() << out.sizes() << " with strides " << out.strides();
}

const Shape kShapes[] = {
    {},           {1},          {7},        {0, 3},   {5, 3},    {3, 40},     {2, 3, 4, 5},
    {1025},       {40, 1030},   {300, 300}, {70000},  {1, 9, 1}, {17, 2, 33}, {2, 1, 2, 1, 2, 3, 2},
    {3, 5, 7, 9}, {2000, 3, 4}, {4, 20000}, {130, 64}};
constexpr DType kExact[] = {DType::kI32, DType::kF32, DType::kBF16, DType::kF64, DType::kI64, DType::kF16, DType::kC64};

// Large shapes, which several threads share, have fewer rounds.
int rounds_for(const Shape& sizes, int rounds) { return count_elems(sizes) > 10000 ? 2 : rounds; }

DType any_dtype(Views& views, size_t count) { return kExact[views.pick(0, static_cast<int64_t>(count) - 1)]; }

TEST(PointwiseKernel, TakesEveryLayoutAndDTypeOfInputsAndOutput) {
  Views views(1);
  for (const Shape& sizes : kShapes) {
    for (int round = 0; round < rounds_for(sizes, 12); ++round) {
      const bool mixed = views.pick(0, 1) == 1;
      const DType dtype = any_dtype(views, 6);
      const auto next = [&] { return mixed ? any_dtype(views, 6) : dtype; };
      // The output is wide enough for every result.
      const DType out = mixed ? views.one_of({DType::kF32, DType::kF64, DType::kC64}) : dtype;
      expect_values(ScalarOp::kAdd, {views.input(sizes, next()), views.input(sizes, next())},
                    views.any_layout(sizes, out), {}, [](const auto& v) { return v[0] + v[1]; });
      expect_values(ScalarOp::kNeg, {views.input(sizes, next())}, views.any_layout(sizes, out), {},
                    [](const auto& v) { return -v[0]; });
      expect_values(ScalarOp::kAddcmul,
                    {views.input(sizes, next()), views.input(sizes, next()), views.input(sizes, next())},
                    views.any_layout(sizes, out), Number{2}, [](const auto& v) { return v[0] + 2 * v[1] * v[2]; });
    }
  }
}

TEST(PointwiseKernel, WritesPredicatesIntoAnyDType) {
  Views views(2);
  for (const Shape& sizes : kShapes) {
    for (int round = 0; round < rounds_for(sizes, 8); ++round) {
      const DType out = views.one_of({DType::kBool, DType::kF32, DType::kI64, DType::kBF16});
      expect_values(ScalarOp::kLt, {views.input(sizes, any_dtype(views, 6)), views.input(sizes, any_dtype(views, 6))},
                    views.any_layout(sizes, out), {}, [](const auto& v) { return v[0] < v[1] ? 1.0 : 0.0; });
    }
  }
}

TEST(PointwiseKernel, ChoosesByAMaskInEveryDType) {
  Views views(3);
  for (const Shape& sizes : kShapes) {
    for (int round = 0; round < rounds_for(sizes, 6); ++round) {
      const DType dtype = any_dtype(views, 7);
      expect_values(ScalarOp::kWhere,
                    {views.input(sizes, DType::kBool), views.input(sizes, dtype), views.input(sizes, dtype)},
                    views.any_layout(sizes, dtype), {}, [](const auto& v) { return v[0] != 0 ? v[1] : v[2]; });
      expect_values(ScalarOp::kMaskedFill, {views.input(sizes, DType::kBool), views.input(sizes, dtype)},
                    views.any_layout(sizes, dtype), Number{-5}, [](const auto& v) { return v[0] != 0 ? -5 : v[1]; });
    }
  }
}

TEST(PointwiseKernel, MayOverwriteAnInput) {
  Views views(4);
  for (const Shape& sizes : kShapes) {
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kI32}) {
      const Tensor x = views.any_layout(sizes, dtype);
      expect_values(ScalarOp::kAdd, {x, views.input(sizes, DType::kI32)}, x, {},
                    [](const auto& v) { return v[0] + v[1]; });
      expect_values(ScalarOp::kSub, {x, x}, x, {}, [](const auto&) { return 0.0; });
    }
  }
}

TEST(PointwiseKernel, ReadsNumbersInTheOrderOfTheAttributes) {
  const Tensor x = Tensor::from({-3.f, 0.f, 1.f, 5.f}, {4}), y = Tensor::empty({4}, DType::kF32);
  run(ScalarOp::kAddScalar, {x}, y, Number{2.5});
  EXPECT_EQ(y.to_vector<float>(), (std::vector<float>{-0.5f, 2.5f, 3.5f, 7.5f}));
  // An integer beyond the reach of f64 stays exact.
  const int64_t big = (int64_t{1} << 62) + 1;
  const Tensor i = Tensor::from({int64_t{0}, int64_t{1}}, {2}), j = Tensor::empty({2}, DType::kI64);
  run(ScalarOp::kAddScalar, {i}, j, Number{big});
  EXPECT_EQ(j.to_vector<int64_t>(), (std::vector<int64_t>{big, big + 1}));
}

TEST(PointwiseKernel, ComputesThe16BitTypesInF32) {
  // 256 + 1 is no bf16; 256 + 1 + 1, added in f32 and rounded once, would be 258, but each call rounds its own result.
  const Tensor x = Tensor::from({bfloat16(256.f)}, {1}), one = Tensor::from({bfloat16(1.f)}, {1});
  const Tensor y = Tensor::empty({1}, DType::kBF16);
  run(ScalarOp::kAdd, {x, one}, y);
  EXPECT_EQ(y.item<float>(), 256.f);
  run(ScalarOp::kAddcmul, {x, one, one}, y, Number{2});
  EXPECT_EQ(y.item<float>(), 258.f);  // 2 * 1 * 1 is added at once
  const Tensor wide = Tensor::empty({1}, DType::kF32);
  run(ScalarOp::kAdd, {x, one}, wide);
  EXPECT_EQ(wide.item<float>(), 257.f);  // not rounded on its way into a wider tensor
}

TEST(PointwiseKernel, RefusesToDivideIntegersByZeroBeforeItWrites) {
  const Tensor x = Tensor::from({7, 8, 9}, {3}), y = Tensor::from({2, 0, 4}, {3}), out = Tensor::from({1, 1, 1}, {3});
  for (ScalarOp op : {ScalarOp::kFloorDivide, ScalarOp::kTruncDivide, ScalarOp::kRemainder}) {
    try {
      run(op, {x, y}, out);
      ADD_FAILURE() << "nothing was thrown";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("element 1"), std::string::npos) << error.what();
    }
    EXPECT_EQ(out.to_vector<int>(), (std::vector<int>{1, 1, 1}));
  }
  const Tensor f = Tensor::from({7.f, 8.f, 9.f}, {3}), g = Tensor::empty({3}, DType::kF32);
  run(ScalarOp::kFloorDivide, {f, y}, g);
  EXPECT_EQ(g.to_vector<float>()[1], std::numeric_limits<float>::infinity());
}

TEST(PointwiseKernel, GivesTheSameBitsForAnyThreadCount) {
  Views views(5);
  const int before = thread_count();
  const Tensor x = views.any_layout({300, 700}, DType::kF32), y = views.any_layout({700}, DType::kBF16);
  std::vector<std::vector<float>> results;
  for (int threads : {1, 2, 7}) {
    set_thread_count(threads);
    const Tensor z = Tensor::empty({300, 700}, DType::kF32);
    run(ScalarOp::kPow, {x, y}, z);
    results.push_back(z.to_vector<float>());
  }
  set_thread_count(before);
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

}  // namespace
}  // namespace chorale::kernel::cpu
