// ZeRO. Stage 1: every rank has all parameters and gradients, and the optimizer's state of its part only. A step
// updates that part and sends it to the others, so that N ranks need 1/N of the memory for states and do 1/N of the
// update.
//
//   zero::ZeroOptimizer<optim::AdamW, optim::AdamWOptions> optimizer({{ddp.named_parameters(), {.lr = 1e-3}}}, group);
//   …
//   backward(loss);      // DistributedDataParallel averages the gradients
//   optimizer.step();
//
// Stage 2: optimizer.shard_gradients(ddp) before the first step. A rank then keeps the averaged gradients of its part
// only; backward drops the others' as soon as they are sent. Values are those of stage 1, bit for bit.
//
// All ranks make the same calls. Parameters must keep their memory: with bucket views they are parts of a buffer.
#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <tuple>
#include <utility>

#include "chorale/autograd/autograd.h"
#include "chorale/comm/objects.h"
#include "chorale/optim/grad_scaler.h"
#include "chorale/optim/optimizer.h"
#include "chorale/reducer/grad_bucket.h"
#include "chorale/reducer/join.h"
#include "chorale/zero/parameters.h"
#include "chorale/zero/partition.h"

namespace chorale::zero {

struct ZeroOptions {
  bool bucket_views = false;  // send all parameters of a rank on a device at once; they become views of one buffer
};

// Updates inside of backward (overlap() below).
struct OverlapOptions {
  int warm_up = 2;             // steps without updates, until DDP's buckets are as they stay: 3 with a static graph
  bool shard_buckets = false;  // every bucket is dealt to all ranks, instead of all parameters together
};

template <class Optim, class Options>
class ZeroOptimizer final : public reducer::Joinable, public optim::SharedOptimizer {
 public:
  using Group = optim::ParameterGroup<Options>;

  ZeroOptimizer(const std::vector<Group>& groups, const comm::Group& group, const ZeroOptions& options = {})
      : parameters_(group.duplicate(), options.bucket_views) {
    CHORALE_CHECK(!groups.empty(), "[ZeroOptimizer] there are no parameters");
    for (const Group& one : groups) add_group(one);
  }

  // Parameters that are found later. Their owners follow from what each rank has so far.
  void add_group(const Group& group) {
    const NamedTensors own = parameters_.add(group.parameters);
    options_.push_back(group.options);
    parts_.push_back(own.empty() ? nullptr : std::make_unique<Optim>(std::vector<Group>{{own, group.options}}));
    consolidated_.reset();
  }

  // Updates this rank's part with the gradients that are there, and gets the others'.
  void step() override {
    if (overlap_) return finish_overlapped();
    if (reducer::Join* join = current_join()) join->notify(*this);
    update();
  }
  // Runs `closure`, which computes gradients and returns the loss, then steps; returns the loss.
  Tensor step(const std::function<Tensor()>& closure) {
    Tensor loss;
    {
      const EnableGrad record;
      loss = closure();
    }
    step();
    return loss;
  }
  // A step of inner optimizers whose step() takes these arguments.
  template <class... Args>
  void step_with(Args&&... args) {
    if (reducer::Join* join = current_join()) join->notify(*this);
    update(args...);
  }
  void zero_grad() {
    for (const auto& [name, x] : parameters_.all()) set_gradient(x, {});
  }

  // Stage 2. `ddp` is a DistributedDataParallel over parameters of this optimizer, before its first step: gradients are
  // then where their states are, and none on the other ranks. Each backward that is reduced needs a zero_grad() before
  // it; clip with clip_grad_norm() below, which knows all ranks' gradients.
  template <class Ddp>
  void shard_gradients(Ddp& ddp) {
    CHORALE_CHECK_STATE(!overlap_,
                        "[ZeroOptimizer] updates inside of backward take whole buckets: choose overlap() or "
                        "shard_gradients()");
    CHORALE_CHECK(ddp.group().size() == parameters_.group().size(), "[ZeroOptimizer] DDP has ", ddp.group().size(),
                  " ranks, and this optimizer ", parameters_.group().size());
    std::vector<int> owners;
    owners.reserve(ddp.managed_parameters().size());
    for (const auto& [name, x] : ddp.managed_parameters()) owners.push_back(parameters_.owners()[place_of(name, x)]);
    ddp.set_gradient_owners(std::move(owners));
  }
  // Returns the norm of the gradients that the optimizer uses, of all ranks together, and scales them by max_norm /
  // (norm + 1e-6) where that is below 1. All ranks call it.
  double clip_grad_norm(double max_norm) { return parameters_.clip_grad_norm(max_norm); }

