#include "chorale/codegen/render.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <string_view>

#include "chorale/base/error.h"
#include "chorale/io/checksum.h"
#include "chorale/op/copy.h"
#include "chorale/vec/expression.h"

namespace chorale::codegen {

extern const std::string_view kVocabularyC, kLinesC;

namespace {

using graph::Graph;
using graph::kNone;
using graph::Node;
using graph::Value;
using vec::ScalarKind;
using vec::Term;

// How a word of the expressions is written: an operator between two, or a function of vocabulary.c.
struct Word {
  std::string_view word;
  const char* infix;  // null: a function
  bool is_mask;       // gives truth values
  bool only_f32;      // f64 lanes do not have it
};
constexpr Word kWords[] = {
    {"add", " + ", false, false},      {"sub", " - ", false, false},
    {"mul", " * ", false, false},      {"div", " / ", false, false},
    {"eq", " == ", true, false},       {"ne", " != ", true, false},
    {"lt", " < ", true, false},        {"le", " <= ", true, false},
    {"gt", " > ", true, false},        {"ge", " >= ", true, false},
    {"and_", " & ", true, false},      {"or_", " | ", true, false},
    {"xor_", " ^ ", true, false},      {"fma", nullptr, false, false},
    {"select", nullptr, false, false}, {"abs", nullptr, false, false},
    {"sqrt", nullptr, false, false},   {"floor", nullptr, false, false},
    {"ceil", nullptr, false, false},   {"round", nullptr, false, false},
    {"trunc", nullptr, false, false},  {"sign", nullptr, false, false},
    {"min", nullptr, false, false},    {"max", nullptr, false, false},
    {"neg", nullptr, false, false},    {"isnan", nullptr, true, false},
    {"isinf", nullptr, true, false},   {"isfinite", nullptr, true, false},
    {"exp", nullptr, false, true},     {"exp2", nullptr, false, true},
    {"expm1", nullptr, false, true},   {"log", nullptr, false, true},
    {"log1p", nullptr, false, true},   {"tanh", nullptr, false, true},
    {"erf", nullptr, false, true},     {"normal_cdf", nullptr, false, true},
    {"sigmoid", nullptr, false, true}, {"trunc_divide", nullptr, false, false},
};

const Word* find_word(std::string_view word) {
  const auto* found = std::find_if(std::begin(kWords), std::end(kWords), [&](const Word& w) { return w.word == word; });
  return found == std::end(kWords) ? nullptr : found;
}

bool is_cast(const Node& node) { return node.kind == Node::Kind::kRow && node.op == &op::kTo; }

bool is_loadable(DType dtype) { return !is_complex(dtype) && dtype != DType::kF16; }

Tensors stand_ins(const Graph& graph, const Node& node) {
  Tensors in;
  for (const uint32_t x : node.in) in.push_back(x == kNone ? Tensor{} : graph::stand_in(graph.values[x]));
  return in;
}

// Numbers among the attributes: p0, p1, …
std::vector<double> numbers_of(const Attrs& attrs) {
  std::vector<double> numbers;
  if (!attrs.type()) return numbers;
  for (const kernel::Field& field : attrs.type()->fields) {
    const auto* bytes = static_cast<const std::byte*>(attrs.bytes()) + field.offset;
    if (field.kind == kernel::FieldKind::kF64) numbers.push_back(*reinterpret_cast<const double*>(bytes));
    if (field.kind == kernel::FieldKind::kScalar) numbers.push_back(reinterpret_cast<const Scalar*>(bytes)->real());
  }
  return numbers;
}

bool is_dense(const Value& value) {
  const auto reach = reach_of(value.sizes, value.strides);
  return reach && reach->low == 0 && reach->high == count_elems(value.sizes);
}

// C has vectors of elements, CUDA one element per thread.
enum class Language : uint8_t { kC, kCuda };

// Writes the statements of one vector, or of one element.
class Body {
 public:
  Body(const Graph& body, Lanes lanes, std::string indent, Language language)
      : body_(body),
        is_f64_(lanes == Lanes::kF64),
        is_cuda_(language == Language::kCuda),
        indent_(std::move(indent)),
        names_(body.values.size()) {}

