#include "chorale/rpc/codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/api/api.h"
#include "chorale/nn/visit_tensors.h"
#include "chorale/optim/sgd.h"
#include "chorale/rpc/future.h"
#include "chorale/rpc/message.h"
#include "chorale/rpc/rref.h"

namespace chorale::rpc {
namespace {

using testing::HasSubstr;

struct Batch {
  Tensor images;
  std::vector<std::string> names;
  std::map<std::string, std::vector<Tensor>> more;
  std::optional<double> weight;
  CHORALE_MESSAGE(Batch, images, names, more, weight)
};

// What arrives when the value is sent in a message.
template <class T>
T sent(const T& value) {
  Writer writer;
  write(writer, value);
  const Outgoing outgoing =
      pack({.kind = MessageKind::kCall, .id = 7, .payload = writer.payload, .tensors = writer.tensors}, 3);
  Incoming incoming(outgoing.parcel);
  EXPECT_EQ(incoming.tag(), 3u);
  std::vector<Tensor> apart;
  for (const Tensor& bytes : outgoing.apart) apart.push_back(clone(bytes));
  const Message message = incoming.unpack(apart);
  EXPECT_EQ(message.id, 7u);
  Reader reader(message.payload, message.tensors);
  T arrived = read<T>(reader);
  reader.finish();
  return arrived;
}

Tensor counting(const Shape& sizes) { return view(arange(0, count_elems(sizes), 1, DType::kF32), sizes); }

TEST(Codec, AStructThatListsItsFieldsForMessagesNamesThemForModulesToo) {
  const Tensor x = ones({2});
  const Batch batch{x, {"first"}, {{"a", {x, x}}}, std::nullopt};
  EXPECT_EQ(tensors_of(batch).size(), 3u);
  EXPECT_THAT(names_of_tensors(batch), testing::ElementsAre("images", "more", "more", "names", "weight"));
}

TEST(Codec, ValuesArriveAsTheyWere) {
  EXPECT_EQ(sent(int64_t{-5}), -5);
  EXPECT_EQ(sent(true), true);
  EXPECT_EQ(sent(2.5f), 2.5f);
  EXPECT_EQ(sent(complex128(1, -2)), complex128(1, -2));
  EXPECT_EQ(sent(std::string("a\0b\n", 4)), std::string("a\0b\n", 4));
  EXPECT_EQ(sent(std::vector<int32_t>{1, -2, 3}), (std::vector<int32_t>{1, -2, 3}));
  EXPECT_EQ(sent(std::vector<bool>{true, false}), (std::vector<bool>{true, false}));
  EXPECT_EQ(sent(std::set<std::string>{"x", "y"}), (std::set<std::string>{"x", "y"}));
  EXPECT_EQ(sent(std::array<int, 3>{4, 5, 6}), (std::array<int, 3>{4, 5, 6}));
  const std::map<std::string, std::vector<std::pair<int, double>>> nested{{"a", {{1, .5}, {2, .25}}}, {"b", {}}};
  EXPECT_EQ(sent(nested), nested);
  EXPECT_EQ(sent(std::optional<int>()), std::nullopt);
  EXPECT_EQ(sent(std::tuple<int, std::string>(3, "x")), (std::tuple<int, std::string>(3, "x")));
  const optim::SgdOptions options = sent(optim::SgdOptions{.lr = 0.5, .momentum = 0.25, .nesterov = true});
  EXPECT_EQ(options.lr, 0.5);
  EXPECT_EQ(options.momentum, 0.25);
  EXPECT_TRUE(options.nesterov);
}

TEST(Codec, StructsListTheirFieldsOnce) {
  const Batch batch{counting({2, 3}), {"x", "y"}, {{"m", {counting({4}), Tensor()}}}, 0.75};
  const Batch arrived = sent(batch);
  EXPECT_EQ(arrived.images.to_vector<float>(), batch.images.to_vector<float>());
  EXPECT_EQ(arrived.names, batch.names);
  EXPECT_EQ(arrived.more.at("m")[0].to_vector<float>(), (std::vector<float>{0, 1, 2, 3}));
  EXPECT_FALSE(arrived.more.at("m")[1].defined());
  EXPECT_EQ(arrived.weight, 0.75);
}

TEST(Codec, TensorsOfEveryKindArrive) {
  for (const Shape& sizes : {Shape{}, Shape{0}, Shape{3, 0, 2}, Shape{5}, Shape{2, 3, 4}, Shape{300, 400}}) {
    const Tensor x = counting(sizes), y = sent(x);
    EXPECT_EQ(y.sizes(), sizes);
    EXPECT_EQ(y.to_vector<float>(), x.to_vector<float>());
  }
  for (DType dtype : kAllDTypes) {
    const Tensor x = to(counting({3, 5}), dtype), y = sent(x);
    EXPECT_EQ(y.dtype(), dtype);
    EXPECT_EQ(y.to_vector<double>(), x.to_vector<double>());
  }
  const Tensor x = set_requires_grad(counting({3}));
  EXPECT_TRUE(requires_grad(sent(x)));
  EXPECT_TRUE(is_leaf(sent(x)));
  EXPECT_FALSE(requires_grad(sent(counting({3}))));
}

// spec: test_non_cont_tensors
TEST(Codec, ViewsArriveWithTheirStrides) {
  const Tensor base = counting({5, 5}), view = narrow(base, 1, 2, 2);
  ASSERT_FALSE(view.is_contiguous());
  const Tensor arrived = sent(view), copy = sent(contiguous(view));
  EXPECT_FALSE(arrived.is_contiguous());
  EXPECT_EQ(arrived.strides(), view.strides());
  EXPECT_EQ(arrived.to_vector<float>(), view.to_vector<float>());
  EXPECT_TRUE(copy.is_contiguous());
  EXPECT_EQ(copy.to_vector<float>(), view.to_vector<float>());
  const Tensor expanded = expand(counting({1, 4}), {1000, 4});
  EXPECT_EQ(sent(expanded).strides(), expanded.strides());
  EXPECT_EQ(sent(transpose(base, 0, 1)).to_vector<float>(), transpose(base, 0, 1).to_vector<float>());
}

TEST(Codec, AViewOfMuchMemoryIsCopiedFirst) {
  const Tensor column = narrow(counting({5000, 10}), 1, 3, 1), arrived = sent(column);
  EXPECT_TRUE(arrived.is_contiguous());
  EXPECT_EQ(arrived.storage()->bytes(), 5000 * 4u);
  EXPECT_EQ(arrived.to_vector<float>(), column.to_vector<float>());
}

TEST(Codec, SparseTensorsKeepTheirFlag) {
  const Tensor indices = Tensor::from<int64_t>({0, 1, 1, 2, 0, 2}, {2, 3});
  for (bool coalesced : {false, true}) {
    const Tensor x = Tensor::sparse_coo(indices, Tensor::from<float>({3.2f, 4.1f, 5.3f}, {3}), {3, 3}, coalesced);
    const Tensor y = sent(x);
    ASSERT_TRUE(y.is_sparse());
    EXPECT_EQ(y.sparse().coalesced, coalesced);
    EXPECT_EQ(y.sparse().indices.to_vector<int64_t>(), indices.to_vector<int64_t>());
    EXPECT_EQ(y.sparse().values.to_vector<float>(), x.sparse().values.to_vector<float>());
  }
}

// spec: test_pickle_future, test_return_future
TEST(Codec, AFutureCannotTravel) {
  static_assert(!Sendable<Future<int>> && !Sendable<std::vector<Future<Tensor>>> && Sendable<std::vector<Tensor>>);
  struct Opaque {};
  static_assert(!Sendable<Opaque> && Sendable<RRef<Opaque>>);
}

TEST(Codec, WhatPromisesMoreThanItHasIsRefusedBeforeMemoryIsTaken) {
  Writer writer;
  writer.number(uint64_t{1} << 60);
  EXPECT_THROW(
      {
        Reader reader(writer.payload, {});
        read<std::vector<int>>(reader);
      },
      InvalidArgument);
  EXPECT_THROW(
      {
        Reader reader(writer.payload, {});
        read<std::vector<std::monostate>>(reader);
      },
      InvalidArgument);
  EXPECT_THROW(
      {
        Reader reader(writer.payload, {});
        read<std::string>(reader);
      },
      InvalidArgument);
}

// spec: test_rref_py_pickle_not_supported
TEST(Codec, AReferenceCannotBeStored) {
  Writer writer;
  try {
    write(writer, RRef<int>());
    ADD_FAILURE() << "no error";
  } catch (const RpcError& error) {
    EXPECT_EQ(error.kind(), RpcErrorKind::kUnsupported);
    EXPECT_THAT(error.what(), HasSubstr("can be passed to workers only"));
  }
}

}  // namespace
}  // namespace chorale::rpc