  // A hook for DistributedDataParallel over the same parameters: `inner` averages a bucket, what this rank owns of it
  // is updated at once, while backward goes on, and all ranks begin to exchange its new values. step() is still the end
  // of a step: it waits for them. Not with bucket_views.
  // `managed` are ddp.managed_parameters(). One group of parameters only, no closures and no join(); this must outlive
  // the hook.
  reducer::CommHook overlap(const NamedTensors& managed, const reducer::CommHook& inner,
                            const OverlapOptions& options = {}) {
    CHORALE_CHECK_STATE(options_.size() == 1 && !overlap_,
                        "[ZeroOptimizer] updates overlap with backward for one group of parameters, and are asked for "
                        "once; there are ",
                        options_.size(), " groups");
    CHORALE_CHECK(inner.run, "[ZeroOptimizer] there is no hook that averages a bucket");
    // Backward notices writes by storage, and would take the update of one parameter for a write into the others.
    CHORALE_CHECK_STATE(!parameters_.has_bucket_views(),
                        "[ZeroOptimizer] with bucket_views all parameters of a rank share memory, and then updates "
                        "must wait for the end of backward: leave bucket_views or overlap() out");
    overlap_.emplace();
    overlap_->options = options;
    for (const auto& [name, x] : managed) overlap_->places.push_back(place_of(name, x));
    return {concat("zero(", inner.name, ")"), [this, run = inner.run](reducer::GradBucket& bucket) {
              const std::vector<size_t> indices(bucket.parameters().begin(), bucket.parameters().end());
              const size_t index = bucket.index();
              const comm::Future averaged = run(bucket);
              if (overlap_->is_active) {
                // Buckets before this one may be there, and nobody has looked yet.
                for (const comm::Future& before : overlap_->pending) std::ignore = before.is_completed();
                return overlap_->pending.emplace_back(averaged.then([this, index](const Tensors& values) {
                  update_bucket(index, values[0]);
                  return values;
                }));
              }
              overlap_->buckets.resize(std::max(overlap_->buckets.size(), index + 1));
              overlap_->buckets[index] = indices;
              return averaged;
            }};
  }

  // Under join() a rank that has run out of inputs goes on updating its part, with the gradients that it has: those of
  // what is joined before this.
  const comm::Group& join_group() const override { return parameters_.group(); }
  void shadow_step(reducer::Join&) override { update(); }
  void after_join(int) override {}

  size_t group_count() const { return options_.size(); }
  const Options& options(size_t group = 0) const { return options_.at(group); }
  // They hold from the next step on, on whichever rank; all ranks must be told the same.
  void set_options(size_t group, const Options& options) {
    if (parts_.at(group)) parts_[group]->set_options(0, options);
    options_[group] = options;
  }
  double lr(size_t group = 0) const { return options_.at(group).lr; }
  void set_lr(double lr) {
    for (size_t g = 0; g < options_.size(); ++g) {
      Options options = options_[g];
      options.lr = lr;
      set_options(g, options);
    }
  }

  // A GradScaler asks for it, in either stage.
  const comm::Group& sharing_group() const override { return parameters_.group(); }
  bool updates_in_backward() const override { return overlap_.has_value(); }
  std::vector<Tensor> parameters() const override {
    std::vector<Tensor> tensors;
    for (const auto& [name, x] : parameters_.all()) tensors.push_back(x);
    return tensors;
  }
  // The group rank that keeps the state of each parameter, and how many elements each rank has.
  const std::vector<int>& owners() const { return parameters_.owners(); }
  const std::vector<int64_t>& elems_by_rank() const { return parameters_.totals(); }