  const char* vector() const { return is_cuda_ ? "L" : is_f64_ ? "D" : "F"; }
  const char* mask() const { return is_cuda_ ? "bool" : is_f64_ ? "J" : "I"; }
  const char* prefix() const { return is_cuda_ ? "v::" : is_f64_ ? "d_" : "f_"; }

  // What holds an operand's elements, as they come from memory.
  void define(uint32_t value, const std::string& expression) {
    names_[value] = concat("v", count_++);
    text_ += concat(indent_, is_mask(value) ? mask() : vector(), " ", names_[value], " = ", expression, ";\n");
  }

  void add(const Node& node) {
    const uint32_t y = node.out[0];
    const DType dtype = body_.values[y].dtype;
    std::string result;
    if (is_cast(node)) {
      result = numeric(node.in[0]);
    } else {
      result = expression(node);
    }
    if (dtype == DType::kBF16)
      result = concat(is_cuda_ ? "widen(to_bf16(" : "f_as_bf16(", result, is_cuda_ ? "))" : ")");
    names_[y] = concat("v", count_++);
    text_ +=
        concat(indent_, is_mask(y) ? mask() : vector(), " ", names_[y], " = ", result, ";  // ", node.op->name, "\n");
  }

  const std::string& name(uint32_t value) const { return names_[value]; }
  const std::string& text() const { return text_; }

 private:
  bool is_mask(uint32_t value) const { return body_.values[value].dtype == DType::kBool; }
  std::string numeric(uint32_t value) const {
    if (!is_mask(value)) return names_[value];
    return is_cuda_ ? concat("(L)", names_[value]) : concat(prefix(), "number(", names_[value], ")");
  }
  std::string number(double value) const {
    char text[64];
    if (is_cuda_) {
      std::snprintf(text, sizeof text, "literal<L>(__longlong_as_double(%lldll))",
                    static_cast<long long>(std::bit_cast<int64_t>(value)));
      return text;
    }
    if (!std::isfinite(value)) {
      const char* name = std::isnan(value) ? "nan" : "inf";
      std::snprintf(text, sizeof text, "%s__builtin_%s%s(%s)", value < 0 ? "-" : "", name, is_f64_ ? "" : "f",
                    std::isnan(value) ? "\"\"" : "");
    } else if (is_f64_) {
      std::snprintf(text, sizeof text, "%a", value);
    } else {
      std::snprintf(text, sizeof text, "%af", static_cast<double>(static_cast<float>(value)));
    }
    return concat(prefix(), "splat(", text, ")");
  }

  // Emits the terms that are no operands, and returns the last one.
  std::string expression(const Node& node) {
    const vec::ScalarOp op = node.op->pointwise->op;
    if (!is_cuda_ && op == vec::ScalarOp::kGeluErf && body_.values[node.out[0]].dtype == DType::kBF16) {
      return concat("f_gelu_of_bf16(", numeric(node.in[0]), ")");  // it has a loop of its own (vec/pointwise-inl.h)
    }
    const vec::Expression& all = vec::expression_of(op);
    const std::vector<double> params = numbers_of(node.attrs);
    std::vector<std::string> terms;
    for (const Term& term : all.terms) {
      switch (term.kind) {
        case Term::Kind::kInput: {
          const bool is_condition = vec::info(op).kind == ScalarKind::kMasked && term.index == 0;
          const uint32_t value = node.in[term.index];
          terms.push_back(is_condition ? names_[value] : numeric(value));
          break;
        }
        case Term::Kind::kParam:
          terms.push_back(number(params[term.index]));
          break;
        case Term::Kind::kNumber:
          terms.push_back(number(term.number));
          break;
        case Term::Kind::kCall: {
          std::string made = call(term, terms, is_half(body_.values[node.out[0]].dtype));
          if (&term == &all.terms.back()) return made;
          const std::string name = concat("v", count_++);
          text_ +=
              concat(indent_, find_word(term.function)->is_mask ? mask() : vector(), " ", name, " = ", made, ";\n");
          terms.push_back(name);
          break;
        }
      }
    }
    return terms.back();
  }
  std::string call(const Term& term, const std::vector<std::string>& terms, bool narrow) const {
    const Word& word = *find_word(term.function);
    const std::string& a = terms[term.args[0]];
    if (term.function == "neg") return concat("-", a);
    if (term.function == "trunc_divide") return concat(prefix(), "trunc(", a, " / ", terms[term.args[1]], ")");
    if (word.infix) return concat(a, word.infix, terms[term.args[1]]);
    const bool narrowed = is_cuda_ && narrow && kernel::has_narrow_form(term.function);
    std::string made = concat(prefix(), word.word, narrowed ? "_16(" : "(", a);
    for (size_t i = 1; i < term.arg_count; ++i) made += concat(", ", terms[term.args[i]]);
    return made + ")";
  }

