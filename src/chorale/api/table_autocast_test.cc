// What autocast does to every row of the op table that asks for it: the dtype that comes out, and the very values of
// casting by hand.
#include <gtest/gtest.h>

#include <functional>

#include "chorale/api/table_test_util.h"
#include "chorale/autocast/autocast.h"
#include "chorale/op/copy.h"

namespace chorale::op {
namespace {

using Inputs = std::vector<Tensor>;

// Floating inputs in the dtype that choose(i) says.
Inputs with_dtypes(const Inputs& in, const std::function<DType(size_t)>& choose) {
  Inputs result = in;
  for (size_t i = 0; i < in.size(); ++i) {
    if (in[i].defined() && is_floating(in[i].dtype())) result[i] = to(in[i], choose(i));
  }
  return result;
}
bool has_floating(const Inputs& in) {
  return std::any_of(in.begin(), in.end(), [](const Tensor& x) { return x.defined() && is_floating(x.dtype()); });
}

class AutocastTable : public ::testing::TestWithParam<const OpDef*> {
 protected:
  const OpDef& row() const { return *GetParam(); }
};

TEST_P(AutocastTable, ComputesInTheDtypeThatTheRowAsksFor) {
  size_t compared = 0;
  for (const Sample& sample : row().samples()) {
    if (!has_floating(sample.in)) continue;
    for (DType lower : {DType::kBF16, DType::kF16}) {
      // What arrives: all in f32, all lowered, or a mixture.
      const std::function<DType(size_t)> arrivals[] = {[](size_t) { return DType::kF32; },
                                                       [=](size_t) { return lower; },
                                                       [=](size_t i) { return i % 2 == 0 ? lower : DType::kF32; }};
      for (const auto& arrival : arrivals) {
        const Inputs in = with_dtypes(sample.in, arrival);
        DType wanted = row().autocast == Cast::kLower ? lower : DType::kF32;
        if (row().autocast == Cast::kWidest) {
          wanted = lower;
          for (const Tensor& x : in) {
            if (x.defined() && x.dtype() == DType::kF32) wanted = DType::kF32;
          }
        }
        SCOPED_TRACE(describe(row(), sample));
        const auto by_hand = run(row(), with_dtypes(in, [=](size_t) { return wanted; }), sample.attrs);
        Inputs out;
        {
          const Autocast scope(lower);
          out = run(row(), in, sample.attrs);
        }
        ASSERT_EQ(out.size(), by_hand.size());
        for (size_t i = 0; i < out.size(); ++i) expect_close(out[i], by_hand[i], 0, row().name);
        if (is_floating(out[0].dtype())) {
          EXPECT_EQ(out[0].dtype(), wanted);
        }
        ++compared;
      }
    }
  }
  EXPECT_GT(compared, 0u) << "no sample has floating inputs";
}

TEST_P(AutocastTable, LeavesF64Alone) {
  for (const Sample& sample : row().samples()) {
    if (!has_floating(sample.in)) continue;
    SCOPED_TRACE(describe(row(), sample));
    const auto expected = run(row(), sample.in, sample.attrs);
    const Autocast scope(DType::kBF16);
    const auto out = run(row(), sample.in, sample.attrs);
    for (size_t i = 0; i < out.size(); ++i) expect_close(out[i], expected[i], 0, row().name);
  }
}

std::vector<const OpDef*> rows_that_cast() {
  std::vector<const OpDef*> rows;
  for (const OpDef* row : all_ops()) {
    if (row->autocast != Cast::kNone) rows.push_back(row);
  }
  return rows;
}
INSTANTIATE_TEST_SUITE_P(Rows, AutocastTable, ::testing::ValuesIn(rows_that_cast()),
                         [](const auto& param) { return std::string(param.param->name); });

}  // namespace
}  // namespace chorale::op
