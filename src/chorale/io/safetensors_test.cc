#include "chorale/io/safetensors.h"
#include "chorale/io/sharded.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::io {
namespace {

#include "chorale/io/testdata/safetensors.inc"

using testing::HasSubstr;

// Element i of every recorded tensor is i % 7 - 2.
Tensor formula(DType dtype, const Shape& sizes) {
  Tensor result = Tensor::empty(sizes, dtype);
  visit_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    for (int64_t i = 0; i < result.elems(); ++i) result.data<T>()[i] = static_cast<T>(static_cast<float>(i % 7 - 2));
    if constexpr (std::is_integral_v<T> && !std::is_same_v<T, bool>) {
      for (int64_t i = 0; i < result.elems(); ++i) result.data<T>()[i] = static_cast<T>(i % 7 - 2);
    }
  });
  return result;
}

NamedTensors recorded_tensors() {
  const std::tuple<const char*, DType, Shape> rows[] = {
      {"flags", DType::kBool, {5}},
      {"h.0.attn.weight", DType::kF32, {2, 3}},
      {"scalar", DType::kF64, {}},
      {"empty", DType::kI64, {0, 4}},
      {"naïve \"名\"", DType::kBF16, {3}},
      {"f16", DType::kF16, {2, 2}},
      {"u8", DType::kU8, {3}},
      {"i8", DType::kI8, {3}},
      {"i16", DType::kI16, {3}},
      {"i32", DType::kI32, {3}},
      {"i64", DType::kI64, {2, 1, 2}},
      {"c64", DType::kC64, {2}},
  };
  NamedTensors result;
  for (const auto& [name, dtype, sizes] : rows) result.emplace_back(name, formula(dtype, sizes));
  return result;
}
const Metadata kMetadata = {{"format", "pt"}, {"note", "tab\there"}};

template <size_t N>
std::string_view text_of(const unsigned char (&content)[N]) {
  return {reinterpret_cast<const char*>(content), N};
}

void expect_equal(const Tensor& a, const Tensor& b) {
  EXPECT_EQ(a.dtype(), b.dtype());
  EXPECT_EQ(a.sizes(), b.sizes());
  EXPECT_EQ(a.to_vector<complex128>(), b.to_vector<complex128>());
}

std::string error_of(const std::string& file) {
  return message_of([&] { parse_safetensors("it", std::as_bytes(std::span(file))); });
}
std::string with_length(std::string_view header, std::string_view data) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + std::string(header) + std::string(data);
}

TEST(Safetensors, ReadsWhatThePackageWrote) {
  const TemporaryFolder folder;
  const SafetensorsFile file(folder.write("a.safetensors", text_of(kWrittenByThePackage)));
  EXPECT_EQ(file.metadata(), kMetadata);
  const NamedTensors expected = recorded_tensors();
  EXPECT_EQ(file.entries().size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    SCOPED_TRACE(name);
    ASSERT_TRUE(file.contains(name));
    expect_equal(file.load(name), tensor);
  }
}

TEST(Safetensors, WritesWhatThePackageReads) {
  const TemporaryFolder folder;
  save(folder / "a.safetensors", recorded_tensors(), kMetadata);
  EXPECT_EQ(folder.read("a.safetensors"), text_of(kReadByThePackage));
}

TEST(Safetensors, KeepsOrderNamesAndMetadataThroughAFile) {
  const TemporaryFolder folder;
  const NamedTensors tensors = recorded_tensors();
  save(folder / "a", tensors, kMetadata);
  const Checkpoint loaded = load(folder / "a");
  EXPECT_EQ(loaded.metadata, kMetadata);
  ASSERT_EQ(loaded.tensors.size(), tensors.size());
  for (size_t i = 0; i < tensors.size(); ++i) {
    EXPECT_EQ(loaded.tensors[i].first, tensors[i].first);
    expect_equal(loaded.tensors[i].second, tensors[i].second);
  }
}

TEST(Safetensors, SavesNothingAndStridedViews) {
  const TemporaryFolder folder;
  save(folder / "none", {});
  EXPECT_TRUE(load(folder / "none").tensors.empty());
  const Tensor x = formula(DType::kF32, {2, 3});
  save(folder / "view", {{"t", x.view_as({3, 2}, {1, 3}, 0)}});
  EXPECT_EQ(load(folder / "view").tensors[0].second.to_vector<float>(), (std::vector<float>{-2, 1, -1, 2, 0, 3}));
}

