// Graphs as text, and back.
#include <charconv>
#include <cstdlib>
#include <sstream>

#include "chorale/base/error.h"
#include "chorale/graph/ir.h"
#include "chorale/graph/symbolic.h"
#include "chorale/op/table.h"

namespace chorale::graph {
namespace {

void print_value(std::ostream& out, const Graph& graph, uint32_t number) {
  const Value& value = graph.values[number];
  out << '%' << number << ": " << value.dtype << value.sizes;
  if (!(value.strides == contiguous_strides(value.sizes))) out << ':' << value.strides;
  if (value.device != kCpu) out << '@' << value.device;
}

void print_names(std::ostream& out, const std::vector<uint32_t>& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    out << (i ? ", " : "");
    if (values[i] == kNone) {
      out << "none";
    } else {
      out << '%' << values[i];
    }
  }
}

void print_graph(std::ostream& out, const Graph& graph, const std::string& indent) {
  out << '(';
  for (size_t i = 0; i < graph.inputs.size(); ++i) {
    out << (i ? ", " : "");
    print_value(out, graph, graph.inputs[i]);
  }
  out << ") {\n";
  for (const Node& node : graph.nodes) {
    out << indent << "  ";
    for (size_t i = 0; i < node.out.size(); ++i) {
      out << (i ? ", " : "");
      print_value(out, graph, node.out[i]);
    }
    out << " = " << node.name() << '(';
    if (node.kind == Node::Kind::kDraw) {
      out << 'g' << node.generator << ", " << node.words << ')';
    } else {
      print_names(out, node.in);
      out << ')';
    }
    if (node.kind == Node::Kind::kRow && node.attrs.type()) out << ' ' << node.attrs;
    if (node.kind == Node::Kind::kWrite) {
      out << " {sizes=" << node.region.sizes << ", strides=" << node.region.strides << ", offset=" << node.region.offset
          << '}';
    }
    if (node.body) {
      out << ' ';
      print_graph(out, *node.body, indent + "  ");
    }
    out << '\n';
  }
  out << indent << "  return";
  for (size_t i = 0; i < graph.outputs.size(); ++i) {
    out << (i ? ", %" : " %") << graph.outputs[i].value;
    if (graph.outputs[i].into != kNone) out << " -> %" << graph.inputs[graph.outputs[i].into];
  }
  out << '\n' << indent << '}';
}

class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Graph whole() {
    word("graph");
    Graph graph = body();
    space();
    check(at_ == text_.size(), "the end");
    return graph;
  }