  const Graph& body_;
  const bool is_f64_, is_cuda_;
  const std::string indent_;
  std::vector<std::string> names_;  // by value
  std::string text_;
  int count_ = 0;
};

Lanes lanes_of(const Graph& body) {
  Lanes lanes = Lanes::kAny;
  for (const Node& node : body.nodes) {
    Lanes own = Lanes::kAny;
    CHORALE_INVARIANT(can_render(body, node, own), "[codegen] ", node.name(), " is in a fused node and cannot be");
    if (own != Lanes::kAny) lanes = own;
  }
  return lanes;
}

}  // namespace

const char* c_type(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "float";
    case DType::kF64:
      return "double";
    case DType::kBF16:
      return "u16";
    case DType::kBool:
    case DType::kU8:
      return "u8";
    case DType::kI8:
      return "i8";
    case DType::kI16:
      return "i16";
    case DType::kI32:
      return "i32";
    default:
      return "i64";
  }
}

bool can_render(const Graph& graph, const Node& node, Lanes& lanes) {
  if (node.kind != Node::Kind::kRow || node.out.size() != 1) return false;
  const Value& out = graph.values[node.out[0]];
  const bool on_host = out.device.type == DeviceType::kCpu;
  if (!on_host && !kernel::find_element_loops(out.device.type)) return false;
  if (count_elems(out.sizes) == 0 || !is_dense(out)) return false;
  for (const uint32_t x : node.in) {
    if (x == kNone || !is_loadable(graph.values[x].dtype) || graph.values[x].device != out.device) return false;
  }
  const auto lanes_for = [](DType dtype) { return dtype == DType::kF64 ? Lanes::kF64 : Lanes::kF32; };
  if (is_cast(node)) {
    const DType from = graph.values[node.in[0]].dtype;
    if (out.dtype != DType::kF32 && out.dtype != DType::kBF16) {
      lanes = Lanes::kF64;
      return from == DType::kF64 && out.dtype == DType::kF64;
    }
    lanes = Lanes::kF32;
    return from == DType::kF32 || from == DType::kBF16 || from == DType::kBool;
  }
  if (!node.op->pointwise) return false;
  const vec::ScalarOp op = node.op->pointwise->op;
  const ScalarKind kind = vec::info(op).kind;
  const Tensors in = stand_ins(graph, node);
  const DType common = kernel::common_dtype(*node.op->pointwise, in, node.attrs);
  if (common == DType::kBool && kind == ScalarKind::kPredicate && on_host) {
    lanes = Lanes::kAny;
  } else if (common == DType::kF32 || common == DType::kBF16 || common == DType::kF64) {
    lanes = lanes_for(common);
  } else {
    return false;
  }
  if (kind == ScalarKind::kToReal || (kind == ScalarKind::kMasked && in[0].dtype() != DType::kBool)) return false;
  const vec::Expression& all = vec::expression_of(op);
  return std::all_of(all.terms.begin(), all.terms.end(), [&](const Term& term) {
    if (term.kind != Term::Kind::kCall) return true;
    const Word* word = find_word(term.function);
    return word && !(word->only_f32 && lanes == Lanes::kF64);
  });
}

