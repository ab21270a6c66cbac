#include "chorale/op/view.h"

#include "chorale/op/builder.h"
#include "chorale/op/defs/tensor_test_util.h"

namespace chorale {
namespace {

using testing::HasSubstr;

TEST(Slice, TakesEveryStepAndClampsItsBounds) {
  const Tensor x = iota({6});
  expect_tensor(slice(x, 0, 1, 5, 2), {2}, {1, 3});
  expect_tensor(slice(x, 0, -2), {2}, {4, 5});
  expect_tensor(slice(x, 0, -100, 100, 5), {2}, {0, 5});
  expect_tensor(slice(x, 0, 4, 2), {0}, {});
  expect_tensor(slice(x, 0, 2, kEnd, kEnd), {1}, {2});
}

TEST(Slice, AgreesWithIndexArithmeticOverRandomShapes) {
  RandomShapes random(1);
  for (int round = 0; round < 200; ++round) {
    const Tensor x = iota(random.shape());
    const int64_t dim = random.pick(0, x.dims() - 1), size = x.size(dim);
    const int64_t start = random.pick(0, size), end = random.pick(start, size), step = random.pick(1, 3);
    Shape sizes = x.sizes();
    sizes[static_cast<size_t>(dim)] = (end - start + step - 1) / step;
    const Tensor expected = build(
        sizes,
        [&](Shape index) {
          int64_t& i = index[static_cast<size_t>(dim)];
          i = start + i * step;
          return at(x, index);
        },
        DType::kF32);
    expect_equal(slice(x, dim, start, end, step), expected);
    expect_equal(slice(x, dim - x.dims(), start, end, step), expected);
  }
}

TEST(Views, ShareTheirBytesWithTheOriginal) {
  const Tensor x = iota({2, 1, 3});
  for (const Tensor& view :
       {slice(x, 2, 0, 2), select(x, 0, 1), permute(x, {2, 0, 1}), expand(x, {2, 4, 3}), chorale::view(x, {6}),
        reshape(x, {3, 2}), squeeze(x), unsqueeze(x, 0), flatten(x), unfold(x, 2, 2, 1), diagonal(x, 0, 0, 2),
        as_strided(x, {2}, {2}), transpose(x, 0, 2), movedim(x, 0, 2), narrow(x, 2, 1, 2), unflatten(x, 2, {3, 1})}) {
    EXPECT_EQ(view.storage(), x.storage());
  }
  const Tensor column = select(transpose(x, 0, 2), 0, 1);
  *column.data<float>() = 100;
  EXPECT_EQ(at(x, {0, 0, 1}), 100);
  x.data<float>()[1] = 200;
  EXPECT_EQ(at(column, {0, 0}), 200);
}

TEST(Select, DropsTheDimension) {
  const Tensor x = iota({2, 3});
  expect_tensor(select(x, 0, 1), {3}, {3, 4, 5});
  expect_tensor(select(x, -1, -3), {2}, {0, 3});
  expect_tensor(select(iota({2}), 0, 1), {}, {1});
}

TEST(Subscript, ShowsOnePlaceOfTheFirstDimension) {
  const Tensor x = iota({2, 3});
  expect_tensor(x[1], {3}, {3, 4, 5});
  expect_tensor(x[-2], {3}, {0, 1, 2});
  expect_tensor(x[1][-1], {}, {5});
  EXPECT_EQ(x[0].storage(), x.storage());
  *x[1][2].data<float>() = 100;
  EXPECT_EQ(at(x, {1, 2}), 100);
  EXPECT_THAT(message_of([&] { std::ignore = x[2]; }), HasSubstr("index 2"));
  EXPECT_THAT(message_of([&] { std::ignore = x[-3]; }), HasSubstr("index -3"));
  EXPECT_THAT(message_of([&] { std::ignore = x[0][0][0]; }), HasSubstr("dim"));
  EXPECT_THAT(message_of([&] { std::ignore = Tensor{}[0]; }), HasSubstr("undefined"));
  // x[0] = y would write into a handle that vanishes.
  static_assert(!std::is_assignable_v<Tensor, Tensor> && std::is_assignable_v<Tensor&, Tensor>);
}

TEST(Narrow, NeedsAllItsElements) {
  const Tensor x = iota({5});
  expect_tensor(narrow(x, 0, 1, 3), {3}, {1, 2, 3});
  expect_tensor(narrow(x, 0, -2, 2), {2}, {3, 4});
  expect_tensor(narrow(x, 0, 5, 0), {0}, {});
  EXPECT_THAT(message_of([&] { narrow(x, 0, 3, 3); }), HasSubstr("3 elements from 3"));
}

TEST(Split, CoversTheDimension) {
  const Tensor x = iota({5, 2});
  const auto pieces = split(x, 2);
  ASSERT_EQ(pieces.size(), 3u);
  expect_tensor(pieces[0], {2, 2}, {0, 1, 2, 3});
  expect_tensor(pieces[2], {1, 2}, {8, 9});
  const auto sized = split_sizes(x, {1, 0, 4}, 0);
  ASSERT_EQ(sized.size(), 3u);
  expect_tensor(sized[1], {0, 2}, {});
  expect_tensor(select(sized[2], 1, 0), {4}, {2, 4, 6, 8});
  EXPECT_EQ(chunk(iota({7}), 4).size(), 4u);  // 2 + 2 + 2 + 1
  EXPECT_EQ(chunk(iota({6}), 4).size(), 3u);
  EXPECT_EQ(chunk(iota({0, 2}), 4).size(), 4u);
  EXPECT_EQ(split(iota({0, 2}), 3).size(), 1u);
  const auto rows = unbind(x, 1);
  ASSERT_EQ(rows.size(), 2u);
  expect_tensor(rows[1], {5}, {1, 3, 5, 7, 9});
  EXPECT_THAT(message_of([&] { split_sizes(x, {1, 2}, 0); }), HasSubstr("add up to 3"));
  EXPECT_THAT(message_of([&] { split(x, 0); }), HasSubstr("size 0"));
}

TEST(Permute, ReordersDimensionsOverRandomShapes) {
  RandomShapes random(2);
  for (int round = 0; round < 100; ++round) {
    const Tensor x = iota(random.shape());
    std::vector<int64_t> dims(static_cast<size_t>(x.dims()));
    std::iota(dims.begin(), dims.end(), 0);
    std::shuffle(dims.begin(), dims.end(), std::mt19937(static_cast<unsigned>(round)));
    Shape sizes;
    for (int64_t dim : dims) sizes.push_back(x.size(dim));
    expect_equal(permute(x, dims), build(
                                       sizes,
                                       [&](const Shape& index) {
                                         Shape from(index.size());
                                         for (size_t i = 0; i < dims.size(); ++i)
                                           from[static_cast<size_t>(dims[i])] = index[i];
                                         return at(x, from);
                                       },
                                       DType::kF32));
  }
}

TEST(Permute, HasItsRelatives) {
  const Tensor x = iota({2, 3, 4});
  EXPECT_EQ(transpose(x, 0, -1).sizes(), (Shape{4, 3, 2}));
  EXPECT_EQ(swapdims(x, 0, 1).sizes(), (Shape{3, 2, 4}));
  EXPECT_EQ(movedim(x, 0, 2).sizes(), (Shape{3, 4, 2}));
  EXPECT_EQ(movedim(x, {0, 1}, {-1, 0}).sizes(), (Shape{3, 4, 2}));
  EXPECT_EQ(adjoint(x).sizes(), (Shape{2, 4, 3}));
  expect_tensor(t(iota({2, 3})), {3, 2}, {0, 3, 1, 4, 2, 5});
  expect_tensor(t(iota({2})), {2}, {0, 1});
  expect_tensor(transpose(iota({}), 0, -1), {}, {0});
}

TEST(Expand, RepeatsDimensionsOfSizeOne) {
  const Tensor x = iota({2, 1});
  expect_tensor(expand(x, {2, 3}), {2, 3}, {0, 0, 0, 1, 1, 1});
  expect_tensor(expand(x, {2, -1, 2}), {2, 2, 2}, {0, 0, 1, 1, 0, 0, 1, 1});
  expect_tensor(expand(x, {2, 0}), {2, 0}, {});
  expect_tensor(broadcast_to(iota({}), {2}), {2}, {0, 0});
  expect_tensor(expand_as(iota({1, 2}), iota({2, 2})), {2, 2}, {0, 1, 0, 1});
}

TEST(View, KeepsElementsInOrder) {
  const Tensor x = iota({2, 3, 4});
  for (const Shape& sizes : {Shape{24}, {4, 6}, {2, 12}, {1, 2, 3, 4, 1}, {6, 4}}) {
    EXPECT_EQ(values(view(x, sizes)), values(x));
    EXPECT_EQ(view(x, sizes).sizes(), sizes);
  }
  EXPECT_EQ(view(x, {-1, 4}).sizes(), (Shape{6, 4}));
  EXPECT_EQ(view(iota({0, 3}), {5, 0}).sizes(), (Shape{5, 0}));
  EXPECT_EQ(view(iota({1}), {}).sizes(), (Shape{}));
  EXPECT_EQ(flatten(x, 1).sizes(), (Shape{2, 12}));
  EXPECT_EQ(flatten(iota({})).sizes(), (Shape{1}));
  EXPECT_EQ(unflatten(x, -1, {2, -1}).sizes(), (Shape{2, 3, 2, 2}));
}

TEST(View, WorksWhereverStridesAllow) {
  const Tensor x = iota({4, 6});
  const Tensor part = slice(x, 1, 0, 4);  // rows of 4, 6 apart
  expect_tensor(view(part, {4, 2, 2}), {4, 2, 2}, values(part));
  expect_tensor(view(part, {2, 2, 4}), {2, 2, 4}, values(part));
  EXPECT_THAT(message_of([&] { view(part, {16}); }), HasSubstr("use reshape"));
  const Tensor copied = reshape(part, {16});
  expect_tensor(copied, {16}, values(part));
  EXPECT_NE(copied.storage(), x.storage());
}

TEST(Reshape, EqualsACopyInRowMajorOrderOverRandomViews) {
  RandomShapes random(3);
  for (int round = 0; round < 100; ++round) {
    Tensor x = iota(random.shape());
    x = transpose(x, random.pick(0, x.dims() - 1), random.pick(0, x.dims() - 1));
    x = slice(x, random.pick(0, x.dims() - 1), 0, kEnd, 2);
    expect_tensor(reshape(x, {x.elems()}), {x.elems()}, values(x));
    Shape half = x.sizes();
    half.push_back(1);
    expect_tensor(view(x, half), half, values(x));
  }
}

TEST(Squeeze, DropsDimensionsOfSizeOneOnly) {
  const Tensor x = iota({1, 3, 1, 2});
  EXPECT_EQ(squeeze(x).sizes(), (Shape{3, 2}));
  EXPECT_EQ(squeeze(x, 0).sizes(), (Shape{3, 1, 2}));
  EXPECT_EQ(squeeze(x, 1).sizes(), x.sizes());
  EXPECT_EQ(squeeze(x, {0, -2, 1}).sizes(), (Shape{3, 2}));
  EXPECT_EQ(squeeze(iota({}), 0).sizes(), (Shape{}));
  EXPECT_EQ(unsqueeze(x, -1).sizes(), (Shape{1, 3, 1, 2, 1}));
  EXPECT_EQ(unsqueeze(iota({}), 0).sizes(), (Shape{1}));
  EXPECT_TRUE(unsqueeze(iota({2, 3}), 1).is_contiguous());
}

TEST(Unfold, ShowsOverlappingWindows) {
  expect_tensor(unfold(iota({5}), 0, 3, 1), {3, 3}, {0, 1, 2, 1, 2, 3, 2, 3, 4});
  expect_tensor(unfold(iota({2, 4}), 0, 1, 1), {2, 4, 1}, {0, 1, 2, 3, 4, 5, 6, 7});
  expect_tensor(unfold(iota({6}), 0, 2, 3), {2, 2}, {0, 1, 3, 4});
  expect_tensor(unfold(iota({}), 0, 1, 1), {1}, {0});
}

TEST(Diagonal, RunsAboveAndBelow) {
  const Tensor x = iota({3, 4});
  expect_tensor(diagonal(x), {3}, {0, 5, 10});
  expect_tensor(diagonal(x, 1), {3}, {1, 6, 11});
  expect_tensor(diagonal(x, -2), {1}, {8});
  expect_tensor(diagonal(x, 4), {0}, {});
  expect_tensor(diagonal(iota({2, 2, 2}), 0, 0, 2), {2, 2}, {0, 5, 2, 7});
}

TEST(AsStrided, SeesTheStorageAndStaysInside) {
  const Tensor x = iota({3, 4});
  expect_tensor(as_strided(x, {2, 2}, {1, 5}), {2, 2}, {0, 5, 1, 6});
  const Tensor row = select(x, 0, 1);
  expect_tensor(as_strided(row, {2}, {1}), {2}, {4, 5});     // by default from row's own place
  expect_tensor(as_strided(row, {2}, {1}, 0), {2}, {0, 1});  // counted from the start of the storage
  EXPECT_THAT(message_of([&] { as_strided(x, {4, 4}, {4, 1}); }), HasSubstr("0 to 15 of a storage of 12"));
  EXPECT_THAT(message_of([&] { as_strided(x, {2}, {1}, -1); }), HasSubstr("offset -1"));
  EXPECT_THAT(message_of([&] { as_strided(x, {2}, {-1}); }), HasSubstr("stride -1"));
  EXPECT_THAT(message_of([&] { as_strided(x, {2}, {}); }), HasSubstr("1 sizes [2] but 0 strides"));
}

TEST(Flip, ReversesACopy) {
  const Tensor x = iota({2, 3});
  expect_tensor(flip(x, {1}), {2, 3}, {2, 1, 0, 5, 4, 3});
  expect_tensor(flip(transpose(x, 0, 1), {0, -1}), {3, 2}, {5, 2, 4, 1, 3, 0});
  expect_tensor(flip(iota({0, 2}), {0}), {0, 2}, {});
  expect_tensor(flip(iota({}), {}), {}, {0});
  EXPECT_NE(flip(x, {}).storage(), x.storage());
  EXPECT_THAT(message_of([&] { flip(x, {0, -2}); }), HasSubstr("dimension 0 appears twice"));
}

TEST(Views, WorkOnTheNullDevice) {
  const Tensor x = Tensor::empty({2, 3, 4}, DType::kF32, kNull);
  const Tensor y = slice(transpose(x, 0, 2), 0, 1, 3);
  EXPECT_EQ(y.sizes(), (Shape{2, 3, 2}));
  EXPECT_EQ(y.strides(), (Strides{1, 4, 12}));
  EXPECT_EQ(y.offset(), 1);
}

TEST(Views, SayWhatDoesNotFit) {
  const Tensor x = iota({2, 3});
  EXPECT_THAT(message_of([&] { slice(x, 2); }), HasSubstr("[slice] dimension 2 is out of range"));
  EXPECT_THAT(message_of([&] { slice(x, 0, 0, 1, 0); }), HasSubstr("step must be positive, not 0"));
  EXPECT_THAT(message_of([&] { slice(iota({}), 0); }), HasSubstr("a scalar has no dimension"));
  EXPECT_THAT(message_of([&] { select(x, 1, 3); }), HasSubstr("index 3 is out of range for dimension 1 of size 3"));
  EXPECT_THAT(message_of([&] { permute(x, {0}); }), HasSubstr("needs 2 dimensions, got [0]"));
  EXPECT_THAT(message_of([&] { permute(x, {0, 0}); }), HasSubstr("appears twice"));
  EXPECT_THAT(message_of([&] { expand(x, {2, 4}); }), HasSubstr("size 3 in dimension 1 is neither 1 nor 4"));
  EXPECT_THAT(message_of([&] { expand(x, {-1, 2, 3}); }), HasSubstr("must be given"));
  EXPECT_THAT(message_of([&] { expand(x, {3}); }), HasSubstr("more dimensions"));
  EXPECT_THAT(message_of([&] { view(x, {4}); }), HasSubstr("6 elements, which do not fit [4]"));
  EXPECT_THAT(message_of([&] { view(x, {-1, -1}); }), HasSubstr("only one size may be -1"));
  EXPECT_THAT(message_of([&] { view(iota({0}), {-1, 0}); }), HasSubstr("could be any size"));
  EXPECT_THAT(message_of([&] { unfold(x, 1, 4, 1); }), HasSubstr("a window of 4"));
  EXPECT_THAT(message_of([&] { diagonal(x, 0, 0, -2); }), HasSubstr("0 twice"));
  EXPECT_THAT(message_of([&] { unsqueeze(iota({1, 1, 1, 1, 1, 1, 1, 1}), 0); }), HasSubstr("no room"));
  EXPECT_THAT(message_of([&] { movedim(x, {0, 0}, {0, 1}); }), HasSubstr("twice"));
  EXPECT_THAT(message_of([&] { unflatten(x, 1, {2, -1}); }), HasSubstr("do not fit [2, -1]"));
}

// The gradient of a linear map is its transpose: sum(view(x) * dy) == sum(x * backward(dy)).
void expect_transpose(const op::OpDef& forward, const Attrs& attrs, const op::OpDef& backward, const Attrs& back_attrs,
                      const Tensor& x) {
  const Tensor y = op::call(forward, attrs, x);
  const Tensor dy = iota<double>(y.sizes(), 1);
  const Tensor dx = op::call(backward, back_attrs, dy);
  ASSERT_EQ(dx.sizes(), x.sizes());
  const auto dot = [](const std::vector<double>& a, const std::vector<double>& b) {
    return std::inner_product(a.begin(), a.end(), b.begin(), 0.0);
  };
  EXPECT_EQ(dot(values(y), values(dy)), dot(values(x), values(dx))) << forward.name << " of " << x.sizes();
}

TEST(ViewGradients, AreTheTransposesOfViews) {
  RandomShapes random(4);
  for (int round = 0; round < 200; ++round) {
    const Tensor x = iota<double>(random.shape(), 1);
    const int64_t dim = random.pick(-x.dims(), x.dims() - 1), size = x.size(dim);
    const op::SliceAttrs slice{dim, random.pick(0, size), random.pick(0, size), random.pick(1, 3)};
    expect_transpose(op::kSlice, slice, op::kSliceBackward,
                     kernel::SliceBackwardAttrs{x.sizes(), slice.dim, slice.start, slice.end, slice.step}, x);
    const op::UnfoldAttrs unfold{dim, random.pick(0, size), random.pick(1, 4)};
    expect_transpose(op::kUnfold, unfold, op::kUnfoldBackward,
                     kernel::UnfoldBackwardAttrs{x.sizes(), unfold.dim, unfold.size, unfold.step}, x);
    if (x.dims() < 2) continue;
    const op::DiagonalAttrs diagonal{random.pick(-3, 3), 0, -1};
    expect_transpose(op::kDiagonal, diagonal, op::kDiagonalBackward,
                     kernel::DiagonalBackwardAttrs{x.sizes(), diagonal.offset, 0, -1}, x);
  }
}

TEST(ViewGradients, SliceTakesAnyLayoutOfTheGradient) {
  const Tensor dy = transpose(iota({40, 3}), 0, 1);  // long rows: the one-pass form must not be fooled
  const Tensor dx = op::call(op::kSliceBackward, kernel::SliceBackwardAttrs{{3, 42}, 1, 1, 41, 1}, dy);
  expect_equal(slice(dx, 1, 1, 41), build(
                                        {3, 40}, [&](const Shape& i) { return at(dy, i); }, DType::kF32));
  EXPECT_EQ(values(slice(dx, 1, 41)), (std::vector<double>{0, 0, 0}));
  expect_equal(op::call(op::kSliceBackward, kernel::SliceBackwardAttrs{{3, 42}, 1, 1, 41, 1},
                        build(
                            {3, 40}, [&](const Shape& i) { return at(dy, i); }, DType::kF32)),
               dx);
}

TEST(ViewGradients, AsStridedSumsWhatWasShownTwice) {
  const Tensor x = iota({4});
  const Tensor dy = iota({3, 2}, 1.0f);
  // Windows {0,1}, {1,2}, {2,3} of x.
  expect_tensor(op::call(op::kAsStridedBackward, op::AsStridedAttrs{{3, 2}, {1, 1}, 0}, dy, x), {4}, {1, 5, 9, 6});
  // x itself shows one place twice: both get half.
  const Tensor twice = expand(slice(x, 0, 0, 1), {2});
  expect_tensor(op::call(op::kAsStridedBackward, op::AsStridedAttrs{{2}, {1}, 0}, iota({2}, 3.0f), twice), {2},
                {1.5, 1.5});
}

}  // namespace
}  // namespace chorale
