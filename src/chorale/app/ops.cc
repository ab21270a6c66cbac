// `chorale ops`: the op table, for people.
#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "chorale/api/api.h"
#include "chorale/app/commands.h"
#include "chorale/app/op_functions.h"
#include "chorale/base/did_you_mean.h"
#include "chorale/base/error.h"
#include "chorale/device/runtime.h"
#include "chorale/op/builder.h"
#include "chorale/op/kernels.h"
#include "chorale/op/lists.h"
#include "chorale/op/shard_ways.h"
#include "chorale/op/table.h"

namespace chorale::app {
namespace {

using op::DTypeSet;
using op::OpDef;

std::string dtypes(DTypeSet set) {
  struct Class {
    DTypeSet members;
    const char* name;
  };
  static constexpr Class kClasses[] = {
      {op::kBools, "bool"}, {op::kInts, "int"}, {op::kFloats, "float"}, {op::kComplexes, "complex"}};
  std::string text;
  const auto add = [&](std::string_view name) { text.append(text.empty() ? "" : " ").append(name); };
  for (const Class& c : kClasses) {
    std::vector<DType> members, present;
    for (DType dtype : kAllDTypes) {
      if (!c.members.has(dtype)) continue;
      members.push_back(dtype);
      if (set.has(dtype)) present.push_back(dtype);
    }
    if (present.size() == members.size()) {
      add(c.name);
    } else {
      for (DType dtype : present) add(name_of(dtype));
    }
  }
  return text;
}

// Kinds of devices that this process has. The module of a GPU is loaded where there is one.
std::vector<DeviceType> kinds_of_devices() {
  try {
    runtime_of({DeviceType::kCuda});
  } catch (const Error&) {  // none here
  }
  std::vector<DeviceType> kinds{DeviceType::kCpu, DeviceType::kNull};
  for (const DeviceType type : {DeviceType::kCuda, DeviceType::kSim}) {
    if (find_runtime(type)) kinds.push_back(type);
  }
  return kinds;
}

std::string devices(const OpDef& row) {
  static const std::vector<DeviceType> kinds = kinds_of_devices();
  std::string text;
  for (const DeviceType type : kinds) {
    if (type == DeviceType::kNull && row.dynamic) continue;  // shapes that depend on data need data
    if (op::find_kernel(row, type)) text += concat(text.empty() ? "" : " ", type_name(type));
  }
  return text;
}

std::string gradient(const OpDef& row) {
  if (row.grad == op::not_differentiable) return "no";
  return row.twice ? "yes" : "once";
}

std::string sharding(const OpDef& row) {
  if (row.shard.replicate) return "whole";
  return row.shard.labels ? row.shard.labels : "by attributes";
}

// How a sample may be split over two ranks.
std::string ways_of(const OpDef& row, const op::Sample& sample) {
  std::vector<Tensor> out(op::result_count(row, sample.in, sample.attrs));
  op::current().call(row, sample.in, sample.attrs, out);
  std::vector<Shape> sizes;
  sizes.reserve(out.size());
  for (const Tensor& y : out) sizes.push_back(y.sizes());
  std::string text;
  for (const op::ShardWay& way : op::shard_ways({row, sample.attrs, sample.in, sizes, 2})) {
    text += concat(text.empty() ? "" : "; ", way);
  }
  return text.empty() ? "none" : text;
}

// The ways to split the first sample that can be cut somewhere; those of the first one where none can.
std::string ways_of(const OpDef& row) {
  const std::vector<op::Sample> samples = row.samples();
  for (const op::Sample& sample : samples) {
    if (std::string ways = ways_of(row, sample); ways.find("S(") != std::string::npos) return ways;
  }
  return ways_of(row, samples.at(0));
}

const char* autocast(op::Cast cast) {
  switch (cast) {
    case op::Cast::kNone:
      return "as it is";
    case op::Cast::kLower:
      return "lower precision";
    case op::Cast::kF32:
      return "f32";
    case op::Cast::kWidest:
      return "widest of its inputs";
  }
  return "";
}

// Rows that gradients call, and nobody else.
bool is_helper(const OpDef& row) {
  const std::string_view name = row.name;
  return name.ends_with("_backward") || name.find("_backward_") != std::string_view::npos;
}

void print_table() {
  size_t name_width = 4, input_width = 6, dtype_width = 6;
  for (const OpDef* row : op::all_ops()) {
    name_width = std::max(name_width, std::string_view(row->name).size());
    input_width = std::max(input_width, std::string_view(row->inputs).size());
    dtype_width = std::max(dtype_width, dtypes(row->dtypes).size());
  }
  const auto line = [&](auto name, auto inputs, const std::string& types, const std::string& where,
                        const std::string& grad, const std::string& shard) {
    fmt::print("{:<{}}  {:<{}}  {:<{}}  {:<13}  {:<8}  {}\n", name, name_width, inputs, input_width, types, dtype_width,
               where, grad, shard);
  };
  line("name", "inputs", "dtypes", "devices", "gradient", "sharding");
  for (const bool helpers : {false, true}) {
    for (const OpDef* row : op::all_ops()) {
      if (is_helper(*row) != helpers) continue;
      line(row->name, row->inputs, dtypes(row->dtypes), devices(*row), gradient(*row), sharding(*row));
    }
  }
  const auto rows = op::all_ops();
  const auto helpers = std::count_if(rows.begin(), rows.end(), [](const OpDef* row) { return is_helper(*row); });
  fmt::print("\n{} ops, and {} helpers of their gradients. `chorale ops NAME` shows one, or a function made of them.\n",
             static_cast<int64_t>(rows.size()) - helpers, helpers);
}

std::string saved(op::InputSet positions, const char* what) {
  if (positions == op::InputSet::all()) return fmt::format("all {}s", what);
  std::string text;
  for (size_t i = 0; i <= op::InputSet::kLast; ++i) {
    if (positions.has(i)) text += fmt::format("{}{} {}", text.empty() ? "" : ", ", what, i);
  }
  return text;
}

// Which of its inputs a row over lists writes, in its first sample.
std::string results_of_lists(const OpDef& row) {
  const op::Lists lists = row.lists(row.samples().at(0).attrs);
  std::vector<std::string> names;
  std::istringstream inputs(row.inputs);
  for (std::string name; std::getline(inputs >> std::ws, name, ',');) names.push_back(name);
  std::string text;
  for (size_t i = 0; i < lists.own + lists.count; ++i) {
    if (lists.written.has(i)) text += (text.empty() ? "new values of " : ", ") + names.at(i);
  }
  if (lists.fresh) text += fmt::format("{}{} for each tensor", text.empty() ? "" : "; ", lists.fresh);
  return text;
}

// What is known of a row, for people.
std::vector<std::pair<std::string, std::string>> facts_of(const OpDef& row) {
  std::vector<std::pair<std::string, std::string>> facts;
  const auto field = [&](std::string_view name, std::string_view value) { facts.emplace_back(name, value); };
  if (const std::string_view formula = op::formula_of(row); !formula.empty())
    field(row.pointwise ? "expression" : "formula", formula);
  field("inputs", *row.inputs ? row.inputs : "none");
  field("results", row.lists ? results_of_lists(row) : fmt::format("{}", row.outputs));
  if (row.attrs) {
    std::ostringstream defaults;
    defaults << Attrs(row.attrs());
    field("attributes", defaults.str());
  }
  const bool has_own_inputs = row.lists && row.lists(row.samples().at(0).attrs).own > 0;
  field("dtypes", dtypes(row.dtypes) + (has_own_inputs ? " (of the inputs before the lists)" : ""));
  field("devices", devices(row));
  field("gradient", gradient(row) == "once" ? "yes, but not a second one" : gradient(row));
  if (row.grad != op::not_differentiable) {
    const std::string in = saved(row.saves.in, "input"), out = saved(row.saves.out, "result");
    field("saves", in.empty() && out.empty() ? "nothing" : in + (in.empty() || out.empty() ? "" : ", ") + out);
  }
  field("sharding", sharding(row) == "whole" ? "every rank needs the whole" : sharding(row));
  field("shard ways", ways_of(row) + " (an example on 2 ranks)");
  field("autocast", autocast(row.autocast));
  std::string notes;
  if (row.view) notes += row.part ? "shows a part of its input; " : "shows the bytes of its input; ";
  if (row.dynamic) notes += "the shape of its result depends on data; ";
  if (row.in_place) notes += "may write over an input; ";
  if (!notes.empty()) field("notes", notes.substr(0, notes.size() - 2));
  return facts;
}

void print_one(const OpDef& row) {
  fmt::print("{}\n", row.name);
  for (const auto& [name, value] : facts_of(row)) fmt::print("  {:<12} {}\n", name, value);
}

// "f64 [2, 3]", with the values where there are few.
nlohmann::json described(std::span<const Tensor> tensors) {
  constexpr int64_t kFew = 64;
  nlohmann::json list = nlohmann::json::array();
  for (const Tensor& tensor : tensors) {
    if (!tensor.defined()) {
      list.push_back({{"type", "absent"}});
      continue;
    }
    nlohmann::json one = {{"type", concat(tensor.dtype(), " ", tensor.sizes())}};
    if (tensor.elems() <= kFew && !tensor.is_sparse()) one["values"] = to_string(tensor);
    list.push_back(std::move(one));
  }
  return list;
}

// The rows with the calls that their samples make: what tools/docs makes pages of.
void print_json() {
  const NoGrad scope;
  nlohmann::json rows = nlohmann::json::array();
  for (const OpDef* row : op::all_ops()) {
    nlohmann::json facts, examples = nlohmann::json::array();
    for (const auto& [name, value] : facts_of(*row)) facts[name] = value;
    for (const op::Sample& sample : row->samples()) {
      std::vector<Tensor> out(op::result_count(*row, sample.in, sample.attrs));
      op::current().call(*row, sample.in, sample.attrs, out);
      examples.push_back({{"in", described(sample.in)},
                          {"attributes", row->attrs ? concat(sample.attrs) : ""},
                          {"out", described(out)}});
    }
    rows.push_back({{"name", row->name}, {"facts", std::move(facts)}, {"examples", std::move(examples)}});
  }
  fmt::print("{}\n", rows.dump());
}

// How the functions of that name are called; false if there is none.
bool print_functions(const std::string& name) {
  // exp_ and exp_out are declared together with exp.
  const auto has_name = [&](const OpFunction& function) {
    const bool has_forms = function.declaration.ends_with("_out");
    return function.name == name || (has_forms && (function.name + "_" == name || function.name + "_out" == name));
  };
  bool found = false;
  for (const OpFunction& function : op_functions()) {
    if (!has_name(function)) continue;
    fmt::print("{}\n", function.declaration);
    if (!function.comment.empty()) fmt::print("    {}\n", function.comment);
    found = true;
  }
  return found;
}

// Rows that a function without a row of its name chooses from: gelu_erf and gelu_tanh are gelu's.
std::string forms_of(const std::string& name) {
  std::string forms;
  for (const OpDef* row : op::all_ops()) {
    if (std::string_view(row->name).starts_with(name + "_") && !is_helper(*row))
      forms += concat(forms.empty() ? "" : ", ", row->name);
  }
  return forms;
}

void show(const std::string& name) {
  if (name.empty()) return print_table();
  const OpDef* row = op::find_op(name);
  const bool is_function = print_functions(name);
  if (row) return print_one(*row);
  if (const std::string forms = forms_of(name); is_function && !forms.empty())
    fmt::print("  made of rows that `chorale ops` shows, too: {}\n", forms);
  if (is_function) return;
  std::vector<std::string> names;
  for (const OpFunction& function : op_functions()) names.push_back(function.name);
  for (const OpDef* other : op::all_ops()) names.emplace_back(other->name);
  throw InvalidArgument(concat("there is no op '", name, "'", did_you_mean(name, names)));
}

}  // namespace

void add_ops(CLI::App& program, Work& work) {
  CLI::App* command = program.add_subcommand("ops", "Show the op table, or one op");
  auto name = std::make_shared<std::string>();
  auto json = std::make_shared<bool>(false);
  command->add_option("NAME", *name, "the op to show");
  command->add_flag("--json", *json, "all of it as JSON, with examples");
  command->callback([name, json, &work] { work = [name, json] { *json ? print_json() : show(*name); }; });
}

}  // namespace chorale::app
