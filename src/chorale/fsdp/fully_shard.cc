#include "chorale/fsdp/fully_shard.h"

#include <algorithm>
#include <chrono>
#include <ostream>
#include <unordered_set>

#include "chorale/api/api.h"
#include "chorale/base/error.h"
#include "chorale/fsdp/unit.h"

namespace chorale::fsdp {

std::shared_ptr<Unit> unit_of(const nn::Module& module) {
  const auto* attached = dynamic_cast<const Attachment*>(module.extension().get());
  return attached ? attached->unit : nullptr;
}

void Attachment::before_state() { unit->reshard(); }
void Attachment::before_clone() const {
  throw StateError(
      "[clone] a fully sharded module cannot be copied: its parts belong to groups of ranks; clone it before "
      "fully_shard()");
}

namespace {

// Calls f(name, parameter) for the parameters of a module and of those below it that have no unit of their own.
template <class F>
struct OwnParameters final : nn::MemberVisitor {
  OwnParameters(const Unit* of, F what) : unit(of), f(std::move(what)) {}
  void parameter(const std::string& name, nn::Parameter& member) override { f(path + name, member); }
  void buffer(const std::string&, nn::Buffer&) override {}
  void module(const std::string& name, nn::Module& member) override {
    if (const auto other = unit_of(member); other && other.get() != unit) return;
    const size_t length = path.size();
    path += name + ".";
    member.visit_members(*this);
    path.resize(length);
  }
  const Unit* unit;
  F f;
  std::string path;
};
template <class F>
void for_own_parameters(nn::Module& module, const Unit* unit, F f) {
  OwnParameters<F> visitor(unit, std::move(f));
  module.visit_members(visitor);
}

// The dimension by which a parameter is cut.
int64_t dim_of(const std::string& name, const Tensor& parameter, const Options& options) {
  CHORALE_CHECK(parameter.dims() > 0, "[fully_shard] parameter ", name,
                " has no dimension by which it could be cut: give it one of size 1");
  CHORALE_CHECK(parameter.is_contiguous() || parameter.is_sharded(), "[fully_shard] parameter ", name, " of shape ",
                parameter.sizes(), " is not contiguous: make it so before");
  if (!options.shard_dim) return 0;
  const std::optional<int64_t> wanted = options.shard_dim(parameter);
  if (!wanted || *wanted == 0) return 0;
  CHORALE_CHECK(*wanted >= -parameter.dims() && *wanted < parameter.dims(), "[fully_shard] parameter ", name,
                " of shape ", parameter.sizes(), " has no dimension ", *wanted);
  const int64_t dim = *wanted < 0 ? *wanted + parameter.dims() : *wanted;
  const int ranks = options.mesh.shape().back();
  CHORALE_CHECK(dim == 0 || parameter.size(dim) % ranks == 0, "[fully_shard] parameter ", name, " of shape ",
                parameter.sizes(), " cannot be cut by dimension ", dim, " over ", ranks,
                " ranks: only the first dimension may be cut unevenly");
  return dim;
}

// Whether an earlier call over the same mesh took it.
bool is_taken(const Tensor& parameter, const Mesh& mesh) {
  if (!parameter.is_sharded()) return false;
  const Mesh& known = mesh_of(parameter);
  if (known == mesh) return true;
  const std::vector<std::string>&all = known.names(), &own = mesh.names();
  return !own.empty() && all.size() > own.size() && std::equal(own.begin(), own.end(), all.begin());
}

void check(const std::vector<nn::Module*>& modules, const Options& options) {
  const Mesh& mesh = options.mesh;
  CHORALE_CHECK(mesh.dims() == 1 || mesh.dims() == 2, "[fully_shard] takes a mesh of one dimension (shards) or two ",
                "(replicas, shards), not a ", mesh);
  CHORALE_CHECK(mesh.dims() == 1 || !mesh.names().empty(), "[fully_shard] a mesh of two dimensions needs names for ",
                "them: which is of replicas, which of shards?");
  CHORALE_CHECK(mesh.is_member(), "[fully_shard] this rank is not in the mesh");
  CHORALE_CHECK(!modules.empty(), "[fully_shard] no module was given");
  for (const nn::Module* module : modules) {
    CHORALE_CHECK(module, "[fully_shard] one of the modules is a null pointer");
    module->need_whole();
    CHORALE_CHECK_STATE(!unit_of(*module), "[fully_shard] this ", module->type_name(), " is fully sharded already");
  }
}

template <class F>
void for_units(nn::Module& module, bool recurse, const F& f) {
  const auto own = unit_of(module);
  CHORALE_CHECK_STATE(own || recurse, "[fsdp] this ", module.type_name(), " is not fully sharded");
  std::unordered_set<const Unit*> seen;
  for (const auto& [name, below] : module.named_modules()) {
    const auto unit = unit_of(*below);
    if (unit && seen.insert(unit.get()).second && (recurse || unit == own)) f(*unit);
  }
}

std::shared_ptr<Unit> unit_or_throw(const nn::Module& module) {
  auto unit = unit_of(module);
  CHORALE_CHECK_STATE(unit, "[fsdp] this ", module.type_name(), " is not fully sharded: call fully_shard() first");
  return unit;
}

std::vector<std::weak_ptr<Unit>> units_of(const std::vector<nn::Module*>& modules) {
  std::vector<std::weak_ptr<Unit>> units;
  units.reserve(modules.size());
  for (const nn::Module* module : modules) units.push_back(unit_or_throw(*module));
  return units;
}

}  // namespace

// ---- construction

Unit::Unit(size_t modules, const Options& options)
    : options_(options), slots_(modules), places_(modules), alive_(modules) {
  for (const auto& dtype :
       {options.mixed_precision.parameters, options.mixed_precision.reduce, options.mixed_precision.outputs}) {
    CHORALE_CHECK(!dtype || is_floating(*dtype), "[fully_shard] mixed precision needs floating dtypes, not ",
                  dtype.value_or(DType::kF32));
  }
  set_policy(options.reshard_after_forward);
}

void Unit::set_policy(ReshardAfterForward policy) {
  options_.reshard_after_forward = policy;
  fewer_.reset();
  if (!policy.is_number()) return;
  const int ways = policy.ways(), size = shards().size();
  CHORALE_CHECK(ways > 1 && ways < size && size % ways == 0,
                "[fully_shard] reshard_after_forward is a number of ranks ", "that divides ", size,
                " and is neither 1 nor all of them, not ", ways);
  fewer_ = Mesh(shards(), {size / ways, ways}, {"copies", "pieces"})["pieces"];
}

void Unit::take_parameters(const std::vector<nn::Module*>& modules) {
  std::unordered_set<const Tensor::Impl*> seen;
  std::vector<std::pair<std::string, Tensor>> found;
  for (nn::Module* module : modules) {
    // What an earlier call took is sharded over this mesh already; whether that call is one of those below is found
    // out at the first forward.
    for_own_parameters(*module, this, [&](const std::string& name, nn::Parameter& parameter) {
      if (!seen.insert(parameter.impl()).second) return;
      if (is_taken(parameter, mesh())) return;
      const bool ignored = std::any_of(options_.ignored.begin(), options_.ignored.end(),
                                       [&](const Tensor& other) { return other.is(parameter); });
      if (!ignored) found.emplace_back(name, parameter);
    });
  }
  // All are looked at before the first is changed.
  std::vector<int64_t> dims;
  dims.reserve(found.size());
  for (const auto& [name, parameter] : found) dims.push_back(dim_of(name, parameter, options_));
  parameters_.reserve(found.size());
  for (size_t i = 0; i < found.size(); ++i) {
    index_.emplace(found[i].second.impl(), i);
    parameters_.emplace_back(found[i].second, options_.mesh, dims[i]).name = found[i].first;
  }
}

void Unit::attach(nn::Module& module, size_t index) {
  auto attachment = std::make_shared<Attachment>(shared_from_this());
  alive_[index] = attachment;
  module.set_extension(std::move(attachment));
  module.before_forward([unit = shared_from_this(), index](nn::Module& of, std::vector<Tensor>& inputs) {
    unit->before_forward(index, of, inputs);
  });
  module.after_forward(
      [unit = shared_from_this(), index](nn::Module&, const std::vector<Tensor>&, std::vector<Tensor>& outputs) {
        unit->after_forward(index, outputs);
      });
  find_slots(index, module);
}

void Unit::find_slots(size_t index, nn::Module& module) {
  // The others have moved, too, and are found again when they are called.
  if (places_[index] != &module && places_[index]) {
    for (size_t i = 0; i < slots_.size(); ++i) {
      slots_[i].clear();
      places_[i] = nullptr;
    }
  }
  places_[index] = &module;
  slots_[index].clear();
  for_own_parameters(module, this, [&](const std::string&, nn::Parameter& place) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const ShardedParameter& p = parameters_[i];
      const bool is_piece = p.registered_piece().defined() && place.is(p.registered_piece());
      if (place.is(p.sharded()) || place.is(p.whole()) || is_piece) return slots_[index].push_back({&place, i});
    }
  });
}