Loops loops_of(const Graph& body) {
  const Value& first = body.values[body.outputs[0].value];
  const size_t dims = first.sizes.size();
  std::vector<std::vector<int64_t>> all;  // by operand, by dimension of the space
  const auto add = [&](const Value& value) {
    std::vector<int64_t> strides(dims, 0);
    for (size_t d = 0; d < value.sizes.size(); ++d) {
      const size_t at = d + dims - value.sizes.size();
      strides[at] = value.sizes[d] == 1 ? 0 : value.strides[d];
    }
    all.push_back(std::move(strides));
  };
  for (const uint32_t x : body.inputs) add(body.values[x]);
  for (const graph::Output& y : body.outputs) add(body.values[y.value]);
  // Dimensions go in the order of the results' memory, the last one innermost.
  std::vector<size_t> order(dims);
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return first.strides[a] > first.strides[b]; });
  Loops loops;
  loops.strides.resize(all.size());
  for (const size_t d : order) {
    const int64_t size = first.sizes[d];
    if (size == 1) continue;
    loops.elems *= size;
    const bool joins = !loops.sizes.empty() && [&] {
      for (size_t k = 0; k < all.size(); ++k) {
        if (loops.strides[k].back() != all[k][d] * size) return false;
      }
      return true;
    }();
    if (joins) {
      loops.sizes.back() *= size;
      for (size_t k = 0; k < all.size(); ++k) loops.strides[k].back() = all[k][d];
    } else {
      loops.sizes.push_back(size);
      for (size_t k = 0; k < all.size(); ++k) loops.strides[k].push_back(all[k][d]);
    }
  }
  if (loops.sizes.empty()) {
    loops.sizes.push_back(1);
    for (size_t k = 0; k < all.size(); ++k) loops.strides[k].push_back(k < body.inputs.size() ? 0 : 1);
  }
  return loops;
}

