#include "chorale/parallel/tensor_parallel.h"

#include <fnmatch.h>

#include <algorithm>
#include <iostream>

#include "chorale/api/api.h"
#include "chorale/comm/mesh_scope.h"
#include "chorale/nn/linear.h"
#include "chorale/nn/norm.h"
#include "chorale/nn/pool.h"
#include "chorale/nn/weight_layout.h"
#include "chorale/op/builder.h"

namespace chorale::parallel {
namespace {

// ---- a module's own tensors

struct OwnMembers final : nn::MemberVisitor {
  explicit OwnMembers(nn::Module& of) { of.visit_members(*this); }
  void parameter(const std::string& name, nn::Parameter& member) override { tensors.emplace_back(name, &member); }
  void buffer(const std::string& name, nn::Buffer& member) override { tensors.emplace_back(name, &member); }
  void module(const std::string&, nn::Module&) override {}

  Tensor* find(const std::string& name) const {
    for (const auto& [known, tensor] : tensors) {
      if (known == name) return tensor;
    }
    return nullptr;
  }
  std::vector<std::pair<std::string, Tensor*>> tensors;
};

// The same tensor object with other contents: every holder sees the change. One that is shared with another layer
// may come here twice, and must be placed alike.
void place(Tensor& tensor, const Mesh& mesh, const Placements& placements, std::optional<int> source,
           const std::string& name) {
  if (tensor.is_sharded()) {
    const Placements wanted = sharding::checked("tensor_parallel", mesh, placements, tensor.dims());
    CHORALE_CHECK(mesh_of(tensor) == mesh && placements_of(tensor) == wanted, "[tensor_parallel] ", name,
                  " is sharded as ", placements_of(tensor), " over a ", mesh_of(tensor), " already, not as ", wanted,
                  " over a ", mesh, ": a module is distributed once, and tied weights are placed alike");
    return;
  }
  Tensor sharded_value;
  {
    const NoGrad quiet;
    sharded_value = distribute(detach(tensor), mesh, placements, source);
  }
  op::current().set_data(tensor, sharded_value);
}

// What a style may be applied to: a matrix of weights, and perhaps a bias.
struct Weights {
  Tensor* weight = nullptr;
  Tensor* bias = nullptr;
  int64_t output_dim = 0;
  int64_t pieces = 1;
  bool is_table = false;
};

// What the style says counts before what the module says of itself.
Weights weights_of(const char* style, nn::Module& module, const std::optional<int64_t>& output_dim, int64_t pieces) {
  const OwnMembers members(module);
  const auto* says = dynamic_cast<nn::SaysWeightLayout*>(&module);
  const nn::WeightLayout layout = output_dim ? nn::WeightLayout{*output_dim, pieces}
                                  : says     ? says->weight_layout()
                                             : nn::WeightLayout{0, pieces};
  Weights found{members.find("weight"), members.find("bias"), layout.output_dim, layout.pieces, false};
  const bool known = says || dynamic_cast<nn::Linear*>(&module) || dynamic_cast<nn::Embedding*>(&module);
  CHORALE_CHECK((known || output_dim) && found.weight && found.weight->dims() == 2, "[", style,
                "] is made for Linear, Embedding and modules that say how their weight is laid out ",
                "(nn/weight_layout.h), not for ", module.type_name(),
                "; of a module whose `weight` is a matrix, the style may say it: with_weight(its output dimension)");
  const auto* table = dynamic_cast<nn::Embedding*>(&module);
  found.is_table = table != nullptr;
  CHORALE_CHECK(!table || !table->options().max_norm, "[", style,
                "] is not implemented for an Embedding with max_norm: ", "a row's norm would need all of its parts");
  return found;
}

// ---- around calls

// Returns x as a sharded tensor that is placed so; a whole one is taken for a part of one declared so.
Tensor prepared(const Tensor& x, const Mesh& mesh, const Placement& declared, const Placement& desired,
                bool aligned = true) {
  // Where nothing moves the gradient is reduced all the same, once, and not by every op that meets it further on.
  if (x.is_sharded()) {
    const bool stays = placements_of(x) == sharding::checked("tensor_parallel", mesh, {desired}, x.dims());
    return stays && !aligned ? x : stays ? align_gradient(x) : redistribute(x, {desired}, {.async = true});
  }
  return redistribute(from_local(x, mesh, {declared}), {desired}, {.async = true});
}

Tensor leaving(const Tensor& y, const Placement& desired, bool local) {
  const Tensor moved = redistribute(y, {desired}, {.async = true});
  return local ? to_local(moved) : moved;
}

void prepare_first_input(nn::Module& module, const Mesh& mesh, const Placement& declared, const Placement& desired,
                         bool aligned = true) {
  module.before_forward([=](nn::Module&, std::vector<Tensor>& inputs) {
    if (!inputs.empty() && inputs[0].defined()) inputs[0] = prepared(inputs[0], mesh, declared, desired, aligned);
  });
}
void prepare_outputs(nn::Module& module, const Placement& desired, bool local) {
  module.after_forward([=](nn::Module&, const std::vector<Tensor>&, std::vector<Tensor>& outputs) {
    for (Tensor& y : outputs) {
      if (y.defined() && y.is_sharded()) y = leaving(y, desired, local);
    }
  });
}

void place_rest(nn::Module& module, const Mesh& mesh, std::optional<int> source) {
  for (auto& [name, tensor] : OwnMembers(module).tensors) {
    if (!tensor->is_sharded()) place(*tensor, mesh, Placements(mesh.dims()), source, name);
  }
}

void check_lengths(const char* style, size_t declared, size_t desired) {
  CHORALE_CHECK(declared == desired, "[", style, "] ", declared, " placements are declared, but ", desired,
                " are desired: one each for every tensor");
}

void prepare_all(const char* what, std::vector<Tensor>& tensors, const Mesh& mesh,
                 const std::vector<std::optional<Placement>>& declared,
                 const std::vector<std::optional<Placement>>& desired, bool local) {
  CHORALE_CHECK(tensors.size() == declared.size(), "[", what, "] the call has ", tensors.size(),
                " tensors, but placements for ", declared.size(), " were given");
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!declared[i] || !tensors[i].defined()) continue;
    tensors[i] = prepared(tensors[i], mesh, *declared[i], desired[i].value_or(*declared[i]));
    if (local) tensors[i] = to_local(tensors[i]);
  }
}

