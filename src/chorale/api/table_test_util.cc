#include "chorale/api/table_test_util.h"

#include <gtest/gtest.h>

#include <cmath>
#include <sstream>

#include "chorale/autograd/autograd.h"
#include "chorale/op/copy.h"
#include "chorale/op/lists.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/reduce.h"

namespace chorale::op {

std::vector<Tensor> run(const OpDef& row, const std::vector<Tensor>& in, const Attrs& attrs) {
  std::vector<Tensor> out(result_count(row, in, attrs));
  current().call(row, in, attrs, out);
  return out;
}

std::vector<Tensor> cast_inputs(const std::vector<Tensor>& in, DType dtype) {
  std::vector<Tensor> cast;
  for (const Tensor& x : in) {
    const bool floating = x.defined() && is_floating(x.dtype());
    const bool complex = x.defined() && is_complex(x.dtype());
    cast.push_back(floating ? to(x, dtype) : complex ? to(x, complex_of(dtype)) : x);
  }
  return cast;
}

std::vector<Tensor> relayout(const std::vector<Tensor>& in, Layout layout) {
  std::vector<Tensor> other;
  for (const Tensor& x : in) {
    if (!x.defined() || x.is_sparse()) {
      other.push_back(x);
      continue;
    }
    Tensor copy;
    if (layout == Layout::kReversedDims) {
      Strides strides(x.sizes().size());
      int64_t step = 1;
      for (size_t d = 0; d < strides.size(); ++d) {
        strides[d] = step;
        step *= std::max<int64_t>(x.sizes()[d], 1);
      }
      copy = Tensor::empty_strided(x.sizes(), strides, x.dtype());
    } else if (layout == Layout::kEverySecond) {
      Strides strides = contiguous_strides(x.sizes());
      for (int64_t& stride : strides) stride *= 2;
      copy = Tensor::empty_strided(x.sizes(), strides, x.dtype());
    } else {
      // One element into its storage: nothing is aligned to a vector.
      const Tensor room = Tensor::empty({x.elems() + 1}, x.dtype());
      copy = room.view_as(x.sizes(), contiguous_strides(x.sizes()), 1);
    }
    copy_(copy, x);
    other.push_back(copy);
  }
  return other;
}

std::vector<Tensor> on_null_device(const std::vector<Tensor>& in) {
  std::vector<Tensor> shapes;
  shapes.reserve(in.size());
  for (const Tensor& x : in) {
    shapes.push_back(x.defined() && !x.is_sparse() ? Tensor::empty_strided(x.sizes(), x.strides(), x.dtype(), kNull)
                                                   : x);
  }
  return shapes;
}

std::vector<Tensor> copies(const std::vector<Tensor>& in) {
  std::vector<Tensor> result;
  result.reserve(in.size());
  for (const Tensor& x : in) result.push_back(x.defined() && !x.is_sparse() ? clone(x) : x);
  return result;
}

namespace {
bool close(double a, double b, double tolerance) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) == std::isnan(b);
  if (std::isinf(a) || std::isinf(b)) return a == b;
  return std::abs(a - b) <= tolerance * (1 + std::abs(b));
}
}  // namespace

void expect_close(const Tensor& a, const Tensor& b, double tolerance, const std::string& what) {
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  if (a.is_sparse() || b.is_sparse()) {
    ASSERT_TRUE(a.is_sparse() && b.is_sparse()) << what;
    expect_close(a.sparse().indices, b.sparse().indices, 0, what);
    expect_close(a.sparse().values, b.sparse().values, tolerance, what);
    return;
  }
  const auto x = a.to_vector<complex128>(), y = b.to_vector<complex128>();
  int shown = 0;
  for (size_t i = 0; i < x.size() && shown < 3; ++i) {
    if (close(x[i].real(), y[i].real(), tolerance) && close(x[i].imag(), y[i].imag(), tolerance)) continue;
    ++shown;
    ADD_FAILURE() << what << ": element " << i << " of " << a.sizes() << " is " << x[i] << ", expected " << y[i];
  }
}

std::string describe(const OpDef& row, const Sample& sample) {
  std::ostringstream text;
  text << row.name << "(";
  for (size_t i = 0; i < sample.in.size(); ++i) {
    text << (i ? ", " : "");
    if (sample.in[i].defined()) {
      text << sample.in[i].dtype() << sample.in[i].sizes();
    } else {
      text << "none";
    }
  }
  text << ")" << sample.attrs;
  return text.str();
}

std::vector<Tensor> on_device(const std::vector<Tensor>& in, Device device) {
  std::vector<Tensor> result;
  result.reserve(in.size());
  for (const Tensor& x : in) result.push_back(x.defined() ? to(x, device) : x);
  return result;
}

bool is_dense_sample(const Sample& sample) {
  for (const Tensor& x : sample.in) {
    if (x.defined() && x.is_sparse()) return false;
  }
  return !sample.in.empty();
}

namespace {
Tensor squares_of(const std::vector<Tensor>& out) {
  Tensor total;
  for (const Tensor& y : out) {
    if (!y.defined() || y.is_sparse() || !is_differentiable(y.dtype()) || is_complex(y.dtype())) continue;
    const Tensor part = sum(mul(y, y));
    total = total.defined() ? add(total, part) : part;
  }
  return total;
}

}  // namespace

std::vector<Tensor> gradients_on(Device device, const OpDef& row, const Sample& sample) {
  std::vector<Tensor> in, wanted;
  for (size_t i = 0; i < sample.in.size(); ++i) {
    Tensor x = sample.in[i].defined() ? to(clone(sample.in[i]), device) : sample.in[i];
    if (x.defined() && is_floating(x.dtype()) && !sample.constant.has(i)) {
      set_requires_grad(x);
      wanted.push_back(x);
    }
    in.push_back(x);
  }
  const Tensor loss = squares_of(run(row, in, sample.attrs));
  std::vector<Tensor> result;
  if (!loss.defined() || !requires_grad(loss) || wanted.empty()) return result;
  backward(loss);
  result.reserve(wanted.size());
  for (const Tensor& x : wanted) result.push_back(gradient(x));
  return result;
}

}  // namespace chorale::op
