// What every pointwise loop promises whatever it computes: any length, in-place, repeated inputs, no access outside.
#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "chorale/vec/expression.h"
#include "chorale/vec/loops.h"
#include "chorale/vec/vec_test_util.h"

namespace chorale::vec {
namespace {

constexpr int64_t kSizes[] = {0, 1, 3, 7, 8, 15, 16, 17, 31, 33, 64, 100, 1000};
constexpr int64_t kLargest = 1000;
constexpr uint8_t kGuard = 0xa5;
constexpr size_t kGuardBytes = 128;

size_t input_size(const ScalarInfo& op, int k, DType dtype) {
  return op.kind == ScalarKind::kMasked && k == 0 ? 1 : size_of(dtype);
}
size_t output_size(const ScalarInfo& op, DType dtype) {
  if (op.kind == ScalarKind::kPredicate) return 1;
  return size_of(op.kind == ScalarKind::kToReal ? real_of(dtype) : dtype);
}

// Moderate values of the dtype (positive where logarithms want it, small where integers are raised to powers).
std::vector<uint8_t> values(DType dtype, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(static_cast<size_t>(kLargest) * size_of(dtype));
  const auto fill = [&]<class T>(T*) {
    for (size_t i = 0; i < bytes.size() / sizeof(T); ++i) {
      T value;
      if constexpr (std::is_integral_v<T>) {
        value = static_cast<T>(random() % 5 + 1);
      } else {
        value = static_cast<T>(0.25f + static_cast<float>(random() % 1000) / 250);
      }
      std::memcpy(bytes.data() + i * sizeof(T), &value, sizeof(T));
    }
  };
  switch (real_of(dtype)) {
    case DType::kBool:
      for (uint8_t& byte : bytes) byte = random() % 2;
      break;
    case DType::kU8:
      fill(static_cast<uint8_t*>(nullptr));
      break;
    case DType::kI8:
      fill(static_cast<int8_t*>(nullptr));
      break;
    case DType::kI32:
      fill(static_cast<int32_t*>(nullptr));
      break;
    case DType::kI64:
      fill(static_cast<int64_t*>(nullptr));
      break;
    case DType::kF32:
      fill(static_cast<float*>(nullptr));
      break;
    case DType::kF64:
      fill(static_cast<double*>(nullptr));
      break;
    case DType::kI16:
      fill(static_cast<int16_t*>(nullptr));
      break;
    case DType::kF16:
      fill(static_cast<float16*>(nullptr));
      break;
    default:
      fill(static_cast<bfloat16*>(nullptr));
  }
  return bytes;
}

Params parameters() {
  Params params;
  for (size_t k = 0; k < 4; ++k) params.i[k] = static_cast<int64_t>(k) + 1;
  for (size_t k = 0; k < 4; ++k) params.f[k] = static_cast<double>(k) + 0.5;
  return params;
}

struct LoopCase {
  ScalarOp op;
  DType dtype;
  const ScalarInfo& row = info(op);
  std::vector<uint8_t> inputs[3] = {};

