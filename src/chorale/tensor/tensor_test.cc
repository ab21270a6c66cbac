#include "chorale/tensor/tensor.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/device/sim/sim_device.h"
#include "chorale/testing/message_test_util.h"

namespace chorale {
namespace {

#define EXPECT_PARTS(message, ...)                                                                   \
  do {                                                                                               \
    const std::string whole = message;                                                               \
    for (const std::string part : {__VA_ARGS__}) {                                                   \
      EXPECT_NE(whole.find(part), std::string::npos) << "'" << part << "' is missing in: " << whole; \
    }                                                                                                \
  } while (false)

Tensor counted(const Shape& sizes) {
  std::vector<float> values(static_cast<size_t>(count_elems(sizes)));
  std::iota(values.begin(), values.end(), 0.0f);
  return Tensor::from(values, sizes);
}

TEST(Tensor, AnEmptyOneHasTheAskedForShapeDtypeAndDevice) {
  const Tensor x = Tensor::empty({2, 3}, DType::kBF16);
  EXPECT_EQ(x.sizes(), (Shape{2, 3}));
  EXPECT_EQ(x.strides(), (Strides{3, 1}));
  EXPECT_EQ(x.dtype(), DType::kBF16);
  EXPECT_EQ(x.device(), kCpu);
  EXPECT_EQ(x.dims(), 2);
  EXPECT_EQ(x.elems(), 6);
  EXPECT_EQ(x.elem_bytes(), 2u);
  EXPECT_EQ(x.storage()->bytes(), 12u);
  EXPECT_TRUE(x.is_contiguous());
  EXPECT_EQ(x.size(-1), 3);
  EXPECT_EQ(x.stride(0), 3);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(x.raw()) % memory::kBlockAlignment, 0u);
}

TEST(Tensor, ZeroSizesAndZeroDimensionsAreTensorsLikeOthers) {
  const Tensor none = Tensor::empty({3, 0, 2}, DType::kF32);
  EXPECT_EQ(none.elems(), 0);
  EXPECT_EQ(none.raw(), nullptr);
  EXPECT_TRUE(none.is_contiguous());
  EXPECT_TRUE(none.span<float>().empty());
  EXPECT_TRUE(none.to_vector<double>().empty());
  EXPECT_FALSE(none.overlaps(none));
  const Tensor scalar = Tensor::empty({}, DType::kF32);
  EXPECT_EQ(scalar.elems(), 1);
  EXPECT_EQ(scalar.dims(), 0);
  *scalar.data<float>() = 2;
  EXPECT_EQ(scalar.item<int>(), 2);
  EXPECT_THROW(scalar.size(0), InvalidArgument);
  EXPECT_THROW(scalar.stride(-1), InvalidArgument);
}

TEST(Tensor, ImpossibleShapesAreErrorsThatShowThem) {
  EXPECT_PARTS(message_of<InvalidArgument>([] { Tensor::empty({2, -1}, DType::kF32); }), "[2, -1]");
  EXPECT_PARTS(message_of<InvalidArgument>([] { Tensor::empty(Shape(9, 1), DType::kF32); }), "at most 8", "not 9");
  // 2^61 doubles are 2^64 bytes: the product wraps around to zero.
  EXPECT_PARTS(message_of<InvalidArgument>([] { Tensor::empty({int64_t{1} << 61}, DType::kF64); }),
               "2305843009213693952");
  EXPECT_PARTS(message_of<InvalidArgument>([] { Tensor::empty({int64_t{1} << 50}, DType::kU8); }), "1125899906842624");
  EXPECT_PARTS(message_of<InvalidArgument>([] { Tensor::empty({2}, DType::kF32).size(1); }), "dimension 1",
               "1 dimension;");
}

TEST(Tensor, HandlesAliasOneTensor) {
  const Tensor x = counted({4});
  // NOLINTNEXTLINE(performance-unnecessary-copy-initialization): the copy is what is tested
  const Tensor same = x;
  EXPECT_TRUE(same.is(x));
  same.data<float>()[2] = 20;
  EXPECT_EQ(x.to_vector<int64_t>(), (std::vector<int64_t>{0, 1, 20, 3}));
  EXPECT_EQ(x.use_count(), 2);
}

TEST(Tensor, ViewsAliasTheStorage) {
  const Tensor x = counted({2, 3});
  const Tensor transposed = x.view_as({3, 2}, {1, 3}, 0);
  EXPECT_FALSE(transposed.is_contiguous());
  EXPECT_EQ(transposed.to_vector<int64_t>(), (std::vector<int64_t>{0, 3, 1, 4, 2, 5}));
  const Tensor row = x.view_as({3}, {1}, 3);
  EXPECT_EQ(row.raw(), x.data<float>() + 3);
  row.data<float>()[0] = 30;
  EXPECT_EQ(transposed.to_vector<int64_t>()[1], 30);
  EXPECT_EQ(row.storage(), x.storage());
  const Tensor expanded = x.view_as({2, 2}, {0, 1}, 0);
  EXPECT_EQ(expanded.to_vector<int64_t>(), (std::vector<int64_t>{0, 1, 0, 1}));
}

TEST(Tensor, AStorageLivesAsLongAsItsLastView) {
  const size_t before = cpu_allocator().stats().current_bytes;
  Tensor view;
  {
    const Tensor x = counted({1000});
    view = x.view_as({2}, {1}, 998);
  }
  EXPECT_GT(cpu_allocator().stats().current_bytes, before);
  EXPECT_EQ(view.to_vector<int64_t>(), (std::vector<int64_t>{998, 999}));
  view = Tensor();
  EXPECT_EQ(cpu_allocator().stats().current_bytes, before);
}

TEST(Tensor, AnAliasIsAnotherTensorOnTheSameBytes) {
  const Tensor x = counted({2, 3});
  const Tensor alias = x.view_as({3, 2}, {1, 3}, 0).alias();
  EXPECT_FALSE(alias.is(x));
  EXPECT_EQ(alias.raw(), x.raw());
  EXPECT_EQ(alias.strides(), (Strides{1, 3}));
  EXPECT_FALSE(alias.is_contiguous());
  EXPECT_EQ(alias.to_vector<int64_t>(), (std::vector<int64_t>{0, 3, 1, 4, 2, 5}));
}

TEST(Tensor, SetDataRedirectsEveryHandle) {
  const Tensor x = counted({2, 3});
  // NOLINTNEXTLINE(performance-unnecessary-copy-initialization): the copy is what is tested
  const Tensor handle = x;
  const Tensor other = Tensor::from({7.5, 8.5}, {2});
  x.set_data(other);
  EXPECT_EQ(handle.dtype(), DType::kF64);
  EXPECT_EQ(handle.to_vector<double>(), (std::vector<double>{7.5, 8.5}));
  other.data<double>()[0] = 1;
  EXPECT_EQ(handle.to_vector<double>()[0], 1);
}

TEST(Tensor, FromCopiesAndChecksTheCount) {
  std::vector<int16_t> values{1, 2, 3, 4};
  const Tensor x = Tensor::from(values, {2, 2});
  values[0] = 99;
  EXPECT_EQ(x.dtype(), DType::kI16);
  EXPECT_EQ(x.to_vector<int16_t>(), (std::vector<int16_t>{1, 2, 3, 4}));
  EXPECT_EQ(Tensor::from({1.5f, 2.5f}, {2}).to_vector<float>(), (std::vector<float>{1.5f, 2.5f}));
  const Tensor truths = Tensor::from(std::vector<bool>{true, false, true}, {3});
  EXPECT_EQ(truths.dtype(), DType::kBool);
  EXPECT_EQ(truths.to_vector<bool>(), (std::vector<bool>{true, false, true}));
  EXPECT_PARTS(message_of<InvalidArgument>([&] { Tensor::from(values, {3}); }), "4 values", "[3]");
  EXPECT_PARTS(message_of<InvalidArgument>([] { Tensor::from(std::vector<bool>{true}, {2}); }), "1 values", "[2]");
}

TEST(Tensor, ValuesOfTheHostGoToAnyDevice) {
  sim::add_device();
  const Device sim{DeviceType::kSim, 1};
  std::vector<double> values{1.5, 2.5, 3.5, 4.5};
  const Tensor x = Tensor::from(values, {2, 2}, sim);
  values[0] = 99;  // the copy is complete
  EXPECT_EQ(x.device(), sim);
  EXPECT_EQ(x.to_vector<double>(), (std::vector<double>{1.5, 2.5, 3.5, 4.5}));
  EXPECT_EQ(Tensor::from({int64_t{7}}, {1}, sim).item<int64_t>(), 7);
  const Tensor truths = Tensor::from(std::vector<bool>{true, false}, {2}, sim);
  EXPECT_EQ(truths.device(), sim);
  EXPECT_EQ(truths.to_vector<bool>(), (std::vector<bool>{true, false}));
  const Tensor one = Tensor::scalar(0.25, DType::kBF16, sim);
  EXPECT_EQ(one.device(), sim);
  EXPECT_EQ(one.item<float>(), 0.25f);
  const Tensor shape_only = Tensor::from(values, {4}, kNull);
  EXPECT_EQ(shape_only.device(), kNull);
  EXPECT_EQ(shape_only.sizes(), (Shape{4}));
  EXPECT_EQ(Tensor::scalar(1, DType::kI8, kNull).device(), kNull);
}

TEST(Tensor, BorrowedMemoryIsSharedBothWaysAndReleasedOnce) {
  std::vector<float> values{1, 2, 3, 4};
  int released = 0;
  {
    const Tensor x = Tensor::borrow(std::span(values), {2, 2}, [&] { ++released; });
    EXPECT_EQ(x.raw(), values.data());
    values[1] = 20;
    x.data<float>()[2] = 30;
    EXPECT_EQ(x.to_vector<int64_t>(), (std::vector<int64_t>{1, 20, 30, 4}));
    const Tensor view = x.view_as({2}, {1}, 2);
    EXPECT_EQ(released, 0);
  }
  EXPECT_EQ(values[2], 30);
  EXPECT_EQ(released, 1);
}

TEST(Tensor, ARefusedBorrowReleasesNothing) {
  std::vector<float> values(4);
  int released = 0;
  const auto release = [&] { ++released; };
  EXPECT_PARTS(message_of<InvalidArgument>([&] { Tensor::borrow(std::span(values), {5}, release); }), "4 values",
               "[5]");
  EXPECT_THROW(Tensor::borrow(std::span(values), {1, 1, 1, 1, 1, 1, 1, 2, 2}, release), InvalidArgument);
  EXPECT_EQ(released, 0);
}

TEST(Tensor, ConstantMemoryGivesAReadOnlyTensor) {
  const std::vector<double> values{1, 2};
  const Tensor x = Tensor::borrow(std::span(values), {2});
  EXPECT_EQ(x.raw(), values.data());
  EXPECT_TRUE(x.storage()->read_only());
  EXPECT_EQ(x.to_vector<double>(), values);
  EXPECT_FALSE(Tensor::borrow(std::span(const_cast<std::vector<double>&>(values)), {2}).storage()->read_only());
}

TEST(Tensor, StorageCanBePlacedInMemoryThatACallerProvides) {
  // One buffer for two tensors of different dtypes, as a bucket or an arena of a file would do it.
  alignas(64) std::array<std::byte, 128> room{};
  int released = 0;
  {
    const auto storage = Storage::wrap(room.data(), room.size(), kCpu, [&] { ++released; });
    const Tensor x = Tensor::on(storage, {2, 3}, {3, 1}, 0, DType::kF32);
    const Tensor y = Tensor::on(storage, {4}, {1}, 8, DType::kF64);  // from byte 64
    EXPECT_EQ(y.raw(), room.data() + 64);
    for (float& value : x.span<float>()) value = 1;
    for (double& value : y.span<double>()) value = 2;
    EXPECT_EQ(x.to_vector<int>(), std::vector<int>(6, 1));
    EXPECT_FALSE(x.overlaps(y));
    EXPECT_TRUE(y.overlaps(Tensor::on(storage, {1}, {1}, 127, DType::kU8).view_as({64}, {1}, 64)));
  }
  EXPECT_EQ(released, 1);
  EXPECT_EQ(room[67], std::byte{0});
  EXPECT_EQ(room[71], std::byte{0x40});  // 2.0
}

TEST(Tensor, AViewBeyondItsStorageIsAnErrorWithTheReach) {
  const auto storage = Storage::allocate(10 * sizeof(float), kCpu);
  const auto on = [&](const Shape& sizes, const Strides& strides, int64_t offset) {
    return message_of<InvalidArgument>([&] { Tensor::on(storage, sizes, strides, offset, DType::kF32); });
  };
  EXPECT_EQ(on({2, 5}, {5, 1}, 0), "");
  EXPECT_EQ(on({5}, {-2}, 9), "");
  EXPECT_PARTS(on({2, 5}, {5, 1}, 1), "elements 1 to 10", "storage of 10");
  EXPECT_PARTS(on({6}, {-2}, 9), "elements -1 to 9");
  EXPECT_PARTS(on({1}, {1}, -1), "-1 to -1");
  EXPECT_PARTS(on({2}, {1, 1}, 0), "1 sizes but 2 strides");
  // Products and sums that wrap around must not slip through.
  const int64_t huge = int64_t{1} << 62;
  EXPECT_PARTS(on({5}, {huge}, 0), "counted");
  EXPECT_PARTS(on({3, 3}, {huge - 1, huge - 1}, 0), "counted");
  EXPECT_PARTS(on({2}, {1}, std::numeric_limits<int64_t>::max()), "counted");
  EXPECT_PARTS(on({2}, {-1}, std::numeric_limits<int64_t>::min()), "counted");
  // A view without elements touches nothing, wherever it is.
  EXPECT_EQ(on({0}, {1}, 10), "");
  EXPECT_EQ(Tensor::on(storage, {0, 3}, {3, 1}, 1000, DType::kF32).raw(), nullptr);
  EXPECT_THROW(Tensor::on({}, {1}, {1}, 0, DType::kF32), InvalidArgument);
}

TEST(Tensor, UnalignedMemoryIsRefused) {
  alignas(8) std::array<std::byte, 64> room{};
  const auto storage = Storage::wrap(room.data() + 1, 32, kCpu);
  EXPECT_PARTS(message_of<InvalidArgument>([&] { Tensor::on(storage, {4}, {1}, 0, DType::kF64); }), "not aligned",
               "f64");
  EXPECT_THROW(Tensor::on(storage, {4}, {1}, 0, DType::kBF16), InvalidArgument);
  EXPECT_EQ(Tensor::on(storage, {4}, {1}, 0, DType::kU8).elems(), 4);
}

TEST(Tensor, EmptyStridedReservesExactlyItsReach) {
  const Tensor x = Tensor::empty_strided({2, 3}, {1, 2}, DType::kF32);
  EXPECT_EQ(x.storage()->bytes(), 24u);
  EXPECT_EQ(x.strides(), (Strides{1, 2}));
  EXPECT_EQ(Tensor::empty_strided({2, 3}, {10, 1}, DType::kU8).storage()->bytes(), 13u);
  EXPECT_EQ(Tensor::empty_strided({100}, {0}, DType::kF64).storage()->bytes(), 8u);
  EXPECT_EQ(Tensor::empty_strided({0, 3}, {7, 7}, DType::kF64).storage()->bytes(), 0u);
  EXPECT_PARTS(message_of<InvalidArgument>([] { Tensor::empty_strided({2}, {-1}, DType::kF32); }), "[-1]");
  EXPECT_THROW(Tensor::empty_strided({2, 2}, {1}, DType::kF32), InvalidArgument);
  EXPECT_THROW(Tensor::empty_strided({-2}, {1}, DType::kF32), InvalidArgument);
  EXPECT_THROW(Tensor::empty_strided({3}, {int64_t{1} << 62}, DType::kF32), InvalidArgument);
  EXPECT_THROW(Tensor::empty_strided({2}, {kMaxElems}, DType::kF64), InvalidArgument);
}

// 0, 1 and 2 exist in every dtype but bool, so any pair can be compared through them.
TEST(Tensor, ElementsConvertBetweenAllDTypes) {
  for (const DType from : kAllDTypes) {
    const Tensor x = visit_dtype(from, [](auto tag) {
      using T = typename decltype(tag)::type;
      std::vector<T> values;
      for (const int value : {0, 1, 2}) values.push_back(Scalar(value).to<T>());
      return Tensor::from(values, {3});
    });
    EXPECT_EQ(x.dtype(), from);
    for (const DType to : kAllDTypes) {
      visit_dtype(to, [&](auto tag) {
        using T = typename decltype(tag)::type;
        const std::vector<T> found = x.to_vector<T>();
        ASSERT_EQ(found.size(), 3u);
        for (size_t i = 0; i < 3; ++i) {
          const Scalar expected = from == DType::kBool ? Scalar(i > 0) : Scalar(i);
          EXPECT_EQ(static_cast<T>(found[i]), expected.to<T>()) << from << " to " << to << " " << i;
          EXPECT_EQ(x.view_as({}, {}, static_cast<int64_t>(i)).item<T>(), expected.to<T>());
        }
      });
    }
  }
}

TEST(Tensor, ConversionKeepsWhatTheTargetCanHold) {
  const int64_t odd = (int64_t{1} << 53) + 1;
  EXPECT_EQ(Tensor::from({odd}, {1}).item<int64_t>(), odd);
  EXPECT_EQ(Tensor::from({complex64(1, 2)}, {1}).item<complex128>(), complex128(1, 2));
  EXPECT_EQ(Tensor::from({complex64(1, 2)}, {1}).item<float>(), 1);
  EXPECT_TRUE(std::isnan(Tensor::from({float16(NAN)}, {1}).item<double>()));
  EXPECT_EQ(Tensor::from({-HUGE_VAL}, {1}).item<float>(), -HUGE_VALF);
  EXPECT_TRUE(Tensor::from({0.25f}, {1}).item<bool>());
  // Bits pass unchanged when nothing is converted.
  float16 signalling;
  signalling.bits = 0x7d01;
  EXPECT_EQ(Tensor::from({signalling}, {1}).item<float16>().bits, 0x7d01);
}

TEST(Tensor, ScalarMakesAZeroDimensionalTensorOfAnyDType) {
  for (const DType dtype : kAllDTypes) {
    const Tensor x = Tensor::scalar(1, dtype);
    EXPECT_EQ(x.dims(), 0);
    EXPECT_EQ(x.dtype(), dtype);
    EXPECT_EQ(x.item<double>(), 1);
  }
}

TEST(Tensor, ItemNeedsExactlyOneElement) {
  EXPECT_EQ(counted({1, 1, 1}).item<float>(), 0);
  EXPECT_PARTS(message_of<InvalidArgument>([] { (void)counted({2, 3}).item<float>(); }), "[2, 3]", "6");
  EXPECT_PARTS(message_of<InvalidArgument>([] { (void)counted({0}).item<float>(); }), "[0]");
}

TEST(Tensor, AccessChecksDTypeContiguityAndDevice) {
  const Tensor x = counted({2, 3});
  EXPECT_PARTS(message_of<InvalidArgument>([&] { (void)x.data<double>(); }), "f64", "f32");
  EXPECT_EQ(x.data<const float>(), x.raw());
  EXPECT_PARTS(message_of<InvalidArgument>([&] {
                 (void)x.view_as({3, 2}, {1, 3}, 0).span<float>();
               }),
               "[3, 2]", "[1, 3]");
  EXPECT_PARTS(message_of<StateError>([] { (void)Tensor::empty({2}, DType::kF32, kNull).data<float>(); }), "null");
  EXPECT_PARTS(message_of<InvalidArgument>([] { (void)Tensor().data<float>(); }), "undefined");
  EXPECT_PARTS(message_of<InvalidArgument>([] { (void)Tensor().span<float>(); }), "undefined");
  EXPECT_PARTS(message_of<InvalidArgument>([] { (void)Tensor().item<float>(); }), "undefined");
  EXPECT_PARTS(message_of<InvalidArgument>([] { (void)Tensor().to_vector<float>(); }), "undefined");
}

TEST(Tensor, TheNullDeviceHasShapesOfAnySizeAndViews) {
  const Tensor x = Tensor::empty({1 << 20, 1 << 20}, DType::kF64, kNull);
  EXPECT_EQ(x.elems(), int64_t{1} << 40);
  EXPECT_EQ(x.raw(), nullptr);
  const Tensor view = x.view_as({5}, {3}, 7);
  EXPECT_EQ(view.raw(), nullptr);
  EXPECT_EQ(view.offset(), 7);
  EXPECT_TRUE(view.overlaps(x));
  EXPECT_FALSE(view.overlaps(Tensor::empty({5}, DType::kF64, kNull)));
}

TEST(Tensor, OverlapIsOfStretchesOfMemory) {
  const Tensor x = counted({4, 4});
  const auto row = [&](int64_t i) { return x.view_as({4}, {1}, 4 * i); };
  const auto column = [&](int64_t i) { return x.view_as({4}, {4}, i); };
  EXPECT_TRUE(x.overlaps(x));
  EXPECT_TRUE(x.overlaps(row(3)));
  EXPECT_FALSE(row(0).overlaps(row(1)));
  EXPECT_TRUE(column(0).overlaps(column(1)));  // they interleave
  EXPECT_FALSE(x.overlaps(counted({4, 4})));
  EXPECT_TRUE(x.view_as({4}, {-1}, 7).overlaps(row(1)));
  EXPECT_FALSE(x.view_as({4}, {-1}, 7).overlaps(row(2)));
  EXPECT_FALSE(x.view_as({4}, {-1}, 7).overlaps(row(0)));
  // Two storages on the same memory.
  std::array<float, 4> memory{};
  const Tensor a = Tensor::borrow(std::span<float>(memory), {4}),
               b = Tensor::borrow(std::span<float>(memory).subspan(2), {2});
  EXPECT_TRUE(a.overlaps(b));
  EXPECT_FALSE(a.view_as({2}, {1}, 0).overlaps(b));
}

TEST(Tensor, HandlesOfOneTensorMayComeAndGoOnManyThreads) {
  const Tensor x = counted({100});
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([x] {
      for (int i = 0; i < 500; ++i) {
        // NOLINTNEXTLINE(performance-unnecessary-copy-initialization): the copy is what is tested
        const Tensor copy = x;
        const Tensor view = copy.view_as({10}, {10}, i % 10);
        EXPECT_EQ(view.to_vector<int64_t>()[9], 90 + i % 10);
        const Tensor own = counted({i % 50});
        EXPECT_EQ(own.elems(), i % 50);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(x.use_count(), 1);
}

// Stands for a value of a trace.
struct FakeTrace final : TensorExtension {
  explicit FakeTrace(int number) : TensorExtension(Kind::kTraced), value(number) {}
  std::unique_ptr<TensorExtension> copy() const override { return std::make_unique<FakeTrace>(value); }
  std::string why_no_bytes(const Tensor& tensor) const override {
    return concat("value ", value, " of shape ", tensor.sizes(), " is traced; return it first");
  }
  int value;
};

TEST(TensorExtension, StandsForBytesAndIsNamedWhereTheyAreAskedFor) {
  const Tensor x = Tensor::without_bytes({2, 3}, {1, 2}, DType::kF64, kCpu, std::make_unique<FakeTrace>(7));
  EXPECT_TRUE(x.is_traced());
  EXPECT_FALSE(x.is_sparse());
  EXPECT_EQ(x.sizes(), (Shape{2, 3}));
  EXPECT_EQ(x.strides(), (Strides{1, 2}));
  EXPECT_EQ(x.device(), kCpu);
  EXPECT_FALSE(x.is_contiguous());
  const std::string why = "[data] value 7 of shape [2, 3] is traced; return it first";
  EXPECT_EQ(message_of<std::exception>([&] { x.raw(); }), why);
  EXPECT_EQ(message_of<std::exception>([&] { x.data<double>(); }), why);
  EXPECT_EQ(message_of<std::exception>([&] { x.to_vector<double>(); }), why);
}

TEST(TensorExtension, AnAliasHasACopyAndAViewHasNone) {
  const Tensor x = Tensor::without_bytes({2, 3}, {3, 1}, DType::kF64, kCpu, std::make_unique<FakeTrace>(7));
  const Tensor alias = x.alias(), view = x.view_as({3}, {1}, 0);
  ASSERT_TRUE(alias.is_traced());
  EXPECT_NE(alias.extension(), x.extension());
  EXPECT_EQ(static_cast<const FakeTrace*>(alias.extension())->value, 7);
  EXPECT_EQ(view.extension(), nullptr);
}

// Its bytes come when they are asked for.
struct LateBytes final : TensorExtension {
  explicit LateBytes(std::vector<std::string>& log) : TensorExtension(Kind::kTraced), asked_for(log) {}
  std::unique_ptr<TensorExtension> copy() const override { return std::make_unique<LateBytes>(asked_for); }
  std::string why_no_bytes(const Tensor&) const override { return "never"; }
  bool provide_bytes(const Tensor& tensor, const char* asked) override {
    asked_for.emplace_back(asked);
    Storage& storage = *tensor.storage();
    if (!storage.data()) storage.take_bytes_of(*counted(tensor.sizes()).storage());
    tensor.impl()->data = storage.data();
    tensor.impl()->extension = nullptr;
    return true;
  }
  std::vector<std::string>& asked_for;
};

TEST(TensorExtension, MayProvideBytesOnceTheyAreAskedFor) {
  std::vector<std::string> asked;
  const auto late = [&](const Shape& sizes) {
    return Tensor::without_bytes(sizes, contiguous_strides(sizes), DType::kF32, kCpu,
                                 std::make_unique<LateBytes>(asked));
  };
  const Tensor x = late({2, 2}), alias = x.alias();
  x.storage()->note_write("a write before there were bytes");
  EXPECT_EQ(x.storage()->bytes(), 16u);
  EXPECT_EQ(x.to_vector<float>(), (std::vector<float>{0, 1, 2, 3}));
  EXPECT_FALSE(x.is_traced());
  EXPECT_EQ(x.to_vector<float>().size(), 4u);  // asks no further
  EXPECT_EQ(x.storage()->version(), 1u);       // the storage is the one that it was
  EXPECT_EQ(alias.raw(), x.raw());
  EXPECT_EQ(late({1}).item<float>(), 0);
  EXPECT_EQ(to_string(late({2})), to_string(counted({2})));
  EXPECT_EQ(asked, (std::vector<std::string>{"to_vector()", "a pointer to its bytes", "item()", "printing"}));
}

TEST(UndefinedTensor, IsAnErrorThatNamesTheFunctionInEveryAccessor) {
  const Tensor none;
  const auto expect = [&](const char* function, auto&& call) {
    EXPECT_EQ(
        message_of<InvalidArgument>([&] { (void)call(); }).find(concat("[", function, "] this tensor is undefined")),
        0u)
        << function;
  };
  expect("sizes", [&] { return none.sizes().size(); });
  expect("strides", [&] { return none.strides().size(); });
  expect("dtype", [&] { return none.dtype(); });
  expect("item", [&] { return none.item<float>(); });
  expect("to_vector", [&] { return none.to_vector<float>().size(); });
  expect("device", [&] { return none.device(); });
  expect("dims", [&] { return none.dims(); });
  expect("size", [&] { return none.size(0); });
  expect("stride", [&] { return none.stride(0); });
  expect("elems", [&] { return none.elems(); });
  expect("raw", [&] { return none.raw(); });
  expect("extension", [&] { return none.is_sparse(); });
  expect("storage", [&] { return none.storage()->bytes(); });
  expect("alias", [&] { return none.alias(); });
  expect("use_count", [&] { return none.use_count(); });
  expect("data", [&] { return none.data<float>(); });
}

}  // namespace
}  // namespace chorale