  // Brings the states of all ranks to one (a global rank), where state_dict() then is what an optimizer of all
  // parameters would give. All ranks call it; it holds until the next step.
  void consolidate_state_dict(int to = 0) {
    comm::Map mine;
    for (size_t g = 0; g < parts_.size(); ++g) {
      if (!parts_[g]) continue;
      for (const auto& [key, x] : parts_[g]->state_dict()) mine[outer_key(key, g)] = x;
    }
    if (overlap_) {
      for (const auto& part : overlap_->parts) {
        if (!part) continue;
        for (const auto& [key, x] : part->state_dict()) mine[key] = x;
      }
    }
    consolidated_.reset();
    const std::vector<comm::Value> all = comm::gather_object(parameters_.group(), mine, to);
    if (parameters_.group().global_rank(parameters_.group().rank()) != to) return;
    std::map<std::string, Tensor> state;
    for (const comm::Value& of_rank : all) {
      for (const auto& [key, x] : of_rank.as<comm::Map>()) state[key] = x.template as<Tensor>();
    }
    consolidated_ = NamedTensors(state.begin(), state.end());
  }
  NamedTensors state_dict() const {
    CHORALE_CHECK_STATE(consolidated_,
                        "[ZeroOptimizer] this rank has only its part of the state: all ranks call "
                        "consolidate_state_dict(to) after the last step, and rank `to` has all of it then");
    return *consolidated_;
  }
  // Takes over the state of an optimizer of all parameters, such as state_dict() gives: this rank's part of it. Its
  // options win.
  void load_state_dict(const NamedTensors& state) {
    CHORALE_CHECK_STATE(!overlap_, "[ZeroOptimizer] load a state before overlap()");
    for (size_t g = 0; g < parts_.size(); ++g) {
      if (!parts_[g]) {
        Attrs attrs(options_[g]);
        for (const auto& [key, x] : state) set_if_option(attrs, key, g, x);
        options_[g] = attrs.get<Options>();
        continue;
      }
      NamedTensors part;
      for (const auto& [key, x] : state) {
        if (is_of_part(key, g)) part.emplace_back(inner_key(key, g), x);
      }
      parts_[g]->load_state_dict(part);
      options_[g] = parts_[g]->options(0);
    }
    consolidated_.reset();
  }

 private:
  template <class... Args>
  void update(Args&... args) {
    for (size_t g = 0; g < parts_.size(); ++g) {
      if (!parts_[g]) continue;
      parts_[g]->step(args...);
      options_[g] = parts_[g]->options(0);  // which a step may change
    }
    parameters_.broadcast();
    consolidated_.reset();
  }

  static std::string prefix(size_t group) { return concat("groups/", group, "/"); }
  // A part of one group calls it group 0.
  static std::string outer_key(const std::string& key, size_t group) {
    return key.starts_with(prefix(0)) ? prefix(group) + key.substr(prefix(0).size()) : key;
  }
  static std::string inner_key(const std::string& key, size_t group) {
    return key.starts_with(prefix(group)) ? prefix(0) + key.substr(prefix(group).size()) : key;
  }
  bool is_of_part(const std::string& key, size_t group) const {
    if (key.starts_with("groups/")) return key.starts_with(prefix(group));
    const std::vector<Tensor> own = parts_[group]->parameters();
    for (const auto& [name, x] : parameters_.all()) {
      if (!key.starts_with(concat("state/", name, "/"))) continue;
      for (const Tensor& mine : own) {
        if (mine.is(x)) return true;
      }
    }
    return false;
  }
  static void set_if_option(Attrs& attrs, const std::string& key, size_t group, const Tensor& x) {
    if (!key.starts_with(prefix(group))) return;
    for (const kernel::Field& field : attrs.type()->fields) {
      if (key.substr(prefix(group).size()) != field.name) continue;
      if (field.kind == kernel::FieldKind::kBool) {
        attrs.set(field.name, x.item<double>() != 0);
      } else {
        attrs.set(field.name, x.item<double>());
      }
    }
  }

  // ---- updates inside of backward

  struct Overlap {
    OverlapOptions options;
    std::vector<size_t> places;                               // among all parameters, of DDP's
    std::vector<std::vector<size_t>> buckets;                 // DDP's parameters in each, as the last step had them
    std::vector<std::unique_ptr<Optim>> parts;                // by bucket; null where this rank owns nothing of it
    std::vector<std::vector<std::pair<size_t, Tensor>>> own;  // by bucket: first element in it, and the parameter
    int steps = 0;
    bool is_active = false;
    // The members from here on belong to the step that is under way. Buckets are sent in their order, on every rank,
    // whenever their updates are done; updates may run on the thread that moves reductions on.
    std::unique_ptr<std::mutex> mutex = std::make_unique<std::mutex>();
    std::vector<bool> is_updated;
    size_t sent = 0;
    std::vector<comm::Work> works;
    std::vector<comm::Future> pending;  // used by the thread of backward alone
  };

