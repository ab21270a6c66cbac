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
    const Tensor gradient = chorale::gradient(leaf);
    // A sharded one has it twice: itself, and as its part.
    const int64_t holders = !gradient.defined() ? 0 : part_of(gradient).storage()->use_count() - gradient.is_sharded();
    leaves.push_back({leaf, gradient, is_read, holders <= 1});
    autograd::gradient_watch = own;
  }
  struct Leaf {
    Tensor leaf, gradient;
    bool read_first;
    bool has_own_memory;
  };
  std::set<const Tensor::Impl*> seen;
  std::vector<Leaf> leaves;
};

struct WatchScope {
  explicit WatchScope(Watch& watch) : before(std::exchange(autograd::gradient_watch, &watch)) {}
  ~WatchScope() { autograd::gradient_watch = before; }
  autograd::GradientWatch* before;
};

// Gradients of leaves as they were.
void put_back(const std::vector<Watch::Leaf>& leaves) {
  autograd::GradientWatch* own = std::exchange(autograd::gradient_watch, nullptr);
  for (const Watch::Leaf& seen : leaves) set_gradient(seen.leaf, seen.gradient);
  autograd::gradient_watch = own;
}

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
void explain_handles(const Tensor& x, std::set<const Tensor::Impl*>& known) {
  for (Tensor at = x; at.defined() && known.insert(at.impl()).second;) {
    const autograd::Slot* slot = autograd::slot_of(at);
    if (!slot || !slot->view) return;
    known.insert(slot->view->base.impl());
    at = slot->view->view_of;
  }
}

}  // namespace

// Traces: values are nowhere to be had.
class Frame::StrictCall final : public Frame::Call {
 public:
  StrictCall(State& state, const std::vector<Argument>& arguments, int attempt)
      : Call(state, arguments), attempt_(attempt) {}
  bool is_strict() const override { return true; }
  // Primes, so that no size is one of them by accident.
  int64_t stand_in(size_t number) override {
    constexpr int64_t kStandIns[] = {4099, 5003, 6007, 7001, 8009, 9001, 10007, 11003};
    CHORALE_CHECK_STATE(number < std::size(kStandIns) / 2, "[compile] a whole graph has at most ",
                        std::size(kStandIns) / 2, " numbers that only running tells");
    return kStandIns[number * 2 + static_cast<size_t>(attempt_)];
  }
  uint64_t begin() const { return begin_; }
  void trace_gradients(bool on) { is_tracing_gradients_ = on; }

 private:
  int attempt_;
};

