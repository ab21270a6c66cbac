// Values of the integer and bool loops, exact modulo the type.
#include <gtest/gtest.h>

#include <functional>

#include "chorale/vec/loops.h"
#include "chorale/vec/vec_test_util.h"

namespace chorale::vec {
namespace {

using Wide = __int128;
using Reference = std::function<Wide(Wide a, Wide b, Wide c)>;

constexpr int64_t kP0 = 3, kP1 = 100;

Wide floor_div(Wide a, Wide b) {
  if (b == 0) return 0;
  const Wide q = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q;
}
Wide mod(Wide a, Wide b) { return b == 0 ? 0 : a - b * floor_div(a, b); }
Wide power(Wide a, Wide b) {
  if (b < 0) return a == 1 ? 1 : a == -1 ? (b % 2 != 0 ? -1 : 1) : 0;
  unsigned __int128 result = 1, square = static_cast<unsigned __int128>(a);
  for (; b != 0; b /= 2, square *= square) {
    if (b % 2 != 0) result *= square;
  }
  return static_cast<Wide>(result);
}
// The product may leave even this type; the low bits are what counts.
Wide times(Wide a, Wide b) {
  return static_cast<Wide>(static_cast<unsigned __int128>(a) * static_cast<unsigned __int128>(b));
}

struct Case {
  ScalarOp op;
  Reference reference;
};

std::vector<Case> cases() {
  using enum ScalarOp;
  return {
      {kAdd, [](Wide a, Wide b, Wide) { return a + b; }},
      {kAddScaled, [](Wide a, Wide b, Wide) { return a + kP0 * b; }},
      {kSub, [](Wide a, Wide b, Wide) { return a - b; }},
      {kMul, [](Wide a, Wide b, Wide) { return times(a, b); }},
      {kFloorDivide, [](Wide a, Wide b, Wide) { return floor_div(a, b); }},
      {kTruncDivide, [](Wide a, Wide b, Wide) { return b == 0 ? 0 : a / b; }},
      {kRemainder, [](Wide a, Wide b, Wide) { return mod(a, b); }},
      {kMinimum, [](Wide a, Wide b, Wide) { return std::min(a, b); }},
      {kMaximum, [](Wide a, Wide b, Wide) { return std::max(a, b); }},
      {kAddScalar, [](Wide x, Wide, Wide) { return x + kP0; }},
      {kSubScalar, [](Wide x, Wide, Wide) { return x - kP0; }},
      {kRsubScalar, [](Wide x, Wide, Wide) { return kP0 - x; }},
      {kMulScalar, [](Wide x, Wide, Wide) { return x * kP0; }},
      {kFloorDivideScalar, [](Wide x, Wide, Wide) { return floor_div(x, kP0); }},
      {kTruncDivideScalar, [](Wide x, Wide, Wide) { return x / kP0; }},
      {kRemainderScalar, [](Wide x, Wide, Wide) { return mod(x, kP0); }},
      {kMinScalar, [](Wide x, Wide, Wide) { return std::min<Wide>(x, kP0); }},
      {kMaxScalar, [](Wide x, Wide, Wide) { return std::max<Wide>(x, kP0); }},
      {kClamp, [](Wide x, Wide, Wide) { return std::min<Wide>(std::max<Wide>(x, kP0), kP1); }},
      {kNeg, [](Wide x, Wide, Wide) { return -x; }},
      {kAbs, [](Wide x, Wide, Wide) { return x < 0 ? -x : x; }},
      {kSign, [](Wide x, Wide, Wide) { return Wide(x > 0) - Wide(x < 0); }},
      {kSquare, [](Wide x, Wide, Wide) { return times(x, x); }},
      {kCube, [](Wide x, Wide, Wide) { return times(times(x, x), x); }},
      {kAddcmul,
       [](Wide a, Wide b, Wide c) {
         return static_cast<Wide>(static_cast<unsigned __int128>(a) +
                                  static_cast<unsigned __int128>(times(times(kP0, b), c)));
       }},
      {kBitwiseAnd, [](Wide a, Wide b, Wide) { return a & b; }},
      {kBitwiseOr, [](Wide a, Wide b, Wide) { return a | b; }},
      {kBitwiseXor, [](Wide a, Wide b, Wide) { return a ^ b; }},
      {kBitwiseNot, [](Wide x, Wide, Wide) { return ~x; }},
      {kPow, [](Wide a, Wide b, Wide) { return power(a, b); }},
      {kPowScalar, [](Wide x, Wide, Wide) { return power(x, kP0); }},
      {kRpowScalar, [](Wide x, Wide, Wide) { return power(kP0, x); }},
      {kRelu, [](Wide x, Wide, Wide) { return x < 0 ? 0 : x; }},
      {kEq, [](Wide a, Wide b, Wide) { return Wide(a == b); }},
      {kNe, [](Wide a, Wide b, Wide) { return Wide(a != b); }},
      {kLt, [](Wide a, Wide b, Wide) { return Wide(a < b); }},
      {kLe, [](Wide a, Wide b, Wide) { return Wide(a <= b); }},
      {kGt, [](Wide a, Wide b, Wide) { return Wide(a > b); }},
      {kGe, [](Wide a, Wide b, Wide) { return Wide(a >= b); }},
      {kEqScalar, [](Wide x, Wide, Wide) { return Wide(x == kP0); }},
      {kNeScalar, [](Wide x, Wide, Wide) { return Wide(x != kP0); }},
      {kLtScalar, [](Wide x, Wide, Wide) { return Wide(x < kP0); }},
      {kLeScalar, [](Wide x, Wide, Wide) { return Wide(x <= kP0); }},
      {kGtScalar, [](Wide x, Wide, Wide) { return Wide(x > kP0); }},
      {kGeScalar, [](Wide x, Wide, Wide) { return Wide(x >= kP0); }},
      {kLogicalAnd, [](Wide a, Wide b, Wide) { return Wide(a != 0 && b != 0); }},
      {kLogicalOr, [](Wide a, Wide b, Wide) { return Wide(a != 0 || b != 0); }},
      {kLogicalXor, [](Wide a, Wide b, Wide) { return Wide((a != 0) != (b != 0)); }},
      {kLogicalNot, [](Wide x, Wide, Wide) { return Wide(x == 0); }},
  };
}

template <class T>
std::vector<T> awkward_integers() {
  using L = std::numeric_limits<T>;
  std::vector<T> values = {0,           1, 2, 3, 5, 7, 10, 64, 100, 127, L::min(), L::max(), L::max() - 1, L::min() + 1,
                           L::max() / 2};
  if (std::is_signed_v<T>) {
    for (int x : {-1, -2, -3, -7, -100}) values.push_back(static_cast<T>(x));
  }
  return values;
}

template <class T>
void test_integers() {
  std::vector<T> a, b, c;
  for (T x : awkward_integers<T>()) {
    for (T y : awkward_integers<T>()) {
      a.push_back(x);
      b.push_back(y);
      c.push_back(static_cast<T>(x ^ y));
    }
  }
  Params params;
  params.i[0] = kP0;
  params.i[1] = kP1;
  for_each_target([&](const char* target) {
    for (const Case& test : cases()) {
      const void* in[3] = {a.data(), b.data(), c.data()};
      std::vector<T> out(a.size());
      const Loop loop = pointwise_loop(test.op, dtype_of<T>);
      ASSERT_NE(loop, nullptr) << info(test.op).name;
      loop(in, out.data(), static_cast<int64_t>(a.size()), params);
      const auto* truths = reinterpret_cast<const uint8_t*>(out.data());
      for (size_t i = 0; i < a.size(); ++i) {
        const Wide exact = test.reference(a[i], b[i], c[i]);
        const bool is_predicate = info(test.op).kind == ScalarKind::kPredicate;
        ASSERT_TRUE(is_predicate ? truths[i] == exact : out[i] == static_cast<T>(exact))
            << target << " " << info(test.op).name << " " << dtype_of<T> << " of " << int64_t{a[i]} << ", "
            << int64_t{b[i]};
      }
    }
  });
}
TEST(PointwiseInteger, ExactModuloTheTypeU8) { test_integers<uint8_t>(); }
TEST(PointwiseInteger, ExactModuloTheTypeI8) { test_integers<int8_t>(); }
TEST(PointwiseInteger, ExactModuloTheTypeI16) { test_integers<int16_t>(); }
TEST(PointwiseInteger, ExactModuloTheTypeI32) { test_integers<int32_t>(); }
TEST(PointwiseInteger, ExactModuloTheTypeI64) { test_integers<int64_t>(); }

TEST(PointwiseInteger, EveryIntegerOperationIsTested) {
  std::vector<bool> tested(kScalarOpCount, false);
  for (const Case& test : cases()) tested[static_cast<size_t>(test.op)] = true;
  for (int i = 0; i < kScalarOpCount; ++i) {
    const ScalarInfo& row = info(static_cast<ScalarOp>(i));
    if ((row.dtypes & domain::I) == 0 || row.kind == ScalarKind::kMasked) continue;
    EXPECT_TRUE(tested[static_cast<size_t>(i)]) << row.name;
  }
}

TEST(PointwiseInteger, ParametersOfI64AreExact) {
  const int64_t x = 1;
  int64_t out = 0;
  Params params;
  params.i[0] = (int64_t{1} << 62) + 1;  // not a double
  const void* in[1] = {&x};
  pointwise_loop(ScalarOp::kAddScalar, DType::kI64)(in, &out, 1, params);
  EXPECT_EQ(out, (int64_t{1} << 62) + 2);
}

// Each row: results for (0,0), (0,1), (1,0), (1,1); unary operations see the first.
TEST(PointwiseBool, TruthTables) {
  using enum ScalarOp;
  struct Row {
    ScalarOp op;
    std::vector<uint8_t> expected;
  };
  const std::vector<Row> rows = {{kAdd, {0, 1, 1, 1}},        {kMul, {0, 0, 0, 1}},        {kMinimum, {0, 0, 0, 1}},
                                 {kMaximum, {0, 1, 1, 1}},    {kBitwiseAnd, {0, 0, 0, 1}}, {kBitwiseOr, {0, 1, 1, 1}},
                                 {kBitwiseXor, {0, 1, 1, 0}}, {kBitwiseNot, {1, 1, 0, 0}}, {kSign, {0, 0, 1, 1}},
                                 {kEq, {1, 0, 0, 1}},         {kNe, {0, 1, 1, 0}},         {kLt, {0, 1, 0, 0}},
                                 {kLe, {1, 1, 0, 1}},         {kGt, {0, 0, 1, 0}},         {kGe, {1, 0, 1, 1}},
                                 {kLogicalAnd, {0, 0, 0, 1}}, {kLogicalOr, {0, 1, 1, 1}},  {kLogicalXor, {0, 1, 1, 0}},
                                 {kLogicalNot, {1, 1, 0, 0}}, {kEqScalar, {0, 0, 1, 1}},   {kNeScalar, {1, 1, 0, 0}},
                                 {kLtScalar, {1, 1, 0, 0}},   {kLeScalar, {1, 1, 1, 1}},   {kGtScalar, {0, 0, 0, 0}},
                                 {kGeScalar, {0, 0, 1, 1}}};
  const uint8_t a[] = {0, 0, 1, 1}, b[] = {0, 1, 0, 1};
  Params params;
  params.i[0] = 1;
  for_each_target([&](const char* target) {
    for (const Row& row : rows) {
      const void* in[2] = {a, b};
      std::vector<uint8_t> out(4);
      pointwise_loop(row.op, DType::kBool)(in, out.data(), 4, params);
      EXPECT_EQ(out, row.expected) << target << " " << info(row.op).name;
    }
  });
}

TEST(PointwiseMasked, WhereAndMaskedFillOfEveryDtypeMoveBytes) {
  for_each_target([](const char* target) {
    for (DType dtype : kAllDTypes) {
      const size_t size = size_of(dtype);
      constexpr size_t kCount = 37;
      std::vector<uint8_t> mask(kCount), a(kCount * size), b(kCount * size), out(kCount * size),
          expected(kCount * size);
      for (size_t i = 0; i < kCount; ++i) mask[i] = i % 3 == 0 ? 1 : 0;
      for (size_t i = 0; i < a.size(); ++i) {
        a[i] = dtype == DType::kBool ? 1 : static_cast<uint8_t>(i % 31 + 1);
        b[i] = dtype == DType::kBool ? 0 : static_cast<uint8_t>(i % 29 + 40);
        expected[i] = mask[i / size] != 0 ? a[i] : b[i];
      }
      const void* in[3] = {mask.data(), a.data(), b.data()};
      pointwise_loop(ScalarOp::kWhere, dtype)(in, out.data(), kCount, Params{});
      EXPECT_EQ(out, expected) << target << " " << dtype;

      // A zero in every dtype is made of zero bytes.
      for (size_t i = 0; i < a.size(); ++i) expected[i] = mask[i / size] != 0 ? 0 : a[i];
      pointwise_loop(ScalarOp::kMaskedFill, dtype)(in, out.data(), kCount, Params{});
      EXPECT_EQ(out, expected) << target << " " << dtype;
    }
  });
}

TEST(PointwiseMasked, MaskedScaleIsZeroWhereTheMaskIs) {
  for_each_target([](const char*) {
    const float x[3] = {1, 2, std::numeric_limits<float>::infinity()};
    const uint8_t mask[3] = {1, 1, 0};
    float y[3];
    Params params;
    params.f[0] = 1.25;
    const void* in[2] = {mask, x};
    pointwise_loop(ScalarOp::kMaskedScale, DType::kF32)(in, y, 3, params);
    EXPECT_EQ(y[0], 1.25f);
    EXPECT_EQ(y[1], 2.5f);
    EXPECT_EQ(y[2], 0.0f);
  });
}

}  // namespace
}  // namespace chorale::vec