  size_t place_of(const std::string& name, const Tensor& x) const {
    const NamedTensors& all = parameters_.all();
    for (size_t i = 0; i < all.size(); ++i) {
      if (all[i].second.is(x)) return i;
    }
    throw InvalidArgument(concat("[ZeroOptimizer] parameter ", name, " of DDP is none of this optimizer's"));
  }

  void finish_overlapped() {
    CHORALE_CHECK_STATE(!current_join(), "[ZeroOptimizer] updates that overlap with backward cannot be joined");
    if (overlap_->is_active) {
      finish_sending();
      consolidated_.reset();
    } else if (++overlap_->steps >= overlap_->options.warm_up) {
      activate();
    }
  }

  // The buckets are as they stay: deals them, and makes an optimizer of what this rank has of each.
  void activate() {
    Overlap& o = *overlap_;
    const NamedTensors& all = parameters_.all();
    if (o.options.shard_buckets) {
      std::vector<int> owners = parameters_.owners();
      for (const std::vector<size_t>& bucket : o.buckets) {
        std::vector<int64_t> elems, totals(static_cast<size_t>(parameters_.group().size()));
        for (const size_t i : bucket) elems.push_back(all[o.places[i]].second.elems());
        const std::vector<int> dealt = owners_of(elems, totals);
        for (size_t k = 0; k < bucket.size(); ++k) owners[o.places[bucket[k]]] = dealt[k];
      }
      parameters_.set_owners(owners);
    }
    for (const std::vector<size_t>& bucket : o.buckets) {
      NamedTensors own;
      auto& places = o.own.emplace_back();
      size_t first = 0;
      for (const size_t i : bucket) {
        const auto& [name, x] = all[o.places[i]];
        if (parameters_.owners()[o.places[i]] == parameters_.group().rank()) {
          // Another tensor of the same memory: its gradient is none of DDP's business.
          own.emplace_back(name, set_requires_grad(detach(x)));
          places.emplace_back(first, own.back().second);
        }
        first += static_cast<size_t>(x.elems());
      }
      o.parts.push_back(own.empty() ? nullptr : std::make_unique<Optim>(std::vector<Group>{{own, options_[0]}}));
    }
    o.is_updated.assign(o.buckets.size(), false);
    o.is_active = true;
  }

  void update_bucket(size_t index, const Tensor& averaged) {
    Overlap& o = *overlap_;
    if (index >= o.parts.size()) return;
    const std::lock_guard lock(*o.mutex);
    CHORALE_CHECK_STATE(!o.is_updated[index],
                        "[ZeroOptimizer] a second backward updates parameters whose new values are on their way: call "
                        "step() after each backward that is reduced, and accumulate under no_sync()");
    if (o.parts[index]) {
      const NoGrad quiet;
      for (const auto& [first, x] : o.own[index])
        set_gradient(x, averaged.view_as(x.sizes(), x.strides(), averaged.offset() + static_cast<int64_t>(first)));
      o.parts[index]->set_options(0, options_[0]);
      o.parts[index]->step();
      for (const auto& [first, x] : o.own[index]) set_gradient(x, {});
    }
    o.is_updated[index] = true;
    while (o.sent < o.buckets.size() && o.is_updated[o.sent]) send_next_bucket();
  }

  // The gradients of its parameters are complete on every rank: no backward reads their values any more.
  void send_next_bucket() {
    Overlap& o = *overlap_;
    std::vector<size_t> places;
    for (const size_t i : o.buckets[o.sent++]) places.push_back(o.places[i]);
    for (comm::Work& work : parameters_.start_broadcast(places)) o.works.push_back(std::move(work));
  }

  void finish_sending() {
    Overlap& o = *overlap_;
    o.pending.clear();
    const std::lock_guard lock(*o.mutex);
    while (o.sent < o.buckets.size()) send_next_bucket();  // what no backward has updated
    const std::vector<comm::Work> works = std::exchange(o.works, {});
    o.sent = 0;
    o.is_updated.assign(o.buckets.size(), false);
    for (const comm::Work& work : works) work.wait();
  }

  OwnedParameters parameters_;
  std::vector<Options> options_;
  std::vector<std::unique_ptr<Optim>> parts_;  // by group; null where this rank owns nothing of it
  std::optional<Overlap> overlap_;
  std::optional<NamedTensors> consolidated_;
};

}  // namespace chorale::zero
