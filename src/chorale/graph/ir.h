// A graph: values, and nodes in the order in which they run. Values are written once; what a callable wrote in place
// has become new values, and outputs that say which input they are written back to.
//
//   graph(%0: f32[2, 3], %1: f32[3]) {
//     %2: f32[2, 3] = add(%0, %1) {alpha=1}
//     %3: i64[2] = draw(g0, 6)
//     return %2, %2 -> %0
//   }
//
// print() and parse() are inverse to each other. verify() holds a graph to its rules. Text with symbols (symbolic.h) is
// read at the sizes that it was compiled at.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "chorale/graph/recording.h"
#include "chorale/op/prepare.h"

namespace chorale::graph {

struct Value {
  Shape sizes;
  Strides strides;
  DType dtype = DType::kF32;
  Device device;
  friend bool operator==(const Value&, const Value&) = default;
};
int64_t bytes_of(const Value& value);

struct Node {
  enum class Kind : uint8_t {
    kRow,    // a row of the op table
    kDraw,   // a stretch of `words` words of generator number `generator`
    kWrite,  // in[0] with in[1] written over the part of it that `region` says
    kFused,  // several rows run as one kernel: `body`, a graph of their own
    kBlock,  // nodes on small tensors that one kernel runs one behind the other: `body` (graph/blocks.h)
  };
  Kind kind = Kind::kRow;
  const op::OpDef* op = nullptr;
  Attrs attrs;
  std::vector<uint32_t> in;  // values; kNone where absent
  std::vector<uint32_t> out;
  uint32_t generator = 0;
  int64_t words = 0;
  Layout region;  // counted from element 0 of in[0]
  std::shared_ptr<const struct Graph> body;
  uint32_t origin = 0;  // the recorded call that it comes from; not printed
  std::string name() const;
};

struct Output {
  uint32_t value = 0;
  uint32_t into = kNone;  // the input, counted among inputs, that is overwritten with it
};

struct Graph {
  std::vector<Value> values;
  std::vector<uint32_t> inputs;
  std::vector<Node> nodes;
  std::vector<Output> outputs;
  uint32_t generators = 0;

  uint32_t add_value(Value value);
  Node& add(Node node) { return nodes.emplace_back(std::move(node)); }
};

std::string print(const Graph& graph);
// Throws InvalidArgument that names the line.
Graph parse(std::string_view text);
// Throws InternalError that names the node: a value used before it is there or made twice, shapes that are not what the
// row infers, an input written twice.
void verify(const Graph& graph);

// A tensor of this kind, without bytes: what inference reads.
Tensor stand_in(const Value& value);
// What the row's inference says of each result, given stand-ins of the inputs.
op::OutSpecs infer(const Graph& graph, const Node& node);
// Whether a row talks to other ranks: it runs whether its result is read or not, and once for each call.
bool is_collective(const op::OpDef& op);
bool is_collective(const Node& node);
// One that begins a collective, and one that waits for it (which is a view, and has work to do).
bool is_start(const Node& node);
bool is_wait(const Node& node);
// A collective that begins with a copy of its operand into its result, and works there.
bool copies_first(const Node& node);
// How often each value is read, by nodes and outputs.
std::vector<uint32_t> count_uses(const Graph& graph);
// Drops nodes whose results nobody reads, and values that are left over; keeps inputs and outputs. Draws stay: the
// generator moves on. (passes/ has the others.)
void remove_dead_nodes(Graph& graph);
// Gives values new numbers in the order in which they come.
void renumber(Graph& graph);

}  // namespace chorale::graph