void Unit::put_into_module() {
  for (size_t index = 0; index < slots_.size(); ++index) {
    if (alive_[index].expired()) continue;  // the module has ended before its backward
    for (const Slot& slot : slots_[index]) {
      const ShardedParameter& p = parameters_[slot.parameter];
      static_cast<Tensor&>(*slot.place) = state_ == State::kWhole   ? p.whole()
                                          : state_ == State::kPiece ? p.registered_piece()
                                                                    : p.sharded();
    }
  }
}

void Unit::become_root(nn::Module& module) {
  CHORALE_CHECK_STATE(slots_.size() == 1, "[fully_shard] several modules in one group cannot be the outermost ones: ",
                      "call fully_shard() on a module that has them all");
  const auto context = shared_ ? shared_ : std::make_shared<Context>();
  std::unordered_map<const Tensor::Impl*, const Unit*> owner;
  std::unordered_map<const Unit*, std::string> paths;
  std::vector<std::shared_ptr<Unit>> units;
  for (const auto& [path, below] : module.named_modules()) {
    const auto unit = unit_of(*below);
    if (!unit || !paths.emplace(unit.get(), path).second) continue;
    CHORALE_CHECK_STATE(!unit->context_, "[fully_shard] ", path, " was called before the ", module.type_name(),
                        " that it is a part of: call the outermost module first");
    units.push_back(unit);
    for (const ShardedParameter& p : unit->parameters_) owner.emplace(p.sharded().impl(), unit.get());
  }
  std::string absent, elsewhere;
  for (const auto& unit : units) {
    for (const auto& [path, below] : module.named_modules()) {
      if (unit_of(*below) != unit) continue;
      for_own_parameters(*below, unit.get(), [&, &at = path](const std::string& name, nn::Parameter& parameter) {
        const std::string full = at.empty() ? name : concat(at, ".", name);
        const auto found = owner.find(parameter.impl());
        if (found == owner.end()) return;
        CHORALE_CHECK_STATE(found->second == unit.get(), "[fully_shard] ", full, " belongs to the group of ",
                            paths[found->second].empty() ? "the outermost module" : paths[found->second], " and to ",
                            at.empty() ? "that of the outermost module" : at,
                            ": put both modules into one call of fully_shard()");
        unit->parameters_[unit->index_.at(parameter.impl())].name = full;
        const DeviceType device = parameter.device().type;
        if (device == DeviceType::kNull) absent += "\n  " + full;
        if (unit->options_.offload && device != DeviceType::kCpu && device != DeviceType::kNull)
          elsewhere += concat("\n  ", full, " on ", parameter.device());
      });
    }
  }
  CHORALE_CHECK_STATE(absent.empty(), "[fully_shard] these parameters have no memory yet: call materialize() and fill ",
                      "them before the first forward:", absent);
  CHORALE_CHECK_STATE(elsewhere.empty(), "[fully_shard] with .offload parameters stay on the host: materialize them ",
                      "on the CPU. These are elsewhere:", elsewhere);
  for (const auto& unit : units) {
    unit->context_ = context;
    unit->path_ = paths[unit.get()];
    unit->number_ = context->units.size() + 1;
    context->units.push_back(unit);
  }
  is_root_ = true;
}