  LoopCase(ScalarOp op_, DType dtype_) : op(op_), dtype(dtype_) {
    for (int k = 0; k < row.input_count; ++k) {
      const bool is_mask = row.kind == ScalarKind::kMasked && k == 0;
      inputs[k] = values(is_mask ? DType::kBool : dtype, static_cast<uint32_t>(k) + 1);
    }
  }
  void call(const void* const* in, void* out, int64_t n, uint32_t broadcast = 0) const {
    Params params = parameters();
    params.broadcast = broadcast;
    pointwise_loop(op, dtype)(in, out, n, params);
  }
  // Element by element.
  std::vector<uint8_t> expected(uint32_t broadcast = 0) const {
    const size_t size = output_size(row, dtype);
    std::vector<uint8_t> out(static_cast<size_t>(kLargest) * size);
    for (size_t i = 0; i < static_cast<size_t>(kLargest); ++i) {
      const void* in[3];
      for (int k = 0; k < row.input_count; ++k) {
        in[k] = inputs[k].data() + ((broadcast >> k & 1) != 0 ? 0 : i) * input_size(row, k, dtype);
      }
      call(in, out.data() + i * size, 1);
    }
    return out;
  }
};

template <class Body>
void for_each_loop(Body body) {
  for_each_target([&](const char* target) {
    for (int i = 0; i < kScalarOpCount; ++i) {
      for (DType dtype : kAllDTypes) {
        const auto op = static_cast<ScalarOp>(i);
        if (pointwise_loop(op, dtype) == nullptr) continue;
        SCOPED_TRACE(concat(target, " ", info(op).name, " ", dtype));
        body(LoopCase(op, dtype));
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  });
}

TEST(Pointwise, AnyLengthGivesTheElementsAndWritesNothingElse) {
  for_each_loop([](const LoopCase& run) {
    const std::vector<uint8_t> expected = run.expected();
    const size_t size = output_size(run.row, run.dtype);
    for (int64_t n : kSizes) {
      // Exact-size heap copies, so that AddressSanitizer sees any read past the end.
      std::vector<uint8_t> exact[3];
      const void* in[3];
      for (int k = 0; k < run.row.input_count; ++k) {
        const size_t bytes = static_cast<size_t>(n) * input_size(run.row, k, run.dtype);
        exact[k].assign(run.inputs[k].begin(), run.inputs[k].begin() + static_cast<int64_t>(bytes));
        in[k] = exact[k].data();
      }
      const size_t bytes = static_cast<size_t>(n) * size;
      std::vector<uint8_t> out(bytes + 2 * kGuardBytes, kGuard);
      run.call(in, out.data() + kGuardBytes, n);
      ASSERT_EQ(std::memcmp(out.data() + kGuardBytes, expected.data(), bytes), 0) << "n = " << n;
      for (size_t i = 0; i < kGuardBytes; ++i) {
        ASSERT_EQ(out[i], kGuard) << "n = " << n;
        ASSERT_EQ(out[kGuardBytes + bytes + i], kGuard) << "n = " << n;
      }
    }
  });
}

TEST(Pointwise, TheResultMayReplaceAnInput) {
  for_each_loop([](const LoopCase& run) {
    const std::vector<uint8_t> expected = run.expected();
    for (int replaced = 0; replaced < run.row.input_count; ++replaced) {
      if (input_size(run.row, replaced, run.dtype) != output_size(run.row, run.dtype)) continue;
      std::vector<uint8_t> out = run.inputs[replaced];
      const void* in[3] = {run.inputs[0].data(), run.inputs[1].data(), run.inputs[2].data()};
      in[replaced] = out.data();
      run.call(in, out.data(), kLargest);
      ASSERT_EQ(out, expected) << "input " << replaced;
    }
  });
}

TEST(Pointwise, ARepeatedInputEqualsACopiedOne) {
  for_each_loop([](const LoopCase& run) {
    for (uint32_t broadcast = 1; broadcast < 1u << run.row.input_count; ++broadcast) {
      const std::vector<uint8_t> expected = run.expected(broadcast);
      const size_t size = output_size(run.row, run.dtype);
      for (int64_t n : {int64_t{1}, int64_t{17}, kLargest}) {
        std::vector<uint8_t> out(static_cast<size_t>(n) * size);
        const void* in[3] = {run.inputs[0].data(), run.inputs[1].data(), run.inputs[2].data()};
        run.call(in, out.data(), n, broadcast);
        ASSERT_EQ(std::memcmp(out.data(), expected.data(), out.size()), 0) << "n = " << n << ", mask " << broadcast;
      }
    }
  });
}

template <class Half>
void test_half_loops() {
  for_each_target([](const char* target) {
    for (int i = 0; i < kScalarOpCount; ++i) {
      const auto op = static_cast<ScalarOp>(i);
      if ((info(op).dtypes & domain::F) == 0) continue;
      if (op == ScalarOp::kGeluErf && dtype_of<Half> == DType::kBF16) continue;  // GeluOfBF16… below
      const LoopCase halves(op, dtype_of<Half>);
      LoopCase floats(op, DType::kF32);
      const int first = info(op).kind == ScalarKind::kMasked ? 1 : 0;
      for (int k = first; k < info(op).input_count; ++k) {
        convert_loop(dtype_of<Half>, DType::kF32)(halves.inputs[k].data(), floats.inputs[k].data(), kLargest);
      }
      std::vector<uint8_t> wide = floats.expected();
      if (info(op).kind != ScalarKind::kPredicate) {
        std::vector<uint8_t> rounded(wide.size() / 2);
        convert_loop(DType::kF32, dtype_of<Half>)(wide.data(), rounded.data(), kLargest);
        wide = rounded;
      }
      ASSERT_EQ(halves.expected(), wide) << target << " " << info(op).name;
    }
  });
}
TEST(Pointwise, F16EqualsF32RoundedOnce) { test_half_loops<float16>(); }
TEST(Pointwise, BF16EqualsF32RoundedOnce) { test_half_loops<bfloat16>(); }

// Every number of bf16. Within 2^-12 before it is rounded, so at most a sixteenth of the last place from the nearest.
TEST(Pointwise, GeluOfBF16IsNearTheExactValueEverywhere) {
  std::vector<bfloat16> x(1 << 16), y(x.size());
  for (size_t i = 0; i < x.size(); ++i) x[i].bits = static_cast<uint16_t>(i);
  for_each_target([&](const char* target) {
    const void* in[1] = {x.data()};
    pointwise_loop(ScalarOp::kGeluErf, DType::kBF16)(in, y.data(), static_cast<int64_t>(y.size()), {});
    for (size_t i = 0; i < x.size(); ++i) {
      const auto from = static_cast<double>(static_cast<float>(x[i]));
      const auto made = static_cast<double>(static_cast<float>(y[i]));
      if (std::isnan(from)) {
        ASSERT_TRUE(std::isnan(made)) << target << " " << i;
      } else if (std::isinf(from)) {
        ASSERT_EQ(made, from > 0 ? from : 0) << target;
      } else {
        const double exact = from * 0.5 * std::erfc(-from * std::sqrt(0.5));
        const double place = std::max(std::ldexp(1.0, std::ilogb(exact) - 7), 0x1p-133);
        // The far tail is 4 % off, at less than 1e-7.
        const double allowed = from < -5.1 ? 0.05 * std::abs(exact) + place : (0.5 + 1 / 16.0) * place;
        ASSERT_NEAR(made, exact, allowed) << target << " of " << from;
        ASSERT_EQ(std::signbit(made), std::signbit(from)) << target << " of " << from;
      }
    }
  });
}

TEST(Pointwise, LoopsExistExactlyWhereTheTableSaysSo) {
  for_each_target([](const char* target) {
    for (int i = 0; i < kScalarOpCount; ++i) {
      for (DType dtype : kAllDTypes) {
        const auto op = static_cast<ScalarOp>(i);
        const bool expected = (info(op).dtypes & domain::of(dtype)) != 0;
        EXPECT_EQ(pointwise_loop(op, dtype) != nullptr, expected) << target << " " << info(op).name << " " << dtype;
      }
    }
  });
}

TEST(ScalarOps, KeepTheTextOfTheirExpression) {
  EXPECT_EQ(text_of(ScalarOp::kTanhBackward), "mul(dy, sub(1, mul(y, y)))");
  EXPECT_STREQ(info(ScalarOp::kTanhBackward).inputs, "(dy, y)");
  EXPECT_EQ(info(ScalarOp::kTanhBackward).input_count, 2);
  EXPECT_EQ(info(ScalarOp::kLt).kind, ScalarKind::kPredicate);
}

TEST(Target, AnUnknownNameIsAnError) { EXPECT_THROW(force_target("AVX99"), InvalidArgument); }

}  // namespace
}  // namespace chorale::vec
