// Facts that hold for every row of the op table and every sample of it. A new row needs no line here.
#include <gtest/gtest.h>

#include <cstring>
#include <sstream>

#include "chorale/api/table_test_util.h"
#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/view.h"

namespace chorale::op {
namespace {

class Table : public ::testing::TestWithParam<const OpDef*> {
 protected:
  const OpDef& row() const { return *GetParam(); }
  std::vector<Sample> samples() const { return row().samples ? row().samples() : std::vector<Sample>{}; }
};

TEST_P(Table, RowIsComplete) {
  EXPECT_NE(row().inputs, nullptr);
  EXPECT_NE(row().infer == nullptr, !row().dynamic) << "shapes come from inference, or from the kernel of a dynamic op";
  EXPECT_TRUE(row().cpu || row().view) << "a kernel, or a view";
  EXPECT_NE(row().grad, nullptr) << "say not_differentiable aloud";
  EXPECT_TRUE(row().shard.labels || row().shard.ways || row().shard.replicate) << "say kReplicateOnly aloud";
  EXPECT_FALSE(samples().empty()) << "a row without samples is not tested";
  EXPECT_EQ(find_op(row().name), &row()) << "two rows have one name";
}

TEST_P(Table, AttributesSurviveARoundTripThroughTheirFields) {
  for (const Sample& sample : samples()) {
    ASSERT_EQ(row().attrs ? &row().attrs() : nullptr, sample.attrs.type()) << describe(row(), sample);
    if (!row().attrs) continue;
    Attrs copy(row().attrs());
    for (const kernel::Field& field : sample.attrs.type()->fields) copy.set(field.name, sample.attrs.at(field));
    EXPECT_EQ(copy, sample.attrs) << describe(row(), sample);
    EXPECT_EQ(copy.hash(), sample.attrs.hash());
  }
}

TEST_P(Table, InferenceTellsTheTruthInEveryDtype) {
  if (row().dynamic) {
    EXPECT_FALSE(row().view);
    return;
  }
  for (const Sample& sample : samples()) {
    for (DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
      const auto in = cast_inputs(sample.in, dtype);
      if (!in.empty() && in[0].defined() && !row().dtypes.has(in[0].dtype())) {
        if (!in[0].is_sparse()) {
          EXPECT_THROW(run(row(), in, sample.attrs), InvalidArgument) << describe(row(), sample) << " in " << dtype;
        }
        continue;
      }
      const auto real = run(row(), in, sample.attrs);
      if (in.empty()) continue;
      const auto inferred = run(row(), on_null_device(in), sample.attrs);
      for (size_t i = 0; i < real.size(); ++i) {
        EXPECT_EQ(inferred[i].device(), kNull);
        EXPECT_EQ(inferred[i].sizes(), real[i].sizes()) << describe(row(), sample) << " in " << dtype;
        EXPECT_EQ(inferred[i].dtype(), real[i].dtype()) << describe(row(), sample) << " in " << dtype;
        EXPECT_EQ(inferred[i].strides(), real[i].strides()) << describe(row(), sample) << " in " << dtype;
      }
    }
  }
}

TEST_P(Table, LowerPrecisionsAgreeWithHigherOnes) {
  struct Step {
    DType coarse, fine;
    double tolerance;
  };
  for (const Sample& sample : samples()) {
    for (const Step& step : {Step{DType::kF32, DType::kF64, sample.f32_tolerance > 0 ? sample.f32_tolerance : 2e-5},
                             Step{DType::kF16, DType::kF32, 1e-2}, Step{DType::kBF16, DType::kF32, 6e-2}}) {
      const auto coarse_in = cast_inputs(sample.in, step.coarse);
      if (coarse_in.empty() || !coarse_in[0].defined() || !row().dtypes.has(coarse_in[0].dtype())) continue;
      // The same rounded inputs in the finer type, so that only the op's own rounding is compared.
      const auto fine_in = cast_inputs(coarse_in, step.fine);
      if (!row().dtypes.has(fine_in[0].dtype())) continue;
      const auto coarse = run(row(), coarse_in, sample.attrs), fine = run(row(), fine_in, sample.attrs);
      for (size_t i = 0; i < coarse.size(); ++i) {
        std::ostringstream what;
        what << describe(row(), sample) << " output " << i << " in " << step.coarse;
        expect_close(coarse[i], fine[i], step.tolerance, what.str());
      }
    }
  }
}

TEST_P(Table, LayoutOfInputsDoesNotMatter) {
  for (const Sample& sample : samples()) {
    const auto expected = run(row(), sample.in, sample.attrs);
    for (Layout layout : {Layout::kEverySecond, Layout::kReversedDims, Layout::kShifted}) {
      // as_strided and its like are defined by the layout itself.
      if (std::string_view(row().name).starts_with("as_strided")) continue;
      std::vector<Tensor> out;
      try {
        out = run(row(), relayout(sample.in, layout), sample.attrs);
      } catch (const InvalidArgument& error) {
        // A view may say that it would need a copy.
        EXPECT_TRUE(row().view) << describe(row(), sample) << ": " << error.what();
        continue;
      }
      for (size_t i = 0; i < out.size(); ++i) {
        expect_close(out[i], expected[i], 1e-12, describe(row(), sample) + " with another layout");
      }
    }
  }
}

TEST_P(Table, InPlaceAndOutFormsEqualThePlainOne) {
  if (row().dynamic) {
    for (const Sample& sample : samples()) {
      const auto out = run(row(), sample.in, sample.attrs);
      EXPECT_THROW(current().call_into(row(), sample.in, sample.attrs, out), InvalidArgument);
    }
    return;
  }
  for (const Sample& sample : samples()) {
    const auto expected = run(row(), sample.in, sample.attrs);
    std::vector<Tensor> out;
    for (const Tensor& y : expected) {
      Strides strides = contiguous_strides(y.sizes());
      for (int64_t& stride : strides) stride *= 3;  // an awkward place to write to
      out.push_back(Tensor::empty_strided(y.sizes(), strides, y.dtype()));
    }
    current().call_into(row(), sample.in, sample.attrs, out);
    for (size_t i = 0; i < out.size(); ++i) {
      expect_close(out[i], expected[i], 0, describe(row(), sample) + " into a given tensor");
      EXPECT_EQ(out[i].storage()->version(), 1u);
    }
    if (expected.size() != 1) continue;
    for (size_t k = 0; k < sample.in.size(); ++k) {
      if (!sample.in[k].defined() || !(sample.in[k].sizes() == expected[0].sizes()) ||
          sample.in[k].dtype() != expected[0].dtype())
        continue;
      const auto in = copies(sample.in);
      current().call_into(row(), in, sample.attrs, {&in[k], 1});
      expect_close(in[k], expected[0], 0, describe(row(), sample) + " in place");
    }
  }
}

TEST_P(Table, AResultThatDoesNotFitIsRefusedAndLeftAlone) {
  for (const Sample& sample : samples()) {
    std::vector<Tensor> out;
    for (const Tensor& y : run(row(), sample.in, sample.attrs)) {
      Shape sizes = y.sizes();
      if (sizes.size() == kMaxDims) sizes.pop_back();
      sizes.push_back(2);
      out.push_back(fill_(Tensor::empty(sizes, y.dtype()), 1));
    }
    const auto before = copies(out);
    EXPECT_THROW(current().call_into(row(), sample.in, sample.attrs, out), InvalidArgument) << describe(row(), sample);
    for (size_t i = 0; i < out.size(); ++i) {
      expect_close(out[i], before[i], 0, describe(row(), sample) + " wrote into a tensor that it refused");
      EXPECT_EQ(out[i].storage()->version(), 1u);
    }
  }
}

TEST_P(Table, InputsAreNotWritten) {
  for (const Sample& sample : samples()) {
    const auto before = copies(sample.in);
    run(row(), sample.in, sample.attrs);
    for (size_t i = 0; i < before.size(); ++i) {
      if (before[i].defined()) expect_close(sample.in[i], before[i], 0, describe(row(), sample) + " changed an input");
    }
  }
}

TEST_P(Table, ThreadsDoNotChangeTheBits) {
  const int before = thread_count();
  for (const Sample& sample : samples()) {
    set_thread_count(1);
    const auto one = run(row(), sample.in, sample.attrs);
    set_thread_count(3);
    const auto three = run(row(), sample.in, sample.attrs);
    for (size_t i = 0; i < one.size(); ++i)
      expect_close(three[i], one[i], 0, describe(row(), sample) + " with three threads");
  }
  set_thread_count(before);
}

// Rows that work element by element take scalars and broadcast operands.
TEST_P(Table, ElementwiseRowsBroadcast) {
  if (!row().shard.labels || std::strcmp(row().shard.labels, kElementwiseLabels) != 0) return;
  for (const Sample& sample : samples()) {
    if (sample.in.size() < 2) continue;
    for (size_t k = 0; k < sample.in.size(); ++k) {
      auto in = sample.in;
      if (!in[k].defined() || in[k].elems() == 0) continue;
      const Tensor scalar = clone(view(narrow(reshape(in[k], {-1}), 0, 0, 1), {}));
      in[k] = scalar;
      const auto broadcast = run(row(), in, sample.attrs);
      in[k] = clone(expand(scalar, broadcast[0].sizes()));
      const auto expected = run(row(), in, sample.attrs);
      expect_close(broadcast[0], expected[0], 0, describe(row(), sample) + " with a scalar operand");
    }
  }
}

std::string row_name(const ::testing::TestParamInfo<const OpDef*>& info) { return info.param->name; }
INSTANTIATE_TEST_SUITE_P(Ops, Table, ::testing::ValuesIn(all_ops().begin(), all_ops().end()), row_name);

}  // namespace
}  // namespace chorale::op
