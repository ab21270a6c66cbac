#include "chorale/op/index.h"

#include "chorale/base/parallel_for.h"
#include "chorale/op/builder.h"
#include "chorale/op/defs/tensor_test_util.h"
#include "chorale/op/pointwise.h"

namespace chorale {
namespace {

using testing::HasSubstr;

Tensor ints(const std::vector<int64_t>& list) { return Tensor::from(list, {static_cast<int64_t>(list.size())}); }

// Indices below `bound`; some of a dimension's places are named twice.
Tensor random_index(RandomShapes& random, const Shape& sizes, int64_t bound) {
  std::vector<int64_t> list;
  for (int64_t i = count_elems(sizes); i > 0; --i) list.push_back(random.pick(0, bound - 1));
  return Tensor::from(list, sizes);
}

TEST(IndexSelect, TakesSlices) {
  const Tensor x = iota({3, 2});
  expect_tensor(index_select(x, 0, ints({2, 0, 2})), {3, 2}, {4, 5, 0, 1, 4, 5});
  expect_tensor(index_select(x, -1, Tensor::from<int32_t>({1}, {1})), {3, 1}, {1, 3, 5});
  expect_tensor(index_select(transpose(x, 0, 1), 1, ints({1})), {2, 1}, {2, 3});
  expect_tensor(index_select(x, 0, ints({})), {0, 2}, {});
  expect_tensor(index_select(iota({}), 0, ints({0})), {}, {0});
}

TEST(IndexSelect, AgreesWithIndexArithmeticAndAddsBack) {
  RandomShapes random(21);
  for (int round = 0; round < 100; ++round) {
    const Tensor x = transpose(iota<double>(random.shape(), 1), 0, -1);
    const auto dim = static_cast<size_t>(random.pick(0, x.dims() - 1));
    const int64_t size = x.sizes()[dim];
    const Tensor index = random_index(random, {size == 0 ? 0 : random.pick(0, 6)}, size);
    Shape sizes = x.sizes();
    sizes[dim] = index.elems();
    const auto through = [&](Shape i) {
      i[dim] = static_cast<int64_t>(at(index, {i[dim]}));
      return i;
    };
    expect_equal(index_select(x, static_cast<int64_t>(dim), index),
                 build(sizes, [&](const Shape& i) { return at(x, through(i)); }));
    // index_add against a loop, in place too.
    const Tensor source = iota<double>(sizes, 100);
    Tensor expected = build(x.sizes(), [&](const Shape& i) { return at(x, i); });
    for_each_index(sizes, [&](const Shape& i) {
      const Shape to = through(i);
      int64_t offset = 0;
      for (size_t d = 0; d < to.size(); ++d) offset += to[d] * expected.strides()[d];
      expected.data<double>()[offset] += 2 * at(source, i);
    });
    expect_equal(index_add(x, static_cast<int64_t>(dim), index, source, 2), expected);
    index_add_(x, static_cast<int64_t>(dim), index, source, 2);
    expect_tensor(x, x.sizes(), values(expected));
  }
}

TEST(IndexAdd, RoundsSixteenBitSumsOnce) {
  // 256 + 1 rounds back to 256 in bf16: only a wider sum notices the ones.
  const Tensor x = Tensor::from(std::vector<bfloat16>{bfloat16(256)}, {1});
  const Tensor ones = Tensor::from(std::vector<bfloat16>(8, bfloat16(1)), {8});
  EXPECT_EQ(values(index_add(x, 0, ints({0, 0, 0, 0, 0, 0, 0, 0}), ones)), std::vector<double>{264});
  EXPECT_EQ(values(scatter_add(x, 0, ints({0, 0, 0, 0, 0, 0, 0, 0}), ones)), std::vector<double>{264});
}

TEST(IndexAdd, WrapsIntegersAndJoinsBools) {
  expect_tensor(index_add(iota<uint8_t>({1}, 250), 0, ints({0, 0}), iota<uint8_t>({2}, 10)), {1},
                {15});  // 250 + 10 + 11 - 256
  expect_tensor(index_add(Tensor::from({false, true}, {2}), 0, ints({0, 1}), Tensor::from({true, true}, {2})), {2},
                {1, 1});
}

TEST(IndexCopyAndFill, OverwriteSlices) {
  const Tensor x = iota({3, 2});
  expect_tensor(index_copy(x, 0, ints({2}), iota({1, 2}, 10.0f)), {3, 2}, {0, 1, 2, 3, 10, 11});
  expect_tensor(index_fill(x, 1, ints({0}), 7), {3, 2}, {7, 1, 7, 3, 7, 5});
  expect_tensor(x, {3, 2}, {0, 1, 2, 3, 4, 5});
  index_fill_(transpose(x, 0, 1), 0, ints({1}), -1);  // through a view
  expect_tensor(x, {3, 2}, {0, -1, 2, -1, 4, -1});
  index_copy_(x, 0, ints({0, 1}), slice(x, 0, 1, 3));  // a source that is overwritten meanwhile
  expect_tensor(x, {3, 2}, {2, -1, 4, -1, 4, -1});
}

TEST(Gather, AgreesWithIndexArithmeticOverRandomShapes) {
  RandomShapes random(22);
  for (int round = 0; round < 200; ++round) {
    const Tensor x = transpose(iota<double>(random.shape(), 1), 0, -1);
    const auto dim = static_cast<size_t>(random.pick(0, x.dims() - 1));
    Shape sizes = x.sizes();
    for (int64_t& size : sizes) size = random.pick(0, 3) ? size : std::min<int64_t>(size, 2);
    sizes[dim] = x.sizes()[dim] == 0 ? 0 : random.pick(0, 5);
    const Tensor index = random_index(random, sizes, x.sizes()[dim]);
    const auto through = [&](Shape i) {
      i[dim] = static_cast<int64_t>(at(index, i));
      return i;
    };
    const auto d = static_cast<int64_t>(dim);
    expect_equal(gather(x, d, index), build(sizes, [&](const Shape& i) { return at(x, through(i)); }));

    const Tensor source = iota<double>(sizes, 100);
    const auto scattered = [&](bool add) {
      Tensor expected = build(x.sizes(), [&](const Shape& i) { return at(x, i); });
      for_each_index(sizes, [&](const Shape& i) {
        int64_t offset = 0;
        for (size_t k = 0; k < i.size(); ++k) offset += through(i)[k] * expected.strides()[k];
        double& place = expected.data<double>()[offset];
        place = (add ? place : 0) + at(source, i);
      });
      return expected;
    };
    expect_equal(scatter(x, d, index, source), scattered(false));
    expect_equal(scatter_add(x, d, index, source), scattered(true));
    const Tensor expected = scattered(true);
    scatter_add_(x, d - x.dims(), index, source);
    expect_tensor(x, x.sizes(), values(expected));
  }
}

TEST(Scatter, TakesALargerSourceAndAValue) {
  const Tensor x = iota({2, 2});
  const Tensor index = Tensor::from<int64_t>({1}, {1, 1});
  expect_tensor(scatter(x, 0, index, iota({3, 3}, 10.0f)), {2, 2}, {0, 1, 10, 3});
  expect_tensor(scatter(x, 1, index, 5), {2, 2}, {0, 5, 2, 3});
  expect_tensor(scatter(iota({}), 0, Tensor::from<int64_t>({0}, {}), 5), {}, {5});
  expect_tensor(scatter(x, 0, Tensor::from<int64_t>({}, {0, 2}), 5), {2, 2}, {0, 1, 2, 3});
  const Tensor c = Tensor::from(std::vector<complex128>{{1, 2}, {3, 4}}, {2});
  EXPECT_EQ(scatter(c, 0, ints({1}), Scalar(complex128(5, 6))).to_vector<complex128>(),
            (std::vector<complex128>{{1, 2}, {5, 6}}));
}

TEST(Scatter, IsTheSameWithManyThreads) {
  RandomShapes random(23);
  const Tensor index = random_index(random, {400, 300}, 7);
  const Tensor x = iota({7, 300}), source = iota({400, 300});
  const int before = thread_count();
  set_thread_count(1);
  const Tensor sums = scatter_add(x, 0, index, source), last = scatter(x, 0, index, source);
  const Tensor rows = index_add(x, 0, select(index, 1, 0), source);
  set_thread_count(3);
  expect_equal(scatter_add(x, 0, index, source), sums);
  expect_equal(scatter(x, 0, index, source), last);
  expect_equal(index_add(x, 0, select(index, 1, 0), source), rows);
  set_thread_count(before);
}

TEST(TakeAlongDim, Broadcasts) {
  const Tensor x = iota({2, 3});
  expect_tensor(take_along_dim(x, Tensor::from<int64_t>({2, 0}, {1, 2}), 1), {2, 2}, {2, 0, 5, 3});
  expect_tensor(take_along_dim(x, ints({5, 1})), {2}, {5, 1});
}

TEST(Brackets, WithoutTensorsAreViews) {
  const Tensor x = iota({2, 3, 4});
  const Tensor y = index(x, {1, Slice{0, 2}, kNewAxis, Slice{1, kEnd, 2}});
  expect_tensor(y, {2, 1, 2}, {13, 15, 17, 19});
  EXPECT_EQ(y.storage(), x.storage());
  expect_tensor(index(x, {kEllipsis, -1}), {2, 3}, {3, 7, 11, 15, 19, 23});
  expect_tensor(index(x, {0, kEllipsis, 0}), {3}, {0, 4, 8});
  expect_tensor(index(x, {1, 2, 3}), {}, {23});
  expect_tensor(index(x, {kNewAxis, 0, 0}), {1, 4}, {0, 1, 2, 3});
  EXPECT_TRUE(index(x, {}).is(x));
}

TEST(Brackets, PlaceTheDimensionsOfTensorsAsPyTorchDoes) {
  const Tensor x = iota({2, 3, 4, 5});
  const Tensor i = Tensor::from<int64_t>({0, -1}, {2}), j = Tensor::from<int64_t>({1, 0, 2}, {3, 1});
  EXPECT_EQ(index(x, {i}).sizes(), (Shape{2, 3, 4, 5}));
  EXPECT_EQ(index(x, {Slice{}, i}).sizes(), (Shape{2, 2, 4, 5}));
  EXPECT_EQ(index(x, {Slice{}, j, i}).sizes(), (Shape{2, 3, 2, 5}));  // side by side: in their place
  EXPECT_EQ(index(x, {i, Slice{}, j}).sizes(), (Shape{3, 2, 3, 5}));  // apart: in front
  EXPECT_EQ(index(x, {i, kNewAxis, j}).sizes(), (Shape{3, 2, 1, 4, 5}));
  EXPECT_EQ(index(x, {0, i, Slice{}, j}).sizes(), (Shape{3, 2, 4}));  // a number is gone before
  EXPECT_EQ(index(x, {kEllipsis, i}).sizes(), (Shape{2, 3, 4, 2}));
}

TEST(Brackets, AgreeWithIndexArithmetic) {
  const Tensor x = transpose(iota<double>({4, 3, 2}), 0, 2);  // [2, 3, 4]
  const Tensor i = Tensor::from<int64_t>({1, 0, -1, 1}, {2, 2}), k = Tensor::from<int32_t>({3, 0}, {2});
  const auto wrap = [](double v, int64_t size) { return static_cast<int64_t>(v) + (v < 0 ? size : 0); };
  expect_equal(index(x, {i, Slice{}, k}), build({2, 2, 3}, [&](const Shape& at_) {
                 return at(x, {wrap(at(i, {at_[0], at_[1]}), 2), at_[2], wrap(at(k, {at_[1]}), 4)});
               }));
  expect_equal(index(x, {i, kEllipsis}), build({2, 2, 3, 4}, [&](const Shape& at_) {
                 return at(x, {wrap(at(i, {at_[0], at_[1]}), 2), at_[2], at_[3]});
               }));
  expect_equal(index(x, {Slice{}, Slice{1, 3}, k}), build({2, 2, 2}, [&](const Shape& at_) {
                 return at(x, {at_[0], at_[1] + 1, wrap(at(k, {at_[2]}), 4)});
               }));
}

TEST(Brackets, TakeMasks) {
  const Tensor x = iota({2, 3});
  const Tensor mask = Tensor::from({true, false, true, false, false, true}, {2, 3});
  expect_tensor(index(x, {mask}), {3}, {0, 2, 5});
  expect_tensor(index(x, {Tensor::from({false, true}, {2})}), {1, 3}, {3, 4, 5});
  expect_tensor(index(x, {Slice{}, Tensor::from({true, false, true}, {3})}), {2, 2}, {0, 2, 3, 5});
  expect_tensor(index(x, {Tensor::scalar(true, DType::kBool)}), {1, 2, 3}, {0, 1, 2, 3, 4, 5});
  EXPECT_EQ(index(x, {Tensor::scalar(false, DType::kBool)}).sizes(), (Shape{0, 2, 3}));
  EXPECT_THAT(message_of([&] {
                index(x, {Tensor::from({true, false, true}, {3})});
              }),
              HasSubstr("a mask of shape [3] does not fit"));
}

TEST(IndexPut, PlacesValues) {
  const Tensor x = iota({2, 3});
  const Tensor i = ints({0, 1}), j = ints({2, -3});
  expect_tensor(index_put(x, {i, j}, iota({2}, 10.0f)), {2, 3}, {0, 1, 10, 11, 4, 5});
  expect_tensor(index_put(x, {ints({1, 1}), ints({0, 0})}, iota({}, 1.0f), true), {2, 3}, {0, 1, 2, 5, 4, 5});
  expect_tensor(index_put(x, {Slice{}, ints({0, 2})}, iota({2}, 10.0f)), {2, 3}, {10, 1, 11, 10, 4, 11});
  expect_tensor(index_put(x, {0, Slice{1, 3}}, iota({}, 9.0f)), {2, 3}, {0, 9, 9, 3, 4, 5});
  expect_tensor(index_put(x, {0, ints({0})}, iota({}, 9.0f)), {2, 3}, {9, 1, 2, 3, 4, 5});
  expect_tensor(x, {2, 3}, {0, 1, 2, 3, 4, 5});
  EXPECT_TRUE(index_put_(x, {kEllipsis, -1}, iota({2}, 7.0f)).is(x));
  expect_tensor(x, {2, 3}, {0, 1, 7, 3, 4, 8});
  index_put_(x, {Tensor::from({false, true}, {2}), ints({1})}, iota({}, -1.0f));
  expect_tensor(x, {2, 3}, {0, 1, 7, 3, -1, 8});
  index_put_(x, {1, Slice{}}, iota({}, 1.0f), true);
  expect_tensor(x, {2, 3}, {0, 1, 7, 4, 0, 9});
}

TEST(Mask, SelectsScattersAndFinds) {
  const Tensor x = iota({2, 3});
  const Tensor mask = Tensor::from({true, false, true, false, false, true}, {2, 3});
  expect_tensor(masked_select(x, mask), {3}, {0, 2, 5});
  expect_tensor(masked_select(transpose(x, 0, 1), Tensor::from({false, true}, {2})), {3}, {3, 4, 5});
  expect_tensor(masked_scatter(x, mask, iota({5}, 10.0f)), {2, 3}, {10, 1, 11, 3, 4, 12});
  expect_tensor(nonzero(mask), {3, 2}, {0, 0, 0, 2, 1, 2});
  expect_tensor(nonzero(iota({3})), {2, 1}, {1, 2});
  EXPECT_EQ(nonzero(iota({}, 1.0f)).sizes(), (Shape{1, 0}));
  EXPECT_EQ(nonzero(iota({0, 2})).sizes(), (Shape{0, 2}));
  expect_tensor(nonzero(Tensor::from({0.0, -0.0, std::numeric_limits<double>::quiet_NaN()}, {3})), {1, 1}, {2});
  expect_tensor(masked_fill(x, mask, iota({}, 9.0f)), {2, 3}, {9, 1, 9, 3, 4, 9});
}

TEST(Mask, WorksOverManyChunksAndThreads) {
  constexpr int64_t kCount = 100003;
  std::vector<bool> holds(kCount);
  std::vector<double> expected;
  for (size_t i = 0; i < kCount; ++i) {
    holds[i] = i * 2654435761u % 7 < 3;
    if (holds[i]) expected.push_back(static_cast<double>(i));
  }
  const int before = thread_count();
  set_thread_count(3);
  const Tensor mask = Tensor::from(holds, {kCount});
  EXPECT_EQ(values(masked_select(iota<double>({kCount}), mask)), expected);
  EXPECT_EQ(values(nonzero(mask)), expected);
  set_thread_count(before);
}

TEST(Indexing, NamesTheIndexItsPositionAndTheBoundAndWritesNothing) {
  const Tensor x = iota({2, 3});
  const Tensor bad = Tensor::from<int64_t>({0, 0, 1, 5}, {2, 2});
  EXPECT_THAT(message_of([&] {
                index_select(x, 0, ints({1, 2}));
              }),
              HasSubstr("[index_select] index 2 at position [1] is out of range: dimension 0 has size 2"));
  EXPECT_THAT(message_of([&] { index_select(x, 0, ints({-1})); }), HasSubstr("index -1 at position [0]"));
  EXPECT_THAT(message_of([&] { gather(x, 1, bad); }),
              HasSubstr("[gather] index 5 at position [1, 1] is out of range: dimension 1 has size 3"));
  EXPECT_THAT(message_of([&] { scatter_(x, 1, bad, 9); }), HasSubstr("index 5 at position [1, 1]"));
  EXPECT_THAT(message_of([&] {
                scatter_add_(x, 1, bad, iota({2, 2}, 1.0f));
              }),
              HasSubstr("index 5 at position [1, 1]"));
  EXPECT_THAT(message_of([&] {
                index_add_(x, 1, ints({0, 3}), iota({2, 2}, 1.0f));
              }),
              HasSubstr("index 3 at position [1]"));
  EXPECT_THAT(message_of([&] { index_copy_(x, 1, ints({0, 3}), iota({2, 2}, 1.0f)); }), HasSubstr("index 3"));
  EXPECT_THAT(message_of([&] { index_fill_(x, 1, ints({0, 3}), 1); }), HasSubstr("index 3"));
  EXPECT_THAT(message_of([&] {
                index_put_(x, {ints({0, 1}), ints({0, -4})}, iota({}, 1.0f));
              }),
              HasSubstr("[index_put] index -4 at position [1] is out of range: dimension 1 has size 3"));
  EXPECT_THAT(message_of([&] { masked_scatter(x, Tensor::from({true}, {1}), iota({5})); }),
              HasSubstr("holds 6 times, but there are only 5"));
  expect_tensor(x, {2, 3}, {0, 1, 2, 3, 4, 5});
}

TEST(Indexing, SaysWhatDoesNotFit) {
  const Tensor x = iota({2, 3});
  EXPECT_THAT(message_of([&] { index_select(x, 0, iota({2})); }), HasSubstr("indices are i64 or i32, not f32"));
  EXPECT_THAT(message_of([&] {
                index_select(x, 0, Tensor::from<int64_t>({0}, {1, 1}));
              }),
              HasSubstr("must be a vector"));
  EXPECT_THAT(message_of([&] {
                gather(x, 0, Tensor::from<int32_t>({0}, {1, 1}));
              }),
              HasSubstr("indices are i64, not i32"));
  EXPECT_THAT(message_of([&] { gather(x, 0, ints({0})); }), HasSubstr("same number of dimensions"));
  EXPECT_THAT(message_of([&] {
                gather(x, 0, Tensor::from(std::vector<int64_t>(4, 0), {1, 4}));
              }),
              HasSubstr("larger than the tensor of shape [2, 3] in dimension 1"));
  EXPECT_THAT(message_of([&] {
                scatter(x, 0, Tensor::from<int64_t>({0, 0}, {1, 2}), iota({1, 1}));
              }),
              HasSubstr("a source at least as large"));
  EXPECT_THAT(message_of([&] {
                scatter_add(x, 0, Tensor::from<int64_t>({0}, {1, 1}), iota<double>({1, 1}));
              }),
              HasSubstr("the source is f64, but x is f32"));
  EXPECT_THAT(message_of([&] {
                index_add(x, 0, ints({0}), iota({2, 3}));
              }),
              HasSubstr("a source of shape [1, 3] was expected"));
  EXPECT_THAT(message_of([&] { index(x, {0, 0, 0}); }), HasSubstr("3 indices for a tensor of shape [2, 3]"));
  EXPECT_THAT(message_of([&] { index(x, {kEllipsis, kEllipsis}); }), HasSubstr("only one ellipsis"));
  EXPECT_THAT(message_of([&] { index(x, {ints({0, 1, 0}), ints({0, 1})}); }), HasSubstr("do not broadcast"));
  EXPECT_THAT(message_of([&] {
                index_put(x, {ints({0, 1})}, iota({2, 2}));
              }),
              HasSubstr("[index_put] shapes [2, 2] and [2, 3] do not broadcast"));
  EXPECT_THAT(message_of([&] { masked_select(x, iota({2, 3})); }), HasSubstr("a mask is bool, not f32"));
}

}  // namespace
}  // namespace chorale