std::shared_ptr<Frame::Variant> Frame::trace(
    const std::vector<Argument>& arguments, Body body,
    const std::function<bool(const std::shared_ptr<Segment>&, const Recording&)>& programs,
    std::vector<Tensor>& results, int attempt) {
  const CompileOptions& options = state_->options;
  auto variant = std::make_shared<Variant>();
  for (size_t i = 0; i < arguments.size(); ++i) {
    Variant::ArgumentGuard guard{arguments[i], {}, {}, false, first_on_storage(arguments, i)};
    if (const auto* x = std::get_if<Tensor>(&arguments[i].value); x && x->defined()) {
      guard.layout = graph::layout_of(*x);
      guard.device = x->device();
      guard.wants_grad = wants_grad(*x);
      if (const std::optional<Whole> whole = whole_of(*x)) guard.placed = whole->layout;
    }
    variant->arguments.push_back(std::move(guard));
  }
  variant->modes = modes_now();
  for (const auto& value : options.watch) variant->watched.push_back(value());

  StrictCall call(*state_, arguments, attempt);
  Recording recording(call);
  Watch watch;
  std::vector<Tensor> traced;
  const graph::RecordingScope scope(recording);
  ShardedSeen sharded(recording);
  {
    const WatchScope watching(watch);
    for (const Argument& argument : arguments) {
      if (const auto* x = std::get_if<Tensor>(&argument.value); x && x->defined()) recording.hide(part_of(*x));
    }
    try {
      traced = body();
    } catch (const InvalidArgument& error) {
      put_back(watch.leaves);
      recording.rewind_generators();
      if (recording.late_sizes().empty()) throw;
      throw InvalidArgument(concat(error.what(), " (", recording.late_sizes()[0].stand_in,
                                   " stands for a number that only running tells: where it must lie within a size, "
                                   "compile without whole_graph)"));
    } catch (...) {
      put_back(watch.leaves);
      recording.rewind_generators();
      throw;
    }
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
  std::set<const Tensor::Impl*> explained;
  const auto leave = [&](const Tensor& x) {
    Left left;
    if (!x.defined()) return left;
    explain_handles(x, explained);
    explain_handles(part_of(x), explained);
    const uint32_t t = recording.find(part_of(x));
    if (t == kNone) {
      left.from = Left::From::kHandle;
      left.handle = x;
      return left;
    }
    left.whole = whole_of(x);
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
      if (left.is_itself && left.whole) left.handle = x;
      return left;
    }
    left.from = Left::From::kWanted;
    left.index = end.wanted.size();
    end.wanted.push_back(t);
    return left;
  };
  for (const Tensor& x : traced) variant->results.push_back(leave(x));
  std::vector<size_t> own_gradients;  // guards of those whose memory nobody else looks at
  for (const Watch::Leaf& seen : watch.leaves) {
    if (seen.read_first) {
      variant->gradients.push_back({seen.leaf, seen.gradient.defined()});
      Variant::GradientGuard& guard = variant->gradients.back();
      if (seen.gradient.defined() && recording.find(part_of(seen.gradient)) != kNone) guard.fixed = seen.gradient;
      const bool is_twice = std::count_if(watch.leaves.begin(), watch.leaves.end(), [&](const Watch::Leaf& other) {
                              return guard.fixed.defined() && guard.fixed.impl() == other.gradient.impl();
                            }) > 1;
      if (guard.fixed.defined() && seen.has_own_memory && !is_twice)
        own_gradients.push_back(variant->gradients.size() - 1);
    }
    const Tensor now = chorale::gradient(seen.leaf);
    if (now.defined() && seen.gradient.defined() && now.is(seen.gradient)) continue;
    const bool is_read = seen.gradient.defined() && recording.find(part_of(seen.gradient)) != kNone;
    if (!is_read) variant->replaced.push_back(variant->left_gradients.size());
    variant->left_gradients.emplace_back(seen.leaf, leave(now));
  }
  // What else the host holds on to: states that a first step makes.
  std::set<uint32_t> escaped;
  for (const Tensor& x : recording.live_tensors()) {
    const uint32_t s = recording.tensors()[recording.find(x)].storage;
    if (!explained.count(x.impl()) && !recording.storages()[s].has_bytes) escaped.insert(s);
  }
  end.live.assign(escaped.begin(), escaped.end());
  variant->once |= !escaped.empty();
  for (const graph::LateSize& late : recording.late_sizes()) end.wanted.push_back(late.tensor);

  end.layouts = sharded.layouts();
  const std::vector<Tensor> sharded_leaves = sharded.leaves();
  call.trace_gradients(true);
  const std::shared_ptr<Segment> segment = Segment::build(recording, end, {true, options.split, options.memory_budget});
  call.trace_gradients(false);
  recording.truncate(segment->key().calls.size());
  if (!programs(segment, recording)) {
    put_back(watch.leaves);
    recording.rewind_generators();
    return nullptr;
  }
  watch.leaves.clear();  // old gradients go before new ones are made
  variant->segment = segment;

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
      if (x && x->defined() && part_of(*x).is(handle)) argument = i;
    }
    for (Variant::GradientGuard& guard : variant->gradients) {
      if (argument == kNowhere || !guard.fixed.defined() || !part_of(guard.fixed).is(handle)) continue;
      guard.argument = argument;
      guard.fixed = {};
    }
    Tensor leaf;
    for (const size_t g : own_gradients) {
      Variant::GradientGuard& guard = variant->gradients[g];
      if (argument != kNowhere || outside[p].compare_offset || !part_of(guard.fixed).is(handle)) continue;
      leaf = guard.leaf;
      guard.place = p;
      guard.layout = graph::layout_of(handle);
      guard.device = handle.device();
      if (const std::optional<Whole> whole = whole_of(guard.fixed)) guard.placed = whole->layout;
      guard.fixed = {};
      break;
    }
    variant->from_argument.push_back(argument);
    variant->gradient_of.push_back(leaf);
    const bool is_captured = argument == kNowhere && !leaf.defined();
    variant->outside.push_back(is_captured ? handle : Tensor{});
    if (is_captured) {
      variant->captured.push_back({handle, handle.storage().get(), graph::layout_of(handle), outside[p].wants_grad});
    }
    if (recording.storages()[outside[p].storage].first_write != kNone) variant->written.push_back(p);
  }
  const auto place_of_part = [&](const Tensor& x) {
    size_t p = 0;
    while (p < outside.size() && !part_of(x).is(recording.tensors()[outside[p].tensor].handle)) ++p;
    return p;
  };
  for (const Tensor& leaf : sharded_leaves) {
    const size_t p = place_of_part(leaf);
    if (p == outside.size() || !variant->outside[p].defined()) continue;
    variant->captured.push_back({leaf, leaf.storage().get(), graph::layout_of(leaf), wants_grad(leaf)});
  }
  const auto exit_of = [&](const Edge& edge) -> Variant::Exit {
    if (!edge.wanted()) return {};
    for (size_t p = 0; p < outside.size(); ++p) {
      const size_t argument = variant->from_argument[p];
      const Tensor& x = argument == kNowhere ? recording.tensors()[outside[p].tensor].handle
                                             : std::get<Tensor>(arguments[argument].value);
      if (!is_differentiable(x.dtype())) continue;
      const Edge of = autograd::edge_of(x);
      if (of.node.get() == edge.node.get() && (of.node ? of.index == edge.index : of.leaf.impl() == edge.leaf.impl())) {
        return {p};
      }
    }
    // A leaf of which ops have seen the part, or another handle.
    const bool is_captured = edge.leaf.defined() && std::any_of(variant->captured.begin(), variant->captured.end(),
                                                                [&](const Variant::CapturedGuard& guard) {
                                                                  return guard.storage == edge.leaf.storage().get();
                                                                });
    CHORALE_CHECK_STATE(is_captured,
                        "[compile] a gradient leaves the whole graph to something that is neither an argument nor a "
                        "captured tensor; compile without whole_graph");
    variant->captured.push_back({edge.leaf, edge.leaf.storage().get(), graph::layout_of(edge.leaf), true});
    return {kNowhere, edge.leaf};
  };
  for (const std::vector<Edge>& edges : variant->segment->exits(end)) {
    variant->exits.emplace_back();
    for (const Edge& edge : edges) variant->exits.back().push_back(exit_of(edge));
  }
  for (Variant::ArgumentGuard& guard : variant->arguments) {
    const auto* x = std::get_if<Tensor>(&guard.then.value);
    if (!x || !x->defined()) continue;
    const auto on_it = [&](const Variant::CapturedGuard& other) { return other.storage == x->storage().get(); };
    guard.is_captured = std::any_of(variant->captured.begin(), variant->captured.end(), on_it);
    const std::lock_guard lock(state_->mutex);
    guard.stays = std::any_of(state_->variants.begin(), state_->variants.end(), [&](const auto& known) {
      return std::any_of(known->captured.begin(), known->captured.end(), on_it);
    });
  }
  std::vector<Tensor> from_outside;
  for (const SegmentKey::Outside& one : outside) from_outside.push_back(recording.tensors()[one.tensor].handle);
  // The tensors that were traced have no use any more; those that are handed out are made by running.
  for (auto& [leaf, left] : variant->left_gradients) set_gradient(leaf, {});
  recording.rewind_generators();
  Segment::Results made;
  {
    const graph::RecordingPaused paused;
    made = variant->segment->run(end);
  }
  variant->host = recording.host_reads();
  recording.clear();
  results = hand_out(*variant, arguments, from_outside, made);
  return variant;
}

