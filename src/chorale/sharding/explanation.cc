#include "chorale/sharding/explanation.h"

#include <cmath>
#include <iostream>
#include <set>
#include <sstream>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/sharding/redistribute.h"
#include "chorale/sharding/sharded.h"

namespace chorale {
namespace sharding {
namespace {

constinit thread_local std::ostringstream* explanation = nullptr;

struct ExplanationScope {
  explicit ExplanationScope(std::ostringstream& text) : before(std::exchange(explanation, &text)) {}
  ~ExplanationScope() { explanation = before; }
  ExplanationScope(const ExplanationScope&) = delete;
  ExplanationScope& operator=(const ExplanationScope&) = delete;
  std::ostringstream* before;
};

void say_sent(const comm::CommCounter& sent, double cost) {
  if (sent.total() > 0) *explanation << "  sends " << sent << ", " << sent.bytes() << " B";
  if (cost > 0) *explanation << (sent.total() > 0 ? "; about " : "  about ") << std::llround(cost) << " us";
  *explanation << "\n";
}

}  // namespace

bool explains() { return explanation != nullptr; }

void explain_call(const op::OpDef& op, std::span<const Tensor> in, const Decision& decision,
                  const comm::CommCounter& sent) {
  std::ostringstream& text = *explanation;
  text << op.name << "(";
  for (size_t i = 0; i < in.size(); ++i) {
    text << (i ? ", " : "");
    if (!in[i].defined()) {
      text << "none";
    } else if (!in[i].is_sharded()) {
      text << "whole";
    } else {
      text << placements_of(in[i]);
      if (decision.moves[i]) text << " to " << decision.in[i];
    }
  }
  text << ") ->";
  for (const auto& out : decision.out) text << " " << out->placements;
  say_sent(sent, decision.cost);
}

double cost_of_move(const Tensor& x, const Placements& to) {
  const Mesh& mesh = mesh_of(x);
  Placements now = placements_of(x);
  double cost = 0;
  for (const Step& step : plan(now, to)) {
    double bytes = static_cast<double>(x.elems()) * static_cast<double>(x.elem_bytes());
    for (size_t m = 0; m < now.size(); ++m) {
      if (m != step.mesh_dim && now[m].is_shard()) bytes /= mesh.shape()[m];
    }
    cost += cost_of(step.from, step.to, {mesh.shape()[step.mesh_dim], mesh.spans_hosts(step.mesh_dim)}, bytes);
    now[step.mesh_dim] = step.to;
  }
  return cost;
}

void explain_move(const Tensor& x, const Placements& to, const comm::CommCounter& sent) {
  *explanation << "redistribute(" << placements_of(x) << ") -> " << to;
  say_sent(sent, cost_of_move(x, to));
}

void warn_of_gathering(const op::OpDef& op, std::span<const Tensor> in, double cost) {
  std::string operands;
  for (const Tensor& x : in) {
    if (x.defined() && x.is_sharded())
      operands += concat(operands.empty() ? "" : ", ", x.sizes(), " as ", placements_of(x));
  }
  constexpr size_t kMostSaid = 256;
  thread_local std::set<std::string> said;
  if (said.size() >= kMostSaid || !said.insert(concat(op.name, " ", operands)).second) return;
  std::cerr << concat("[sharding] ", op.name, " cannot be split: its operands, ", operands,
                      ", are gathered on every rank (about ", std::llround(cost), " us for this call)\n");
}

}  // namespace sharding

std::string explain_sharding(const std::function<void()>& function) {
  std::ostringstream text;
  const sharding::ExplanationScope scope(text);
  function();
  return text.str();
}

std::string explain_sharding(const std::function<void(const std::vector<Tensor>&)>& function,
                             const std::vector<Tensor>& inputs) {
  return explain_sharding([&] { function(inputs); });
}

}  // namespace chorale
