// What the table tests do with rows and samples.
#pragma once

#include <string>
#include <vector>

#include "chorale/op/builder.h"
#include "chorale/op/table.h"

namespace chorale::op {

// The results of a row for these inputs.
std::vector<Tensor> run(const OpDef& row, const std::vector<Tensor>& in, const Attrs& attrs);

// The sample with its floating inputs in `dtype` (complex ones in the complex type with such parts).
std::vector<Tensor> cast_inputs(const std::vector<Tensor>& in, DType dtype);
// Equal values elsewhere in memory, with other strides.
enum class Layout { kEverySecond, kReversedDims, kShifted };
std::vector<Tensor> relayout(const std::vector<Tensor>& in, Layout layout);
std::vector<Tensor> on_null_device(const std::vector<Tensor>& in);
std::vector<Tensor> copies(const std::vector<Tensor>& in);
std::vector<Tensor> on_device(const std::vector<Tensor>& in, Device device);
// Whether every input has its elements in memory, as those of a sparse tensor have not.
bool is_dense_sample(const Sample& sample);
// Gradients of the sum of squares of the row's real results, by the inputs that want one; none where there is no such
// sum.
std::vector<Tensor> gradients_on(Device device, const OpDef& row, const Sample& sample);

// Expects equal shapes, dtypes and values: |a - b| <= tolerance * (1 + |b|), with NaN and infinities equal to
// themselves.
void expect_close(const Tensor& a, const Tensor& b, double tolerance, const std::string& what);

std::string describe(const OpDef& row, const Sample& sample);

}  // namespace chorale::op
