// Loops over elements whose bodies are written while the program runs (codegen/render.h), on devices that compile such
// text themselves. A kind of device that does adds it beside its kernels.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "chorale/tensor/tensor.h"

namespace chorale::kernel {

// Inputs first, then results, none of which overlaps another operand unless both lie alike.
struct ElementLoop {
  // Statements in the device's words for one element: they read x0, x1, ... and set y0, y1, .... Truth values are bool,
  // all others f64 where `is_f64`, else f32.
  std::string body;
  std::string name;  // follows from the body and the dtypes
  bool is_f64 = false;
  size_t inputs = 0;
  std::vector<DType> dtypes;                  // by operand
  std::vector<int64_t> sizes;                 // the innermost dimension last
  std::vector<std::vector<int64_t>> strides;  // by operand; in elements
};

// Words of vec/scalar_ops.inc of which devices have a form for results of 16 bits, with "_16" behind the name.
inline bool has_narrow_form(std::string_view word) {
  return word == "exp" || word == "sigmoid" || word == "normal_cdf";
}

// Thread-safe.
class ElementLoops {
 public:
  virtual ~ElementLoops() = default;
  virtual void run(const ElementLoop& loop, std::span<const Tensor> in, std::span<Tensor> out, Stream stream) = 0;
};

// Null where a kind of device has none.
ElementLoops* find_element_loops(DeviceType type);
// It lives as long as the process.
void set_element_loops(DeviceType type, ElementLoops* loops);

}  // namespace chorale::kernel