// Prepares the fields of the module's input that `style` names; a call may leave fields out.
void prepare_fields(std::vector<Tensor>& tensors, const Mesh& mesh, const PrepareInput& style) {
  const std::vector<std::string>& names = nn::input_names();
  for (const PrepareInput::Field& field : style.fields) {
    CHORALE_CHECK(std::find(names.begin(), names.end(), field.name) != names.end(),
                  "[PrepareInput] no input is called ", field.name,
                  names.empty() ? ": the module takes no struct that lists its tensors (CHORALE_TENSORS)"
                                : " in the struct that the module takes");
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (field.name != names[i]) continue;
      tensors[i] = prepared(tensors[i], mesh, field.declared, field.desired);
      if (style.use_local_output) tensors[i] = to_local(tensors[i]);
    }
  }
}

// ---- patterns

std::vector<std::string> levels_of(const std::string& path) {
  std::vector<std::string> levels;
  for (size_t begin = 0; begin <= path.size() && !path.empty();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    levels.push_back(path.substr(begin, end - begin));
    begin = end + 1;
  }
  return levels;
}

bool matches(const std::string& pattern, const std::string& path) {
  const std::vector<std::string> wanted = levels_of(pattern), found = levels_of(path);
  if (wanted.size() != found.size()) return false;
  for (size_t i = 0; i < wanted.size(); ++i) {
    if (fnmatch(wanted[i].c_str(), found[i].c_str(), 0) != 0) return false;
  }
  return true;
}

}  // namespace