// ---- what users call

void fully_shard(nn::Module& module, const Options& options) { fully_shard(std::vector{&module}, options); }

void fully_shard(const std::vector<nn::Module*>& modules, const Options& options) {
  check(modules, options);
  const auto unit = std::make_shared<Unit>(modules.size(), options);
  unit->take_parameters(modules);
  for (size_t i = 0; i < modules.size(); ++i) unit->attach(*modules[i], i);
}

bool is_fully_sharded(const nn::Module& module) { return unit_of(module) != nullptr; }

void Unsharding::wait() { unit_->wait_for_unshard(); }

Unsharding unshard(nn::Module& module, bool async) {
  Unsharding unsharding(unit_or_throw(module));
  unit_or_throw(module)->unshard();
  if (!async) unsharding.wait();
  return unsharding;
}

void reshard(nn::Module& module) { unit_or_throw(module)->reshard(); }

void reset_iter_state(nn::Module& module) {
  for_units(module, true, [](Unit& unit) {
    if (unit.context()) unit.context()->reset();
    unit.reset();
  });
}

void set_post_optimizer_event(nn::Module& root, chorale::Event updated) {
  const auto unit = unit_or_throw(root);
  CHORALE_CHECK_STATE(unit->is_root(),
                      "[set_post_optimizer_event] takes the outermost module, after its first forward");
  unit->context()->updated = std::move(updated);
}

