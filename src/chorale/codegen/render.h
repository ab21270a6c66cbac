// Turns fused nodes into text: plain C in the words of vocabulary.c, and CUDA C.
//
// A kernel is a function of pointers, sizes and strides, so that its text says what is computed and how the innermost
// dimension lies, not how large things are: graphs that differ in sizes only share their code.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "chorale/codegen/cache.h"
#include "chorale/graph/ir.h"
#include "chorale/kernel/element_loop.h"

namespace chorale::codegen {

// What a kernel computes in: f32 (also for bf16), f64, or either where only truth values are handled.
enum class Lanes : uint8_t { kF32, kF64, kAny };

// How C names the elements of a tensor.
const char* c_type(DType dtype);

// Whether a node of `graph` can be part of a fused kernel, and in which lanes.
bool can_render(const graph::Graph& graph, const graph::Node& node, Lanes& lanes);

// The elements of a fused node as loops: dimensions of size 1 left out, neighbours joined, the innermost last.
struct Loops {
  std::vector<int64_t> sizes;
  std::vector<std::vector<int64_t>> strides;  // by operand, inputs first; in elements
  int64_t elems = 1;
};
Loops loops_of(const graph::Graph& body);

// `void NAME(char* const* p, const long* a, long begin, long end)`: p are the operands; a the sizes, then the strides
// of each operand. [begin, end) are elements where there is one dimension, rows elsewhere. The name follows from the
// text.
KernelText render(const graph::Graph& body);
// All that a file of kernels begins with.
std::string prelude();

// The same for a device with a compiler of its own: one element at a time, in the words of kernel/cuda/vocabulary.cu.
kernel::ElementLoop render_loop(const graph::Graph& body);

}  // namespace chorale::codegen