Colwise Colwise::share_gradient() const {
  Colwise style = *this;
  style.reduces_gradient = false;
  return style;
}
Colwise Colwise::with_input(Placement p) const {
  Colwise style = *this;
  style.input = p;
  return style;
}
Colwise Colwise::with_output(Placement p) const {
  Colwise style = *this;
  style.output = p;
  return style;
}
Colwise Colwise::keep_sharded() const {
  Colwise style = *this;
  style.use_local_output = false;
  return style;
}
Colwise Colwise::with_weight(int64_t out_dim, int64_t cut_into) const {
  Colwise style = *this;
  style.output_dim = out_dim;
  style.pieces = cut_into;
  return style;
}

void Colwise::apply(nn::Module& module, const Mesh& mesh, std::optional<int> source) const {
  const Weights w = weights_of("Colwise", module, output_dim, pieces);
  place(*w.weight, mesh, {strided_shard(w.is_table ? 1 : w.output_dim, w.pieces)}, source, "weight");
  if (w.bias) place(*w.bias, mesh, {strided_shard(0, w.pieces)}, source, "bias");
  place_rest(module, mesh, source);
  prepare_first_input(module, mesh, input, replicate(), reduces_gradient);
  // What was cut in pieces stays so, as a sharded tensor: the view to heads that follows keeps it, and a rank's parts
  // of queries, keys and values would mean nothing to a view that counts all heads.
  const bool fused = w.pieces > 1 && output == shard(-1);
  prepare_outputs(module, fused ? strided_shard(-1, w.pieces) : output, use_local_output && !fused);
}

Rowwise Rowwise::with_input(Placement p) const {
  Rowwise style = *this;
  style.input = p;
  return style;
}
Rowwise Rowwise::with_output(Placement p) const {
  Rowwise style = *this;
  style.output = p;
  return style;
}
Rowwise Rowwise::keep_sharded() const {
  Rowwise style = *this;
  style.use_local_output = false;
  return style;
}
Rowwise Rowwise::with_weight(int64_t out_dim) const {
  Rowwise style = *this;
  style.output_dim = out_dim;
  return style;
}

void Rowwise::apply(nn::Module& module, const Mesh& mesh, std::optional<int> source) const {
  const Weights w = weights_of("Rowwise", module, output_dim, 1);
  place(*w.weight, mesh, {shard(w.is_table ? 0 : 1 - w.output_dim)}, source, "weight");
  place_rest(module, mesh, source);
  prepare_first_input(module, mesh, input, w.is_table ? replicate() : shard(-1));
  prepare_outputs(module, output, use_local_output);
}

void SequenceParallel::apply(nn::Module& module, const Mesh& mesh, std::optional<int>) const {
  CHORALE_CHECK(dynamic_cast<nn::LayerNorm*>(&module) || dynamic_cast<nn::RMSNorm*>(&module) ||
                    dynamic_cast<nn::Dropout*>(&module),
                "[SequenceParallel] is made for LayerNorm, RMSNorm and Dropout, not for ", module.type_name());
  place_rest(module, mesh, std::nullopt);
  prepare_first_input(module, mesh, shard(dim), shard(dim));
  prepare_outputs(module, shard(dim), use_local_output);
}

Replicated Replicated::reduce_gradient() const {
  Replicated style = *this;
  style.reduces_gradient = true;
  return style;
}
void Replicated::apply(nn::Module& module, const Mesh& mesh, std::optional<int> source) const {
  place_rest(module, mesh, source);
  module.before_forward([mesh](nn::Module&, std::vector<Tensor>& inputs) {
    for (Tensor& x : inputs) {
      if (x.defined() && !x.is_sharded()) x = from_local(x, mesh, Placements(mesh.dims()));
    }
  });
  if (reduces_gradient) {
    module.after_forward([](nn::Module&, const std::vector<Tensor>&, std::vector<Tensor>& outputs) {
      for (Tensor& y : outputs) {
        if (y.defined() && y.is_sharded()) y = align_gradient(y);
      }
    });
  }
  if (use_local_output) prepare_outputs(module, replicate(), true);
}