std::vector<Tensor> call_method(nn::Module& module, std::vector<Tensor> inputs,
                                const std::function<std::vector<Tensor>(const std::vector<Tensor>&)>& method) {
  nn::HookedCall call(module);
  return call.after(method(call.before(std::move(inputs), {})));
}

void set_requires_gradient_sync(nn::Module& module, bool wanted, bool recurse) {
  for_units(module, recurse, [&](Unit& unit) { unit.syncs = wanted; });
}
void set_requires_all_reduce(nn::Module& module, bool wanted, bool recurse) {
  for_units(module, recurse, [&](Unit& unit) { unit.all_reduces = wanted; });
}
void set_reshard_after_forward(nn::Module& module, ReshardAfterForward policy, bool recurse) {
  for_units(module, recurse, [&](Unit& unit) { unit.set_policy(policy); });
}
void set_reshard_after_backward(nn::Module& module, bool wanted, bool recurse) {
  for_units(module, recurse, [&](Unit& unit) { unit.reshards_after_backward = wanted; });
}
void set_is_last_backward(nn::Module& module, bool last) {
  const auto unit = unit_or_throw(module);
  CHORALE_CHECK_STATE(unit->context(), "[set_is_last_backward] comes after the first forward");
  unit->context()->is_last_backward = last;
}
void set_gradient_divide_factor(nn::Module& module, double factor) {
  CHORALE_CHECK(factor > 0, "[set_gradient_divide_factor] gradients are divided by a positive number, not ", factor);
  unit_or_throw(module)->divide_factor = factor;
}
void set_force_sum(nn::Module& module, bool wanted, bool recurse) {
  for_units(module, recurse, [&](Unit& unit) { unit.forces_sum = wanted; });
}
void set_reduces_unused(nn::Module& module, bool wanted, bool recurse) {
  for_units(module, recurse, [&](Unit& unit) { unit.reduces_unused = wanted; });
}
void set_modules_to_forward_prefetch(nn::Module& module, const std::vector<nn::Module*>& ahead) {
  unit_or_throw(module)->ahead_in_forward = units_of(ahead);
}
void set_modules_to_backward_prefetch(nn::Module& module, const std::vector<nn::Module*>& ahead) {
  unit_or_throw(module)->ahead_in_backward = units_of(ahead);
}

void share_comm_context(const std::vector<nn::Module*>& roots) {
  const auto context = std::make_shared<Context>();
  for (const nn::Module* module : roots) {
    CHORALE_CHECK_STATE(!unit_or_throw(*module)->context(), "[share_comm_context] this ", module->type_name(),
                        " has run already: modules share before their first forward");
  }
  for (const nn::Module* module : roots) unit_of(*module)->share(context);
}

void set_payload(nn::Module& module, const std::function<std::optional<Payload>(const Tensor& parameter)>& choose) {
  unit_or_throw(module)->set_payload(choose);
}

std::ostream& operator<<(std::ostream& out, const Event& event) {
  constexpr const char* kNames[] = {"U", "R", "PB"};
  return out << kNames[static_cast<size_t>(event.kind)] << "(" << event.module << ")";
}

void on_event(nn::Module& root, std::function<void(const Event&)> listener) {
  const auto unit = unit_or_throw(root);
  CHORALE_CHECK_STATE(unit->context(), "[on_event] comes after the first forward, which says what belongs together");
  unit->context()->listener = std::move(listener);
}

NamedTensors own_parameters(nn::Module& module) {
  NamedTensors own;
  for (const ShardedParameter& p : unit_or_throw(module)->parameters()) own.emplace_back(p.name, p.sharded());
  return own;
}

Sizes sizes_of(nn::Module& module) {
  Sizes sizes;
  for_units(module, true, [&](Unit& unit) {
    int64_t block = 0;
    for (const ShardedParameter& p : unit.parameters()) {
      const Tensor& part = sharding::local_of(p.sharded());
      const int64_t bytes = part.elems() * static_cast<int64_t>(part.elem_bytes());
      sizes.parts += bytes;
      if (p.wants_gradient()) sizes.gradients += bytes;
      block += unit.gathered_bytes(p);
    }
    sizes.largest_block = std::max(sizes.largest_block, block);
    if (unit.is_unsharded()) sizes.gathered += block;
  });
  return sizes;
}

double seconds_waited(nn::Module& module) {
  const auto unit = unit_or_throw(module);
  return unit->context() ? std::chrono::duration<double>(unit->context()->waited).count() : 0;
}

}  // namespace chorale::fsdp
