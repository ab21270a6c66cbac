#include "chorale/io/npy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::io {
namespace {

struct NpyCase {
  const char* dtype;  // NumPy's name
  int version;
  bool fortran_order;
  std::string_view file;
};
#include "chorale/io/testdata/npy.inc"

using testing::HasSubstr;

constexpr std::pair<std::string_view, DType> kNames[] = {
    {"bool", DType::kBool},   {"uint8", DType::kU8},      {"int8", DType::kI8},         {"int16", DType::kI16},
    {"int32", DType::kI32},   {"int64", DType::kI64},     {"float16", DType::kF16},     {"float32", DType::kF32},
    {"float64", DType::kF64}, {"complex64", DType::kC64}, {"complex128", DType::kC128}, {">i2", DType::kI16},
    {">f4", DType::kF32},     {">c16", DType::kC128},     {">i4", DType::kI32}};

DType dtype_named(std::string_view name) {
  return std::find_if(std::begin(kNames), std::end(kNames), [&](const auto& row) { return row.first == name; })->second;
}

// Element i is i % 7 - 2.
std::vector<complex128> values_of(DType dtype) {
  if (dtype == DType::kBool) return {1, 1, 0, 1, 1, 1};
  if (dtype == DType::kU8) return {254, 255, 0, 1, 2, 3};
  return {-2, -1, 0, 1, 2, 3};
}

std::string error_of(std::string_view file) {
  return message_of([&] { parse_npy("it", file); });
}
std::string with_header(const std::string& header, std::string_view data = "") {
  return std::string("\x93NUMPY\x01\0", 8) + static_cast<char>(header.size()) + '\0' + header + std::string(data);
}

TEST(Npy, ReadsWhatNumPyWrites) {
  const TemporaryFolder folder;
  for (const NpyCase& row : kNpyCases) {
    SCOPED_TRACE(concat(row.dtype, " version ", row.version, row.fortran_order ? " in Fortran order" : ""));
    const Tensor x = load_npy(folder.write("a.npy", row.file));
    EXPECT_EQ(x.dtype(), dtype_named(row.dtype));
    EXPECT_EQ(x.sizes(), (Shape{2, 3}));
    EXPECT_EQ(x.strides(), row.fortran_order ? (Strides{1, 2}) : (Strides{3, 1}));
    EXPECT_EQ(x.to_vector<complex128>(), values_of(x.dtype()));
  }
}

TEST(Npy, WritesWhatNumPyWrites) {
  const TemporaryFolder folder;
  int written = 0;
  for (const NpyCase& row : kNpyCases) {
    if (row.version != 1 || row.fortran_order || row.dtype[0] == '>') continue;
    SCOPED_TRACE(row.dtype);
    save_npy(folder / "b.npy", load_npy(folder.write("a.npy", row.file)));
    EXPECT_EQ(folder.read("b.npy"), row.file);
    ++written;
  }
  EXPECT_EQ(written, 11);
}

TEST(Npy, KeepsEveryDTypeAndRank) {
  const TemporaryFolder folder;
  for (const DType dtype : kAllDTypes) {
    for (const Shape& sizes : {Shape{}, Shape{3}, Shape{0, 2}, Shape{1, 2, 1, 1, 1, 1, 1, 2}}) {
      Tensor x = Tensor::empty(sizes, dtype);
      for (size_t i = 0; i < static_cast<size_t>(x.elems()) * x.elem_bytes(); ++i) {
        static_cast<uint8_t*>(x.raw())[i] = static_cast<uint8_t>(i % 2);
      }
      save_npy(folder / "a.npy", x);
      const Tensor y = load_npy(folder / "a.npy");
      EXPECT_EQ(y.dtype(), dtype);
      EXPECT_EQ(y.sizes(), sizes);
      EXPECT_EQ(y.to_vector<complex128>(), x.to_vector<complex128>());
    }
  }
}

TEST(Npy, LiesOnTheMapping) {
  const TemporaryFolder folder;
  save_npy(folder / "a.npy", Tensor::from({1.f, 2.f}, {2}));
  const Tensor x = load_npy(folder / "a.npy");
  std::filesystem::remove(folder / "a.npy");
  EXPECT_TRUE(x.storage()->read_only());
  EXPECT_EQ(x.to_vector<float>(), (std::vector<float>{1, 2}));
}

TEST(Npy, SavesTransposedTensors) {
  const TemporaryFolder folder;
  save_npy(folder / "a.npy", Tensor::from({1.f, 2.f, 3.f, 4.f, 5.f, 6.f}, {2, 3}).view_as({3, 2}, {1, 3}, 0));
  EXPECT_EQ(load_npy(folder / "a.npy").to_vector<float>(), (std::vector<float>{1, 4, 2, 5, 3, 6}));
}

TEST(Npy, SaysWhyAFileIsRefused) {
  const std::string good = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n";
  EXPECT_EQ(error_of(with_header(good, "abcd")), "");
  EXPECT_EQ(error_of(with_header("{'shape':(1L),\"descr\":'f4','fortran_order':True}", "abcd")), "");
  EXPECT_THAT(error_of("NUMPY"), HasSubstr("is not a .npy file"));
  EXPECT_THAT(error_of("\x93NUMPY\x01"), HasSubstr("was cut off in its header"));
  EXPECT_THAT(error_of(std::string_view("\x93NUMPY\x04\0\0\0\0\0", 12)), HasSubstr("has version 4.0"));
  EXPECT_THAT(error_of(std::string_view("\x93NUMPY\x02\0\xff\xff\xff\xff", 12)),
              HasSubstr("header of 4294967295 bytes"));
  EXPECT_THAT(error_of(with_header(good).substr(0, 30)), HasSubstr("was cut off in its header"));
  EXPECT_THAT(error_of(with_header(good, "abc")), HasSubstr("needs 4 bytes of elements, but has 3"));
  EXPECT_THAT(error_of(with_header(good, "abcde")), HasSubstr("needs 4 bytes of elements, but has 5"));
  const auto header = [](const char* descr, const char* order, const char* shape) {
    return with_header(concat("{'descr': ", descr, ", 'fortran_order': ", order, ", 'shape': ", shape, "}"));
  };
  EXPECT_EQ(error_of(header("'<f4'", "False", "(0,)")), "");
  EXPECT_THAT(error_of(header("'|O'", "False", "(0,)")), HasSubstr("elements of type '|O', which tensors cannot have"));
  EXPECT_THAT(error_of(header("'<u4'", "False", "(0,)")), HasSubstr("elements of type '<u4'"));
  EXPECT_THAT(error_of(header("[('a', '<f4')]", "False", "(0,)")), HasSubstr("holds records"));
  EXPECT_THAT(error_of(with_header("{'descr")), HasSubstr("cannot be understood: there is a text without its end"));
  EXPECT_THAT(error_of(header("'<f4'", "Maybe", "(0,)")), HasSubstr("neither True nor False"));
  EXPECT_THAT(error_of(header("'<f4'", "False", "(-1,)")), HasSubstr("no size of a dimension"));
  EXPECT_THAT(error_of(header("'<f4'", "False", "(99999999999999999999,)")), HasSubstr("no size of a dimension"));
  EXPECT_THAT(error_of(header("'<f4'", "False", "(0, 1, 1, 1, 1, 1, 1, 1, 1)")), HasSubstr("more than 8 dimensions"));
  EXPECT_NE(error_of(header("'<f4'", "False", "(4294967296, 4294967296)")), "");  // 2^66 bytes are 0 in 64 bits
  EXPECT_THAT(error_of(with_header("{'descr': '<f4', 'descr': '<f4'}")), HasSubstr("a key twice"));
  EXPECT_THAT(error_of(with_header("{'descr': '<f4'}")), HasSubstr("not all of"));
  EXPECT_THAT(error_of(with_header("{'other': 1}")), HasSubstr("an unknown key"));
  EXPECT_THAT(error_of(with_header("{} x")), HasSubstr("something behind the dictionary"));
}

}  // namespace
}  // namespace chorale::io
