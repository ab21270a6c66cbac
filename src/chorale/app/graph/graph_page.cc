#include "chorale/app/graph/graph_page.h"

#include <fmt/format.h>

#include <algorithm>

#include "chorale/base/error.h"
#include "chorale/graph/kernel_list.h"

namespace chorale::app {
namespace {

using graph::kNone;
using graph::Node;
using graph::Plan;

constexpr const char* kStyle =
    "body{font:15px system-ui,sans-serif;margin:2em auto;max-width:72em;color:#222}h2{margin-top:2em}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.2em .6em;border-bottom:1px solid #ddd;"
    "vertical-align:top}td.n{text-align:right;font-variant-numeric:tabular-nums}tr.view td{color:#888}"
    "tr.fused td:nth-child(2),tr.collective td:nth-child(2){font-weight:600}code,pre{font:13px ui-monospace,monospace}"
    "pre{background:#f6f6f6;padding:1em;overflow:auto}.bar{background:#4a78b5;height:.7em;display:inline-block}";

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '>') {
      out += "&gt;";
    } else if (c == '&') {
      out += "&amp;";
    } else if (c == '"') {
      out += "&quot;";
    } else {
      out += c;
    }
  }
  return out;
}

std::string bytes_text(int64_t bytes) {
  if (bytes < 1024) return fmt::format("{} B", bytes);
  if (bytes < 1024 * 1024) return fmt::format("{:.1f} KiB", static_cast<double>(bytes) / 1024);
  return fmt::format("{:.1f} MiB", static_cast<double>(bytes) / (1024 * 1024));
}

std::string describe(const graph::Graph& graph, uint32_t v) {
  return v == kNone ? "none" : concat("%", v, " ", graph.values[v].dtype, graph.values[v].sizes);
}

std::string place_text(const Plan::Place& place) {
  switch (place.in) {
    case Plan::In::kNowhere:
      return "";
    case Plan::In::kArena:
      return concat("arena + ", place.offset);
    case Plan::In::kInput:
      return concat("input ", place.index, place.offset > 0 ? concat(" + ", place.offset) : "");
    case Plan::In::kOutput:
      return concat("output ", place.index, place.offset > 0 ? concat(" + ", place.offset) : "");
  }
  return "";
}

std::string node_row(const ShownGraph& shown, size_t n, double us, double most) {
  const graph::Graph& graph = shown.program->graph();
  const Plan& plan = shown.program->plan();
  const Node& node = graph.nodes[n];
  std::string reads, makes, places;
  int64_t bytes = 0;
  for (const uint32_t x : node.in) {
    reads += (reads.empty() ? "" : ", ") + describe(graph, x);
    if (x != kNone) bytes += bytes_of(graph.values[x]);
  }
  for (const uint32_t y : node.out) {
    makes += (makes.empty() ? "" : ", ") + describe(graph, y);
    places += (places.empty() ? "" : ", ") + place_text(plan.places[y]);
    bytes += bytes_of(graph.values[y]);
  }
  const bool is_view = plan.is_view[n] && !is_wait(node);
  const char* kind = is_view                                ? "view"
                     : node.body                            ? "fused"
                     : is_collective(node) || is_wait(node) ? "collective"
                                                            : "kernel";
  const std::string what = graph::describe(node);
  std::string time;
  if (us >= 0) {
    time = fmt::format("{:.1f} <span class=bar style=\"width:{:.0f}px\"></span>", us, most > 0 ? us / most * 80 : 0);
  }
  return fmt::format(
      "<tr class={}><td class=n>{}</td><td>{}</td><td><code>{}</code></td><td><code>{}</code></td><td class=n>{}</td>"
      "<td>{}</td>{}</tr>\n",
      kind, n, escaped(what), escaped(reads), escaped(makes), is_view ? "" : bytes_text(bytes), escaped(places),
      shown.microseconds.empty() ? "" : "<td>" + time + "</td>");
}

std::string section(const ShownGraph& shown, size_t number) {
  const graph::Graph& graph = shown.program->graph();
  const Plan& plan = shown.program->plan();
  double total = 0, most = 0;
  for (const double us : shown.microseconds) {
    total += us;
    most = std::max(most, us);
  }
  std::string out = fmt::format("<h2 id=graph-{}>{}: graph {}</h2>\n", number, escaped(shown.name), number);
  out += fmt::format(
      "<p class=facts>{} nodes, {} kernels, {} inputs, {} outputs. Intermediate values: {} in an arena of {}; outputs: "
      "{}.{}</p>\n",
      graph.nodes.size(), shown.program->kernels(), graph.inputs.size(), graph.outputs.size(),
      bytes_text(plan.sum_bytes), bytes_text(plan.arena_bytes), bytes_text(plan.output_bytes),
      shown.microseconds.empty() ? "" : fmt::format(" Kernels take {:.1f} µs.", total));
  out += fmt::format("<table><thead><tr><th>node<th>op<th>reads<th>makes<th>bytes<th>lies in{}</tr></thead><tbody>\n",
                     shown.microseconds.empty() ? "" : "<th>µs");
  size_t kernel = 0;
  for (size_t n = 0; n < graph.nodes.size(); ++n) {
    const Node& node = graph.nodes[n];
    const size_t kernels = plan.is_view[n] && !is_wait(node)                         ? 0
                           : node.kind == Node::Kind::kWrite && !plan.writes_over[n] ? 2
                                                                                     : 1;
    double us = -1;
    for (size_t k = 0; k < kernels && kernel < shown.microseconds.size(); ++k, ++kernel) {
      us = std::max(us, 0.0) + shown.microseconds[kernel];
    }
    out += node_row(shown, n, us, most);
  }
  out += "</tbody></table>\n";
  for (const KernelSource& source : shown.sources) {
    out += fmt::format("<details><summary>kernel {}</summary><pre>{}</pre></details>\n", escaped(source.name),
                       escaped(source.text));
  }
  out += fmt::format("<details><summary>as text</summary><pre>{}</pre></details>\n", escaped(graph::print(graph)));
  return out;
}

}  // namespace

std::string graph_page(const std::vector<ShownGraph>& graphs) {
  std::string page = fmt::format(
      "<!doctype html><html lang=en><meta charset=utf-8><title>{} compiled graphs</title><style>{}</style><body>"
      "<h1>{} compiled {}</h1>\n",
      graphs.size(), kStyle, graphs.size(), graphs.size() == 1 ? "graph" : "graphs");
  for (size_t i = 0; i < graphs.size(); ++i) page += section(graphs[i], i);
  return page + "</body></html>\n";
}

}  // namespace chorale::app