KernelText render(const Graph& body) {
  const Loops loops = loops_of(body);
  const size_t dims = loops.sizes.size(), inputs = body.inputs.size(), operands = loops.strides.size();
  const bool rows = dims > 1;
  const std::string indent = rows ? "    " : "  ", deep = indent + "  ";
  Body vector(body, lanes_of(body), deep, Language::kC);
  const std::string lanes = std::string("L") + vector.vector();
  enum class Inner { kWhole, kRepeated, kStep };
  const auto inner = [&](size_t k) {
    const int64_t stride = loops.strides[k].back();
    return stride == 1 ? Inner::kWhole : stride == 0 ? Inner::kRepeated : Inner::kStep;
  };
  const auto dtype = [&](size_t k) {
    return body.values[k < inputs ? body.inputs[k] : body.outputs[k - inputs].value].dtype;
  };
  const auto step = [&](size_t k, size_t d) { return concat("a[", dims + k * dims + d, "]"); };

  for (size_t k = 0; k < inputs; ++k) {
    std::string load = concat(vector.prefix(), "load_", chorale::name_of(dtype(k)));
    if (inner(k) == Inner::kWhole) {
      load += concat("(q", k, ")");
    } else if (inner(k) == Inner::kRepeated) {
      load += concat("_by(x", k, ", 0, ", lanes, ")");
    } else {
      const std::string by = step(k, dims - 1);
      load += concat("_by(x", k, " + i * ", by, ", ", by, ", left < ", lanes, " ? left : ", lanes, ")");
    }
    vector.define(body.inputs[k], load);
  }
  for (const Node& node : body.nodes) vector.add(node);

  std::string text = "(char* const* p, const long* a, long begin, long end) {\n";
  std::string in_row;
  for (size_t k = 0; k < operands; ++k) {
    const char* type = c_type(dtype(k));
    const char* qualifier = k < inputs ? "const " : "";
    in_row += concat(indent, qualifier, type, "* x", k, " = (", qualifier, type, "*)p[", k, "];\n");
  }
  if (rows) {
    text += "  for (long row = begin; row < end; ++row) {\n";
    in_row += "    long rest = row, at;\n";
    for (size_t d = dims - 1; d-- > 0;) {
      in_row += d == 0 ? "    at = rest;\n" : concat("    at = rest % a[", d, "], rest /= a[", d, "];\n");
      for (size_t k = 0; k < operands; ++k) {
        if (loops.strides[k][d] != 0) in_row += concat("    x", k, " += at * ", step(k, d), ";\n");
      }
    }
    in_row += concat("    const long first = 0, n = a[", dims - 1, "];\n");
  } else {
    in_row += "  const long first = begin, n = end;\n";
  }
  text += in_row;
  text += concat(indent, "u8 part[", operands, "][64] __attribute__((aligned(64))) = {};\n");
  text += concat(indent, "for (long i = first; i < n; i += ", lanes, ") {\n");
  text += concat(deep, "const long left = n - i;\n");
  for (size_t k = 0; k < operands; ++k) {
    if (inner(k) != Inner::kWhole) continue;
    const char* type = c_type(dtype(k));
    text += concat(deep, k < inputs ? "const " : "", type, "* q", k, " = x", k, " + i;\n");
  }
  text += concat(deep, "if (left < ", lanes, ") {\n");
  for (size_t k = 0; k < operands; ++k) {
    if (inner(k) != Inner::kWhole) continue;
    const char* type = c_type(dtype(k));
    if (k < inputs) text += concat(deep, "  copy(part[", k, "], (const u8*)q", k, ", left * sizeof(", type, "));\n");
    text += concat(deep, "  q", k, " = (", type, "*)part[", k, "];\n");
  }
  text += concat(deep, "}\n", vector.text());
  for (size_t o = 0; o < body.outputs.size(); ++o) {
    const size_t k = inputs + o;
    CHORALE_INVARIANT(inner(k) == Inner::kWhole, "[codegen] a result of a fused node does not lie densely");
    text += concat(deep, vector.prefix(), "store_", chorale::name_of(dtype(k)), "(q", k, ", ",
                   vector.name(body.outputs[o].value), ");\n");
  }
  text += concat(deep, "if (left < ", lanes, ") {\n");
  for (size_t k = inputs; k < operands; ++k) {
    text += concat(deep, "  copy((u8*)(x", k, " + i), part[", k, "], left * sizeof(", c_type(dtype(k)), "));\n");
  }
  text += concat(deep, "}\n", indent, "}\n");
  text += rows ? "  }\n}\n" : "}\n";
  KernelText made;
  made.name = "k" + io::sha256(text).substr(0, 16);
  made.text = concat("void ", made.name, text);
  return made;
}

std::string prelude() { return std::string(kVocabularyC) + std::string(kLinesC); }

kernel::ElementLoop render_loop(const Graph& body) {
  Loops loops = loops_of(body);
  const Lanes lanes = lanes_of(body);
  Body element(body, lanes, "      ", Language::kCuda);
  kernel::ElementLoop loop;
  loop.is_f64 = lanes == Lanes::kF64;
  loop.inputs = body.inputs.size();
  loop.sizes = std::move(loops.sizes);
  loop.strides = std::move(loops.strides);
  for (size_t k = 0; k < loop.inputs; ++k) {
    element.define(body.inputs[k], concat("x", k));
    loop.dtypes.push_back(body.values[body.inputs[k]].dtype);
  }
  for (const Node& node : body.nodes) element.add(node);
  loop.body = element.text();
  for (size_t o = 0; o < body.outputs.size(); ++o) {
    loop.body += concat("      y", o, " = ", element.name(body.outputs[o].value), ";\n");
    loop.dtypes.push_back(body.values[body.outputs[o].value].dtype);
  }
  std::string all = loop.body;
  for (const DType dtype : loop.dtypes) all += concat(' ', chorale::name_of(dtype));
  loop.name = io::sha256(all).substr(0, 16);
  return loop;
}

}  // namespace chorale::codegen