TEST(Safetensors, TensorsLieOnTheMappingAndOutliveTheFile) {
  const TemporaryFolder folder;
  save(folder / "a", {{"x", formula(DType::kF32, {1000})}, {"y", formula(DType::kF32, {1})}});
  Tensor x;
  {
    const SafetensorsFile file(folder / "a");
    x = file.load("x");
    // Neighbours in the file are neighbours in memory: nothing was copied.
    EXPECT_EQ(static_cast<const float*>(x.raw()) + 1000, static_cast<const float*>(file.load("y").raw()));
  }
  std::filesystem::remove(folder / "a");
  EXPECT_EQ(x.to_vector<float>(), formula(DType::kF32, {1000}).to_vector<float>());
  EXPECT_TRUE(x.storage()->read_only());
}

TEST(Safetensors, CopiesTensorsAtOddAddresses) {
  const TemporaryFolder folder;
  // One byte less than the writer's padding, as files of other writers have it.
  std::string header = R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"x":{"dtype":"F64","shape":[1],)"
                       R"("data_offsets":[1,9]}})";
  const double value = 1.5;
  std::string data = "b";
  data.append(reinterpret_cast<const char*>(&value), 8);
  EXPECT_EQ(SafetensorsFile(folder.write("a", with_length(header, data))).load("x").item<double>(), 1.5);
}

TEST(Safetensors, NamesTheTensorThatIsNotThere) {
  const TemporaryFolder folder;
  save(folder / "a", {{"layer.weight", formula(DType::kF32, {1})}});
  try {
    SafetensorsFile(folder / "a").load("layer.weigth");
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr("has no tensor \"layer.weigth\"; did you mean 'layer.weight'?"));
  }
}

TEST(Safetensors, ListsDtypesThatTensorsCannotHave) {
  const TemporaryFolder folder;
  const SafetensorsFile file(
      folder.write("a", with_length(R"({"x":{"dtype":"U16","shape":[1],"data_offsets":[0,2]}})", "ab")));
  EXPECT_EQ(file.entries()[0].dtype, "U16");
  EXPECT_THROW(file.load("x"), InvalidArgument);
}