 private:
  [[noreturn]] void fail(const std::string& expected) const {
    size_t line = 1;
    for (size_t i = 0; i < at_ && i < text_.size(); ++i) line += text_[i] == '\n' ? 1 : 0;
    throw InvalidArgument(concat("[graph] line ", line, ": expected ", expected, ", found '",
                                 std::string(text_.substr(at_, std::min<size_t>(24, text_.size() - at_))), "'"));
  }
  void check(bool fits, const std::string& expected) const {
    if (!fits) fail(expected);
  }
  void space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  bool accept(std::string_view token) {
    space();
    if (text_.substr(at_, token.size()) != token) return false;
    at_ += token.size();
    return true;
  }
  void word(std::string_view token) { check(accept(token), concat("'", std::string(token), "'")); }
  std::string_view until(std::string_view stops) {
    space();
    const size_t end = std::min(text_.find_first_of(stops, at_), text_.size());
    const std::string_view found = text_.substr(at_, end - at_);
    at_ = end;
    return found;
  }
  int64_t integer() {
    space();
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text_.data() + at_, text_.data() + text_.size(), value);
    check(error == std::errc{}, "an integer");
    at_ = static_cast<size_t>(end - text_.data());
    return value;
  }
  Shape list() {
    Shape values;
    word("[");
    if (accept("]")) return values;
    do values.push_back(integer());
    while (accept(","));
    word("]");
    return values;
  }
  double real(std::string_view text) const {
    char* end = nullptr;
    const std::string copy(text);
    const double value = std::strtod(copy.c_str(), &end);
    check(!copy.empty() && *end == '\0', "a number");
    return value;
  }
  Scalar scalar() {
    const std::string_view text = until(",}");
    if (text == "true" || text == "false") return text == "true";
    if (text.ends_with('j')) {
      const size_t sign =
          text.find_last_of("+-", text.find_last_of('e') == text.find_last_of("+-") - 1 ? text.find_last_of("+-") - 1
                                                                                        : std::string_view::npos);
      check(sign != std::string_view::npos && sign > 0, "a complex number");
      return complex128(real(text.substr(0, sign)), real(text.substr(sign, text.size() - sign - 1)));
    }
    if (text.find_first_of(".enai") == std::string_view::npos) {
      int64_t value = 0;
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
      check(error == std::errc{} && end == text.data() + text.size(), "a number");
      return value;
    }
    return real(text);
  }
  uint32_t number() {
    word("%");
    const int64_t value = integer();
    check(value >= 0 && value < 10'000'000, "the number of a value");
    return static_cast<uint32_t>(value);
  }
  uint32_t typed(Graph& graph) {
    const uint32_t at = number();
    word(":");
    Value value;
    value.dtype = dtype_from_name(until("["));
    value.sizes = list();
    value.strides = accept(":") ? list() : Shape(contiguous_strides(value.sizes));
    if (accept("@")) value.device = device_from_name(until(",) ="));
    if (graph.values.size() <= at) graph.values.resize(at + 1);
    graph.values[at] = std::move(value);
    return at;
  }
  void attributes(Attrs& attrs) {
    word("{");
    if (accept("}")) return;
    do {
      const std::string name(until("="));
      word("=");
      const kernel::Field* field = nullptr;
      for (const kernel::Field& known : attrs.type()->fields) {
        if (name == known.name) field = &known;
      }
      check(field, concat("an attribute of ", attrs.type()->name));
      switch (field->kind) {
        case kernel::FieldKind::kBool: {
          const std::string_view text = until(",}");
          check(text == "true" || text == "false", "true or false");
          attrs.set(name, text == "true");
          break;
        }
        case kernel::FieldKind::kI64:
        case kernel::FieldKind::kEnum:
          attrs.set(name, integer());
          break;
        case kernel::FieldKind::kF64:
          attrs.set(name, real(until(",}")));
          break;
        case kernel::FieldKind::kDType:
          attrs.set(name, std::string(until(",}")));
          break;
        case kernel::FieldKind::kInts:
        case kernel::FieldKind::kSpatial: {
          const Shape values = list();
          attrs.set(name, std::vector<int64_t>(values.begin(), values.end()));
          break;
        }
        case kernel::FieldKind::kScalar:
          attrs.set(name, scalar());
          break;
      }
    } while (accept(","));
    word("}");
  }
  Node node(Graph& graph) {
    Node node;
    do node.out.push_back(typed(graph));
    while (accept(","));
    word("=");
    const std::string name(until("("));
    word("(");
    if (name == "draw") {
      node.kind = Node::Kind::kDraw;
      word("g");
      node.generator = static_cast<uint32_t>(integer());
      graph.generators = std::max(graph.generators, node.generator + 1);
      word(",");
      node.words = integer();
      word(")");
      return node;
    }
    if (!accept(")")) {
      do node.in.push_back(accept("none") ? kNone : number());
      while (accept(","));
      word(")");
    }
    if (name == "write") {
      node.kind = Node::Kind::kWrite;
      word("{sizes=");
      node.region.sizes = list();
      word(", strides=");
      node.region.strides = list();
      word(", offset=");
      node.region.offset = integer();
      word("}");
    } else if (name == "fused" || name == "block") {
      node.kind = name == "fused" ? Node::Kind::kFused : Node::Kind::kBlock;
      node.body = std::make_shared<Graph>(body());
    } else {
      node.op = op::find_op(name);
      check(node.op, concat("an op of the table, not ", name));
      if (node.op->attrs) {
        node.attrs = Attrs(node.op->attrs());
        space();
        if (text_.substr(at_, 1) == "{") attributes(node.attrs);
      }
    }
    return node;
  }
  Graph body() {
    Graph graph;
    word("(");
    if (!accept(")")) {
      do graph.inputs.push_back(typed(graph));
      while (accept(","));
      word(")");
    }
    word("{");
    while (!accept("return")) graph.nodes.push_back(node(graph));
    if (accept("}")) return graph;
    do {
      Output output{number()};
      if (accept("->")) {
        const uint32_t target = number();
        for (uint32_t i = 0; i < graph.inputs.size(); ++i) {
          if (graph.inputs[i] == target) output.into = i;
        }
        check(output.into != kNone, "an input behind ->");
      }
      graph.outputs.push_back(output);
    } while (accept(","));
    word("}");
    return graph;
  }

  std::string_view text_;
  size_t at_ = 0;
};

}  // namespace

std::string print(const Graph& graph) {
  std::ostringstream out;
  out << "graph";
  print_graph(out, graph, "");
  out << '\n';
  return out.str();
}

Graph parse(std::string_view text) {
  if (!text.starts_with("graph[")) return Parser(text).whole();
  const SymbolicText symbolic = SymbolicText::parse(std::string(text));
  return Parser(symbolic.at(symbolic.hints())).whole();
}

}  // namespace chorale::graph