PrepareInput::PrepareInput(std::vector<std::optional<Placement>> from, std::vector<std::optional<Placement>> to,
                           bool local)
    : declared(std::move(from)), desired(std::move(to)), use_local_output(local) {
  check_lengths("PrepareInput", declared.size(), desired.size());
}
PrepareInput::PrepareInput(std::vector<Field> by_name, bool local)
    : use_local_output(local), fields(std::move(by_name)) {}
void PrepareInput::apply(nn::Module& module, const Mesh& mesh, std::optional<int>) const {
  module.before_forward([style = *this, mesh](nn::Module&, std::vector<Tensor>& inputs) {
    if (!style.fields.empty()) return prepare_fields(inputs, mesh, style);
    prepare_all("PrepareInput", inputs, mesh, style.declared, style.desired, style.use_local_output);
  });
}

PrepareOutput::PrepareOutput(std::vector<std::optional<Placement>> from, std::vector<std::optional<Placement>> to,
                             bool local)
    : declared(std::move(from)), desired(std::move(to)), use_local_output(local) {
  check_lengths("PrepareOutput", declared.size(), desired.size());
}
void PrepareOutput::apply(nn::Module& module, const Mesh& mesh, std::optional<int>) const {
  module.after_forward([style = *this, mesh](nn::Module&, const std::vector<Tensor>&, std::vector<Tensor>& outputs) {
    prepare_all("PrepareOutput", outputs, mesh, style.declared, style.desired, style.use_local_output);
  });
}

void PrepareInputOutput::apply(nn::Module& module, const Mesh& mesh, std::optional<int> source) const {
  before.apply(module, mesh, source);
  after.apply(module, mesh, source);
}

void tensor_parallel(nn::Module& module, const Mesh& mesh, const Plan& plan, std::optional<int> source) {
  CHORALE_CHECK(mesh.dims() == 1, "[tensor_parallel] takes a mesh of one dimension, not a ", mesh,
                ": slice it, as in mesh[\"tp\"]");
  if (plan.empty()) std::cerr << "[tensor_parallel] the plan is empty: nothing is done\n";
  const nn::NamedModules modules = module.named_modules();
  for (const PlanEntry& entry : plan) {
    bool found = false;
    for (const auto& [path, part] : modules) {
      if (!matches(entry.path, path)) continue;
      entry.style->apply(*part, mesh, source);
      found = true;
    }
    if (!found) {
      std::cerr << concat("[tensor_parallel] no module of ", module.type_name(), " is called \"", entry.path,
                          "\": skipped\n");
    }
  }
}

void tensor_parallel(nn::Module& module, const Plan& plan, std::optional<int> source) {
  tensor_parallel(module, comm::MeshScope::current(), plan, source);
}

void distribute_module(nn::Module& module, const Mesh& mesh, const Partition& partition, std::optional<int> source) {
  const nn::NamedModules modules = module.named_modules();
  for (const auto& [path, part] : modules) {
    for (const auto& [name, tensor] : OwnMembers(*part).tensors) {
      CHORALE_CHECK_STATE(!tensor->is_sharded(), "[distribute_module] ", path, ".", name,
                          " is sharded already: a module is distributed once");
    }
  }
  for (const auto& [path, part] : modules) {
    for (auto& [name, tensor] : OwnMembers(*part).tensors) {
      const std::string full_name = path.empty() ? name : concat(path, ".", name);
      const Placements whole(mesh.dims());
      const Placements placements = partition ? partition(full_name, *tensor) : whole;
      place(*tensor, mesh, placements.empty() ? whole : placements, source, full_name);
    }
  }
}

}  // namespace chorale::parallel