bool Frame::has_graph_for(const std::vector<Argument>& arguments) const {
  const std::lock_guard lock(state_->mutex);
  return std::any_of(state_->variants.begin(), state_->variants.end(), [&](const std::shared_ptr<Variant>& variant) {
    return variant->mismatch(arguments, state_->options).empty();
  });
}

std::vector<Tensor> Frame::call_whole(const std::vector<Argument>& arguments, Body body) {
  std::shared_ptr<Variant> variant;
  std::string differs;
  bool is_first = true, is_full = false;
  {
    const std::lock_guard lock(state_->mutex);
    auto& known = state_->variants;
    is_first = known.empty();
    for (auto at = known.begin(); at != known.end() && !variant; ++at) {
      std::string reason = (*at)->mismatch(arguments, state_->options);
      if (reason.empty()) {
        std::rotate(known.begin(), at, at + 1);
        variant = known.front();
      } else if (differs.empty()) {
        differs = std::move(reason);  // what was used last comes first
      }
    }
    const auto& families = state_->families;
    is_full = state_->is_full(0) && std::none_of(families.begin(), families.end(),
                                                 [](const State::Known& one) { return one.family->is_dynamic(); });
  }
  // A rank alone with its hit would not take part in what the others do next.
  if (state_->options.agree_on_guards && !is_first &&
      !all_have_one(*state_->options.agree_on_guards, variant != nullptr) && variant) {
    const std::lock_guard lock(state_->mutex);
    std::erase(state_->variants, variant);
    variant = nullptr;
    differs = "the guards of another rank";
  }
  if (variant && debug_level() == DebugLevel::kDetail) {
    std::vector<Tensor> results;
    const auto programs = [&](const std::shared_ptr<Segment>& segment, const Recording&) {
      if (segment->texts() == variant->segment->texts()) {
        segment->resize(variant->segment);
      } else {
        segment->compile(joint_eager(), 0);
      }
      return true;
    };
    const std::shared_ptr<Variant> again = trace(arguments, body, programs, results);
    const std::optional<Difference> found = first_difference(variant->segment->text(), again->segment->text());
    CHORALE_CHECK_STATE(!found, "[compile] ", state_->options.name, " does now what its graph does not: line ",
                        found->line, " of the graph is `", found->first, "` and would be `", found->second,
                        "`. A host value that it reads was frozen when it was traced: make it a tensor or an argument, "
                        "or name it in CompileOptions::watch");
    const std::lock_guard lock(state_->mutex);
    ++state_->report.runs;
    return results;
  }
  std::vector<Tensor> made_directly;
  if (variant && variant->direct && run_direct(*variant, arguments, made_directly)) {
    const std::lock_guard lock(state_->mutex);
    ++state_->report.runs;
    return made_directly;
  }
  if (variant) {
    Segment::Bindings bindings;
    bindings.outside.reserve(variant->outside.size());
    for (size_t p = 0; p < variant->outside.size(); ++p) bindings.outside.push_back(variant->outside_at(p, arguments));
    for (const std::vector<Variant::Exit>& exits : variant->exits) {
      bindings.exits.emplace_back();
      for (const Variant::Exit& exit : exits) {
        const size_t argument = exit.place == kNowhere ? kNowhere : variant->from_argument[exit.place];
        const Tensor to = argument != kNowhere     ? std::get<Tensor>(arguments[argument].value)
                          : exit.place != kNowhere ? bindings.outside[exit.place]
                                                   : exit.leaf;
        bindings.exits.back().push_back(to.defined() ? autograd::edge_of(to) : Edge{});
      }
    }
    give_up_gradients(*variant, bindings.free);
    const Segment::Results made = variant->segment->run(bindings);
    for (const size_t p : variant->written) bindings.outside[p].storage()->note_write("a compiled graph");
    const std::lock_guard lock(state_->mutex);
    ++state_->report.runs;
    return hand_out(*variant, arguments, bindings.outside, made);
  }
  if (is_full) {
    const std::lock_guard lock(state_->mutex);
    state_->note_uncompiled(differs);
    return body();
  }
  std::vector<Tensor> results;
  State::Made made{};
  std::vector<std::string> guards;
  // What the host has set otherwise may be of no consequence for a graph, or be as it was before.
  const auto same_graph = [&](const Segment& segment) -> std::shared_ptr<const Segment> {
    const std::lock_guard lock(state_->mutex);
    for (const std::shared_ptr<Variant>& known : state_->variants) {
      if (!known->host_mismatch().empty() && known->segment->texts() == segment.texts()) return known->segment;
    }
    return nullptr;
  };
  std::optional<Family::Example> first;  // of a function with late sizes, which is traced with two stand-ins for each
  const auto programs = [&](const std::shared_ptr<Segment>& segment, const Recording& recording) {
    if (const std::shared_ptr<const Segment> like = same_graph(*segment)) {
      segment->resize(like);
      made = State::Made::kResized;
      return true;
    }
    Family::Example example{sources_of(recording, *segment, arguments, state_->options), segment->texts()};
    if (recording.late_sizes().empty()) {
      made = state_->make_programs(segment, 0, arguments, std::move(example), differs, "", &guards);
    } else if (!first) {
      first = std::move(example);
      return false;
    } else {
      guards = state_->make_late_programs(segment, *first, std::move(example), differs);
    }
    if (state_->options.agree && made != State::Made::kResized) {
      check_agreement(*state_->options.agree, segment->text(), state_->options.agree_on_sizes != nullptr);
    }
    return true;
  };
  variant = trace(arguments, body, programs, results);
  if (!variant) variant = trace(arguments, body, programs, results, 1);
  if (made == State::Made::kCompiled && !variant->once) probe(arguments, body);
  const std::lock_guard lock(state_->mutex);
  ++state_->report.runs;
  if (made == State::Made::kUncompiled) return results;
  state_->report.guards = variant->guards();
  state_->report.guards.insert(state_->report.guards.end(), guards.begin(), guards.end());
  if (variant->once) {
    // It does not run again, and the next graph needs as much memory.
    variant->segment->release();
    std::erase_if(state_->families,
                  [&](const State::Known& known) { return known.family->segment() == variant->segment; });
    return results;
  }
  variant->make_direct();
  state_->variants.insert(state_->variants.begin(), std::move(variant));
  if (state_->variants.size() > kMostSizes) state_->variants.pop_back();
  return results;
}

}  // namespace compiled
}  // namespace chorale