TEST(Safetensors, RefusesToSaveWhatTheFormatCannotHold) {
  const TemporaryFolder folder;
  const Tensor x = formula(DType::kF32, {2});
  const auto path = folder / "a";
  EXPECT_THROW(save(path, {{"x", x}, {"x", x}}), InvalidArgument);
  EXPECT_THROW(save(path, {{"__metadata__", x}}), InvalidArgument);
  EXPECT_THROW(save(path, {{"\xff", x}}), InvalidArgument);
  EXPECT_THROW(save(path, {{"x", x}}, {{"k", "\xff"}}), InvalidArgument);
  EXPECT_THROW(save(path, {{"x", Tensor()}}), InvalidArgument);
  EXPECT_THROW(save(path, {{"x", formula(DType::kC128, {2})}}), InvalidArgument);
  EXPECT_THROW(save(path, {{"x", Tensor::empty({2}, DType::kF32, kNull)}}), InvalidArgument);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

TEST(SafetensorsHeader, SaysWhyAFileIsRefused) {
  const auto entry = [](const char* dtype, const char* shape, const char* offsets) {
    return concat("{\"x\":{\"dtype\":\"", dtype, "\",\"shape\":", shape, ",\"data_offsets\":", offsets, "}}");
  };
  EXPECT_EQ(error_of(with_length(entry("F32", "[1]", "[0,4]"), "abcd")), "");
  EXPECT_EQ(error_of(with_length(entry("F32", "[1]", "[0,4]") + "   ", "abcd")), "");
  EXPECT_THAT(error_of("abc"), HasSubstr("has 3 bytes; a file has at least 8"));
  EXPECT_THAT(error_of("\x80garbage"), HasSubstr("Is this a safetensors file?"));
  EXPECT_THAT(error_of(with_length("{}", "").substr(0, 9)), HasSubstr("only 1 follow: it was cut off"));
  EXPECT_THAT(error_of(with_length(" {}", "")), HasSubstr("should begin with '{'"));
  EXPECT_THAT(error_of(with_length("{]", "")), HasSubstr("is not JSON"));
  EXPECT_THAT(error_of(with_length("{\"\xff\":{}}", "")), HasSubstr("is not JSON"));
  EXPECT_THAT(error_of(with_length(R"({"a":[[[1]]]})", "")), HasSubstr("nested more than 3 levels"));
  EXPECT_THAT(error_of(with_length(R"({"x":{},"x":{}})", "")), HasSubstr("has the key \"x\" twice"));
  EXPECT_THAT(error_of(with_length(R"({"x":{"dtype":"F32","shape":[]}})", "")), HasSubstr("needs dtype, shape and"));
  EXPECT_THAT(error_of(with_length(R"({"x":{"strides":[]}})", "")), HasSubstr("unknown member \"strides\""));
  EXPECT_THAT(error_of(with_length(R"({"x":7})", "")),
              HasSubstr("it: tensor \"x\" should be an object, but is an integer"));
  EXPECT_THAT(error_of(with_length(R"({"__metadata__":{"k":1}})", "")),
              HasSubstr("it: __metadata__: k should be a string"));
  EXPECT_THAT(error_of(with_length(entry("F33", "[1]", "[0,4]"), "abcd")), HasSubstr("unknown dtype \"F33\""));
  EXPECT_THAT(error_of(with_length(entry("F32", "[2]", "[0,4]"), "abcd")), HasSubstr("needs 8 bytes, but has the"));
  EXPECT_THAT(error_of(with_length(entry("F32", "[-1]", "[0,4]"), "abcd")),
              HasSubstr("it: tensor \"x\": shape should not be negative"));
  EXPECT_THAT(error_of(with_length(entry("F32", "[1.0]", "[0,4]"), "abcd")), HasSubstr("but is a real number"));
  EXPECT_THAT(error_of(with_length(entry("F32", "[1]", "[0]"), "abcd")), HasSubstr("should have two data_offsets"));
  EXPECT_THAT(error_of(with_length(entry("F32", "[1]", "[4,0]"), "abcd")), HasSubstr("needs 4 bytes"));
  EXPECT_THAT(error_of(with_length(entry("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), "abcd")), HasSubstr("9 dimensions"));
  // 2^32 * 2^32 * 4 bytes is 0 in 64 bits, and so are 2^62 * 4.
  EXPECT_THAT(error_of(with_length(entry("F32", "[4294967296,4294967296]", "[0,0]"), "")),
              HasSubstr("it: tensor \"x\": "));
  EXPECT_THAT(error_of(with_length(entry("F32", "[4611686018427387904]", "[0,0]"), "")),
              HasSubstr("it: tensor \"x\": "));
  EXPECT_THAT(error_of(with_length(entry("F32", "7", "[0,4]"), "abcd")),
              HasSubstr("it: tensor \"x\": shape should be"));
  EXPECT_THAT(error_of(with_length(entry("F32", "[1]", "4"), "abcd")),
              HasSubstr("it: tensor \"x\": data_offsets should"));
  EXPECT_THAT(error_of(with_length(entry("F32", "[1]", "[0,\"4\"]"), "abcd")),
              HasSubstr("it: tensor \"x\": data_offsets"));
  EXPECT_THAT(error_of(with_length(entry("F32", "[1]", "[0,4]"), "abc")), HasSubstr("it was cut off"));
  EXPECT_THAT(error_of(with_length(entry("F32", "[1]", "[0,4]"), "abcde")), HasSubstr("has 5 bytes of data"));
}

TEST(SafetensorsHeader, RefusesHolesAndOverlaps) {
  const auto two = [](const char* first, const char* second) {
    return concat(R"({"x":{"dtype":"U8","shape":[2],"data_offsets":)", first,
                  R"(},"y":{"dtype":"U8","shape":[2],"data_offsets":)", second, "}}");
  };
  EXPECT_EQ(error_of(with_length(two("[0,2]", "[2,4]"), "abcd")), "");
  EXPECT_EQ(error_of(with_length(two("[2,4]", "[0,2]"), "abcd")), "");
  EXPECT_THAT(error_of(with_length(two("[0,2]", "[1,3]"), "abc")), HasSubstr("they overlap"));
  EXPECT_THAT(error_of(with_length(two("[0,2]", "[0,2]"), "ab")), HasSubstr("they overlap"));
  EXPECT_THAT(error_of(with_length(two("[0,2]", "[3,5]"), "abcde")), HasSubstr("there is a hole"));
  EXPECT_THAT(error_of(with_length(two("[1,3]", "[3,5]"), "abcde")), HasSubstr("there is a hole"));
}

}  // namespace
}  // namespace chorale::io
