// Compiled functions: whole graphs.
#include <algorithm>
#include <set>

#include "chorale/api/agreement.h"
#include "chorale/api/variant.h"
#include "chorale/autograd/autograd.h"
#include "chorale/autograd/gradient_watch.h"
#include "chorale/base/debug_level.h"
#include "chorale/base/error.h"
#include "chorale/base/log.h"

namespace chorale {
namespace compiled {

using autograd::Edge;
using graph::kNone;
using graph::Recording;

namespace {

// Which leaves' own gradients the function looks at before it replaces them, and which it touches at all.
struct Watch final : autograd::GradientWatch {
  void note_read(const Tensor& leaf) override { note(leaf, true); }
  void note_replaced(const Tensor& leaf) override { note(leaf, false); }
  void note(const Tensor& leaf, bool is_read) {
    if (!seen.insert(leaf.impl()).second) return;
    autograd::GradientWatch* own = std::exchange(autograd::gradient_watch, nullptr);
    leaves.push_back({leaf, chorale::gradient(leaf), is_read});
    autograd::gradient_watch = own;
  }
  struct Leaf {
    Tensor leaf, gradient;
    bool read_first;
  };
  std::set<const TensorImpl*> seen;
  std::vector<Leaf> leaves;
};

struct WatchScope {
  explicit WatchScope(Watch& watch) : before(std::exchange(autograd::gradient_watch, &watch)) {}
  ~WatchScope() { autograd::gradient_watch = before; }
  autograd::GradientWatch* before;
};

// Whether the host holds on to a tensor with bytes on that storage, besides what it returned.
bool is_kept(const Recording& recording, uint32_t storage, const std::vector<Tensor>& returned) {
  int64_t tensors = 1;  // the recording's own reference to the storage
  for (const graph::RecordedTensor& tensor : recording.tensors()) {
    if (!tensor.handle.defined() || tensor.storage != storage) continue;
    ++tensors;
    int64_t known = tensor.handle.is_traced() ? 2 : 1;  // a tensor that is hidden is held once more
    for (const Tensor& x : returned) known += x.defined() && x.is(tensor.handle) ? 1 : 0;
    if (tensor.handle.use_count() > known) return true;
  }
  return recording.storages()[storage].storage->use_count() > tensors;
}

// Everything that a tensor which is left behind keeps alive by itself.
void explain_handles(const Tensor& x, std::set<const TensorImpl*>& known) {
  for (Tensor at = x; at.defined() && known.insert(at.impl()).second;) {
    const autograd::Slot* slot = autograd::slot_of(at);
    if (!slot || !slot->view) return;
    known.insert(slot->view->base.impl());
    at = slot->view->view_of;
  }
}

// Whether a tensor's memory may hold a new value of that layout: nobody else can see it.
bool is_free(const Tensor& x, const Tensor& like) {
  return x.defined() && x.use_count() == 1 && !x.extension() && !autograd::slot_of(x) && x.offset() == 0 &&
         x.storage()->use_count() == 1 && x.device() == like.device() && x.dtype() == like.dtype() &&
         x.sizes() == like.sizes() && x.is_contiguous();
}

}  // namespace

// Lets go of gradients that are replaced anyway, so that old and new ones are not there at once; new ones lie where the
// old ones were.
void Frame::give_up_gradients(const Variant& variant, std::vector<Tensor>& free) {
  for (const size_t at : variant.replaced) {
    const auto& [leaf, left] = variant.left_gradients[at];
    const Tensor old = chorale::gradient(leaf);
    if (!old.defined()) continue;
    set_gradient(leaf, {});
    if (left.from != Left::From::kWanted || left.root != kNowhere || !is_free(old, leaf)) continue;
    if (!variant.segment->lies_in_order(left.index)) continue;
    if (free.size() <= left.index) free.resize(left.index + 1);
    free[left.index] = old;
  }
}

// Traces: values are nowhere to be had.
class Frame::StrictCall final : public Frame::Call {
 public:
  using Call::Call;
  bool is_strict() const override { return true; }
  uint64_t begin() const { return begin_; }
  void trace_gradients(bool on) { is_tracing_gradients_ = on; }
};

std::shared_ptr<Frame::Variant> Frame::trace(const std::vector<Argument>& arguments,
                                             const std::function<std::vector<Tensor>()>& body,
                                             std::vector<Tensor>& results) {
  const CompileOptions& options = state_->options;
  auto variant = std::make_shared<Variant>();
  for (size_t i = 0; i < arguments.size(); ++i) {
    Variant::ArgumentGuard guard{arguments[i], {}, {}, false, first_on_storage(arguments, i)};
    if (const auto* x = std::get_if<Tensor>(&arguments[i].value); x && x->defined()) {
      guard.layout = graph::layout_of(*x);
      guard.device = x->device();
      guard.wants_grad = wants_grad(*x);
    }
    variant->arguments.push_back(std::move(guard));
  }
  variant->modes = modes_now();
  for (const auto& value : options.watch) variant->watched.push_back(value());

  StrictCall call(*state_);
  Recording recording(call);
  Watch watch;
  std::vector<Tensor> traced;
  const graph::RecordingScope scope(recording);
  {
    const WatchScope watching(watch);
    for (const Argument& argument : arguments) {
      if (const auto* x = std::get_if<Tensor>(&argument.value); x && x->defined()) recording.hide(*x);
    }
    traced = body();
  }
  // Tensors with bytes that were made inside. What the host keeps is a state that a first call makes; what it does not
  // keep, and did not write with an op, is data of the host.
  for (uint32_t s = 0; s < recording.storages().size(); ++s) {
    const graph::RecordedStorage& storage = recording.storages()[s];
    if (!storage.has_bytes || !storage.made_here || recording.is_constant(*storage.storage)) continue;
    if (is_kept(recording, s, traced)) {
      variant->once = true;
      continue;
    }
    const bool from_host =
        storage.first_read != kNone && (storage.first_write == kNone || storage.first_read <= storage.first_write);
    CHORALE_CHECK_STATE(
        !from_host,
        "[compile] a tensor was made from host data while a whole graph is traced: it would be the same "
        "in every call. Make it outside, pass it as an argument, or say constant(x) if that is meant");
  }

  EndOfSegment end{recording, call.begin()};
  std::set<const TensorImpl*> explained;
  const auto leave = [&](const Tensor& x) {
    Left left;
    if (!x.defined()) return left;
    explain_handles(x, explained);
    const uint32_t t = recording.find(x);
    if (t == kNone) {
      left.from = Left::From::kHandle;
      left.handle = x;
      return left;
    }
    const uint32_t s = recording.tensors()[t].storage;
    const Edge edge = autograd::may_want_grad(x) ? autograd::edge_of(x) : Edge{};
    if (edge.node && edge.node->number > call.begin() && !edge.node->released) {
      left.root = end.roots.size();
      end.roots.push_back(x);
    }
    if (recording.storages()[s].has_bytes && !recording.storages()[s].made_here) {
      left.from = Left::From::kOutside;
      left.layout = recording.tensors()[t].layout;
      left.index = t;  // becomes a place among those from outside
      left.is_itself = recording.tensors()[t].handle.defined();
      return left;
    }
    left.from = Left::From::kWanted;
    left.index = end.wanted.size();
    end.wanted.push_back(t);
    return left;
  };
  for (const Tensor& x : traced) variant->results.push_back(leave(x));
  for (const Watch::Leaf& seen : watch.leaves) {
    if (seen.read_first) {
      const bool is_used = seen.gradient.defined() && recording.find(seen.gradient) != kNone;
      variant->gradients.push_back({seen.leaf, seen.gradient.defined(), is_used ? seen.gradient : Tensor{}});
    }
    const Tensor now = chorale::gradient(seen.leaf);
    if (now.defined() && seen.gradient.defined() && now.is(seen.gradient)) continue;
    const bool is_read = seen.gradient.defined() && recording.find(seen.gradient) != kNone;
    if (!is_read) variant->replaced.push_back(variant->left_gradients.size());
    variant->left_gradients.emplace_back(seen.leaf, leave(now));
  }
  watch.leaves.clear();  // old gradients go before new ones are made
  // What else the host holds on to: states that a first step makes.
  std::set<uint32_t> escaped;
  for (const Tensor& x : recording.live_tensors()) {
    const uint32_t s = recording.tensors()[recording.find(x)].storage;
    if (!explained.count(x.impl()) && !recording.storages()[s].has_bytes) escaped.insert(s);
  }
  end.live.assign(escaped.begin(), escaped.end());
  variant->once |= !escaped.empty();

  call.trace_gradients(true);
  variant->segment = Segment::build(recording, end, {options.backend, true, options.split, options.memory_budget});
  call.trace_gradients(false);
  recording.truncate(variant->segment->key().calls.size());
  if (options.agree) check_agreement(*options.agree, variant->segment->text());

  const std::vector<SegmentKey::Outside>& outside = variant->segment->key().outside;
  const auto place_of = [&](const Left& left) {
    const uint32_t s = recording.tensors()[left.index].storage;
    for (size_t p = 0; p < outside.size(); ++p) {
      if (left.is_itself ? outside[p].tensor == left.index : outside[p].storage == s) return p;
    }
    return outside.size();
  };
  const auto settle = [&](Left& left) {
    if (left.from != Left::From::kOutside) return;
    left.index = place_of(left);
    left.layout.offset -= outside[left.index].layout.offset;
  };
  for (Left& left : variant->results) settle(left);
  for (auto& [leaf, left] : variant->left_gradients) settle(left);
  for (size_t p = 0; p < outside.size(); ++p) {
    const Tensor& handle = recording.tensors()[outside[p].tensor].handle;
    size_t argument = kNowhere;
    for (size_t i = 0; i < arguments.size() && argument == kNowhere; ++i) {
      const auto* x = std::get_if<Tensor>(&arguments[i].value);
      if (x && x->defined() && x->is(handle)) argument = i;
    }
    variant->from_argument.push_back(argument);
    variant->outside.push_back(argument == kNowhere ? handle : Tensor{});
    if (argument == kNowhere) {
      variant->captured.push_back({handle, handle.storage().get(), graph::layout_of(handle), outside[p].wants_grad});
    }
    if (recording.storages()[outside[p].storage].first_write != kNone) variant->written.push_back(p);
  }
  for (const std::vector<Edge>& edges : variant->segment->exits(end)) {
    variant->exits.emplace_back();
    for (const Edge& edge : edges) {
      size_t found = kNowhere;
      for (size_t p = 0; p < outside.size() && found == kNowhere && edge.wanted(); ++p) {
        const Tensor& handle = recording.tensors()[outside[p].tensor].handle;
        if (!is_differentiable(handle.dtype())) continue;
        const Edge of = autograd::edge_of(handle);
        if (of.node.get() == edge.node.get() &&
            (of.node ? of.index == edge.index : of.leaf.impl() == edge.leaf.impl())) {
          found = p;
        }
      }
      CHORALE_CHECK_STATE(found != kNowhere || !edge.wanted(),
                          "[compile] a gradient leaves the whole graph to something that is neither an argument nor a "
                          "captured tensor; compile without whole_graph");
      variant->exits.back().push_back(found);
    }
  }
  // The tensors that were traced have no use any more; those that are handed out are made by running.
  for (auto& [leaf, left] : variant->left_gradients) set_gradient(leaf, {});
  recording.rewind_generators();
  Segment::Results made;
  {
    const graph::RecordingPaused paused;
    made = variant->segment->run(end);
  }
  recording.clear();
  results = hand_out(*variant, arguments, made);
  return variant;
}

std::vector<Tensor> Frame::hand_out(const Variant& variant, const std::vector<Argument>& arguments,
                                    const Segment::Results& made) const {
  const auto outside = [&](size_t p) {
    return variant.from_argument[p] == kNowhere ? variant.outside[p]
                                                : std::get<Tensor>(arguments[variant.from_argument[p]].value);
  };
  const auto make = [&](const Left& left) {
    Tensor x;
    if (left.from == Left::From::kHandle) x = left.handle;
    if (left.from == Left::From::kWanted) x = made.wanted[left.index];
    if (left.from == Left::From::kOutside) {
      x = outside(left.index);
      if (left.is_itself) return x;
      x = Tensor::on(x.storage(), left.layout.sizes, left.layout.strides, x.offset() + left.layout.offset,
                     left.layout.dtype);
    }
    if (left.root != kNowhere) variant.segment->set_history(made, left.root, x);
    return x;
  };
  std::vector<Tensor> results;
  for (const Left& left : variant.results) results.push_back(make(left));
  for (const auto& [leaf, left] : variant.left_gradients) set_gradient(leaf, make(left));
  for (const auto& settle : made.settle) settle();
  return results;
}

std::vector<Tensor> Frame::call_whole(const std::vector<Argument>& arguments,
                                      const std::function<std::vector<Tensor>()>& body) {
  std::shared_ptr<Variant> variant;
  std::string differs;
  size_t known = 0;
  {
    const std::lock_guard lock(state_->mutex);
    known = state_->variants.size();
    for (const auto& candidate : state_->variants) {
      differs = candidate->mismatch(arguments, state_->options);
      if (differs.empty()) {
        variant = candidate;
        break;
      }
    }
  }
  // A rank alone with its hit would not take part in what the others do next.
  if (state_->options.agree_on_guards && known > 0 &&
      !all_have_one(*state_->options.agree_on_guards, variant != nullptr) && variant) {
    const std::lock_guard lock(state_->mutex);
    std::erase(state_->variants, variant);
    variant = nullptr;
    differs = "the guards of another rank";
  }
  if (variant && debug_level() == DebugLevel::kDetail) {
    std::vector<Tensor> results;
    const std::shared_ptr<Variant> again = trace(arguments, body, results);
    const std::optional<Difference> found = first_difference(variant->segment->text(), again->segment->text());
    CHORALE_CHECK_STATE(!found, "[compile] ", state_->options.name, " does now what its graph does not: line ",
                        found->line, " of the graph is `", found->first, "` and would be `", found->second,
                        "`. A host value that it reads was frozen when it was traced: make it a tensor or an argument, "
                        "or name it in CompileOptions::watch");
    const std::lock_guard lock(state_->mutex);
    ++state_->report.runs;
    return results;
  }
  if (variant) {
    Segment::Bindings bindings;
    bindings.outside.reserve(variant->outside.size());
    for (size_t p = 0; p < variant->outside.size(); ++p) {
      const size_t argument = variant->from_argument[p];
      bindings.outside.push_back(argument == kNowhere ? variant->outside[p]
                                                      : std::get<Tensor>(arguments[argument].value));
    }
    for (const std::vector<size_t>& exits : variant->exits) {
      bindings.exits.emplace_back();
      for (const size_t p : exits) {
        bindings.exits.back().push_back(p == kNowhere ? Edge{} : autograd::edge_of(bindings.outside[p]));
      }
    }
    give_up_gradients(*variant, bindings.free);
    const Segment::Results made = variant->segment->run(bindings);
    for (const size_t p : variant->written) bindings.outside[p].storage()->note_write("a compiled graph");
    const std::lock_guard lock(state_->mutex);
    ++state_->report.runs;
    return hand_out(*variant, arguments, made);
  }
  if (known >= static_cast<size_t>(state_->options.most_variants)) {
    const std::lock_guard lock(state_->mutex);
    if (state_->report.uncompiled++ == 0) {
      log_warning(
          concat("[compile] ", state_->options.name, " has ", known,
                 " variants, which is the most that is allowed; it runs uncompiled now. Last guard: ", differs));
    }
    return body();
  }
  std::vector<Tensor> results;
  variant = trace(arguments, body, results);
  const std::lock_guard lock(state_->mutex);
  if (known > 0) {
    state_->report.recompiles.push_back(differs);
    log_info(concat("[compile] ", state_->options.name, " is compiled again: ", differs));
  }
  state_->note_compiled(*variant->segment, "");
  state_->report.guards = variant->guards();
  ++state_->report.runs;
  if (!variant->once) state_->variants.push_back(std::move(variant));
  return results;
}

}  // namespace compiled
}  // namespace chorale
