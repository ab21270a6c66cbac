#include "chorale/kernel/attrs.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <type_traits>

namespace chorale {

enum class Colour : uint8_t { kRed, kGreen, kBlue };
struct EveryKind {
  bool flag = false;
  int64_t dim = -1;
  double eps = 1e-5;
  DType dtype = DType::kF32;
  Colour colour = Colour::kGreen;
  IntList dims{1, 2};
  Scalar value = 0.5;
};
CHORALE_FIELDS(EveryKind, flag, dim, eps, dtype, colour, dims, value)

struct Other {
  bool flag = false;
};
CHORALE_FIELDS(Other, flag)

struct Widest {
  IntList sizes, strides;
  int64_t offset = 0;
};
CHORALE_FIELDS(Widest, sizes, strides, offset)

namespace {

const kernel::AttrsType& every_kind() { return attrs_type(base::TypeTag<EveryKind>{}); }

// One changed value per field.
const std::pair<const char*, kernel::FieldValue> kChanges[] = {
    {"flag", true},
    {"dim", int64_t{3}},
    {"eps", 0.25},
    {"dtype", std::string("bf16")},
    {"colour", int64_t{2}},
    {"dims", std::vector<int64_t>{4, 5, 6}},
    {"value", Scalar(complex128(1, 2))},
};

std::string refusal(const char* field, const kernel::FieldValue& value, Attrs attrs = EveryKind{}) {
  const Attrs before = attrs;
  try {
    attrs.set(field, value);
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(attrs, before) << "a refused value must change nothing";
    return error.what();
  }
  return "no error";
}

TEST(Attrs, HoldsItsStructByValue) {
  EveryKind given;
  given.dim = 7;
  const Attrs attrs = given;
  given.dim = 8;
  EXPECT_EQ(attrs.get<EveryKind>().dim, 7);
  EXPECT_EQ(attrs.type(), &every_kind());
  const Attrs copy = attrs;
  EXPECT_EQ(copy.get<EveryKind>().dims[1], 2);
  Attrs assigned;
  assigned = copy;
  EXPECT_EQ(assigned, attrs);
  const Attrs& same = assigned;
  assigned = same;
  EXPECT_EQ(assigned, attrs);
}

TEST(Attrs, OfATypeStartWithItsDefaults) {
  const Attrs attrs(every_kind());
  EXPECT_EQ(attrs, Attrs(EveryKind{}));
  EXPECT_EQ(attrs.get<EveryKind>().colour, Colour::kGreen);
}

TEST(Attrs, TheWrongStructIsAnInternalError) {
  EXPECT_THROW((void)Attrs(Other{}).get<EveryKind>(), InternalError);
  EXPECT_THROW((void)Attrs().get<EveryKind>(), InternalError);
}

TEST(Attrs, EveryFieldCanBeSetByNameAndReadBack) {
  for (const auto& [name, value] : kChanges) {
    Attrs attrs = EveryKind{};
    attrs.set(name, value);
    for (const kernel::Field& field : every_kind().fields) {
      if (std::string_view(field.name) == name) {
        EXPECT_EQ(attrs.at(field), value) << name;
      } else {
        EXPECT_EQ(attrs.at(field), Attrs(EveryKind{}).at(field)) << field.name;
      }
    }
  }
}

TEST(Attrs, SetWritesTheStructsOwnFields) {
  Attrs attrs = EveryKind{};
  for (const auto& [name, value] : kChanges) attrs.set(name, value);
  const auto& got = attrs.get<EveryKind>();
  EXPECT_TRUE(got.flag);
  EXPECT_EQ(got.dim, 3);
  EXPECT_EQ(got.eps, 0.25);
  EXPECT_EQ(got.dtype, DType::kBF16);
  EXPECT_EQ(got.colour, Colour::kBlue);
  EXPECT_EQ(got.dims.shape(), (Shape{4, 5, 6}));
  EXPECT_EQ(got.value, Scalar(complex128(1, 2)));
}

TEST(Attrs, NumbersConvertWhereNothingIsLost) {
  Attrs attrs = EveryKind{};
  attrs.set("eps", int64_t{2});
  EXPECT_EQ(attrs.get<EveryKind>().eps, 2.0);
  attrs.set("value", int64_t{2});
  EXPECT_EQ(attrs.get<EveryKind>().value, Scalar(2));
  attrs.set("value", 2.0);
  EXPECT_EQ(attrs.get<EveryKind>().value, Scalar(2.0));
  attrs.set("value", true);
  EXPECT_EQ(attrs.get<EveryKind>().value, Scalar(true));
}

TEST(Attrs, UnknownNamesAndWrongKindsAreErrorsThatChangeNothing) {
  const std::string unknown = refusal("dims2", true);
  EXPECT_NE(unknown.find("'dims2'"), std::string::npos) << unknown;
  EXPECT_NE(unknown.find("flag, dim, eps, dtype, colour, dims, value"), std::string::npos) << unknown;
  EXPECT_NE(refusal("flag", int64_t{1}).find("'flag' takes a bool, not an integer"), std::string::npos);
  EXPECT_NE(refusal("dim", 1.0).find("'dim' takes an integer, not a floating number"), std::string::npos);
  EXPECT_NE(refusal("eps", true).find("'eps'"), std::string::npos);
  EXPECT_NE(refusal("dtype", int64_t{1}).find("'dtype'"), std::string::npos);
  EXPECT_NE(refusal("dtype", std::string("f33")).find("'f33'"), std::string::npos);
  EXPECT_NE(refusal("dims", int64_t{1}).find("list of integers"), std::string::npos);
  EXPECT_NE(refusal("dims", std::vector<int64_t>(9)).find("9"), std::string::npos);
  EXPECT_NE(refusal("value", std::string("1")).find("text"), std::string::npos);
  for (const int64_t number : {-1, 256}) {
    EXPECT_NE(refusal("colour", number).find(std::to_string(number)), std::string::npos);
  }
  EXPECT_NE(refusal("flag", true, Attrs()).find("there are none"), std::string::npos);
}

TEST(Attrs, DifferInEveryFieldThatDiffers) {
  const Attrs plain = EveryKind{};
  for (const auto& [name, value] : kChanges) {
    Attrs changed = plain;
    changed.set(name, value);
    EXPECT_NE(changed, plain) << name;
    EXPECT_NE(changed.hash(), plain.hash()) << name;
    Attrs again = plain;
    again.set(name, value);
    EXPECT_EQ(again, changed) << name;
    EXPECT_EQ(again.hash(), changed.hash()) << name;
  }
  EXPECT_EQ(Attrs(), Attrs());
  EXPECT_NE(Attrs(), Attrs(Other{}));
  EXPECT_NE(Attrs(Other{}), plain);
}

TEST(Attrs, PaddingAndUnusedSlotsDoNotCount) {
  // The same fields in memory that held something else before.
  alignas(EveryKind) std::byte dirty[sizeof(EveryKind)];
  std::memset(dirty, 0xff, sizeof(dirty));
  auto* kind = new (dirty) EveryKind;
  kind->dims = IntList{1, 2, 3};
  kind->dims.count = 2;
  EXPECT_EQ(Attrs(*kind), Attrs(EveryKind{}));
  EXPECT_EQ(Attrs(*kind).hash(), Attrs(EveryKind{}).hash());
}

TEST(Attrs, EqualityOfFloatingFieldsIsOfBits) {
  const auto with_eps = [](double eps) {
    EveryKind kind;
    kind.eps = eps;
    return Attrs(kind);
  };
  const auto with_value = [](Scalar value) {
    EveryKind kind;
    kind.value = value;
    return Attrs(kind);
  };
  const double nan = std::nan("");
  EXPECT_EQ(with_eps(nan), with_eps(nan));
  EXPECT_EQ(with_eps(nan).hash(), with_eps(nan).hash());
  EXPECT_NE(with_eps(0.0), with_eps(-0.0));
  EXPECT_EQ(with_value(nan), with_value(nan));
  EXPECT_NE(with_value(0.0), with_value(-0.0));
  EXPECT_NE(with_value(1), with_value(1.0));
}

TEST(Attrs, PrintTheirFieldsInOrder) {
  EXPECT_EQ(concat(Attrs()), "{}");
  EXPECT_EQ(concat(Attrs(EveryKind{})), "{flag=false, dim=-1, eps=1e-05, dtype=f32, colour=1, dims=[1, 2], value=0.5}");
  EXPECT_EQ(concat(Attrs(Other{.flag = true})), "{flag=true}");
}

TEST(Attrs, TheWidestStructFits) {
  Widest widest{.sizes = {1, 2, 3, 4, 5, 6, 7, 8}, .strides = {8, 7, 6, 5, 4, 3, 2, 1}, .offset = 9};
  const Attrs attrs = widest;
  EXPECT_EQ(attrs.get<Widest>().strides[7], 1);
  EXPECT_EQ(attrs.get<Widest>().offset, 9);
}

TEST(IntList, ComesFromEveryKindOfList) {
  EXPECT_TRUE(IntList().empty());
  EXPECT_EQ(IntList(3).shape(), Shape{3});
  EXPECT_EQ(IntList({1, 2}).shape(), (Shape{1, 2}));
  EXPECT_EQ(IntList(Shape{1, 2, 3}).size(), 3u);
  EXPECT_EQ(IntList(std::vector<int64_t>{4, 5})[1], 5);
  try {
    IntList(std::vector<int64_t>(9));
    FAIL() << "no error";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("at most 8 entries, not 9"), std::string::npos) << error.what();
  }
  static_assert(std::is_trivially_copyable_v<IntList>);
}

}  // namespace
}  // namespace chorale
