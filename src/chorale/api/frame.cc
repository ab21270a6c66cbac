// Compiled functions: segmented calls.
#include "chorale/api/frame.h"

#include <malloc.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "chorale/api/agreement.h"
#include "chorale/autograd/autograd.h"
#include "chorale/autograd/checkpoint.h"
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/base/log.h"
#include "chorale/base/stacks.h"
#include "chorale/op/collective.h"
#include "chorale/op/copy.h"
#include "chorale/op/device_scope.h"

#ifndef __has_feature
#define __has_feature(name) 0
#endif

namespace chorale {
namespace compiled {

using graph::Recording;

// Gives back what passes and generated text have left behind, before the step takes its memory. A sanitizer brings a
// heap of its own; glibc's, which nobody has used then, must not be trimmed.
static void trim_heap() {
#if !(__has_feature(thread_sanitizer) || __has_feature(address_sanitizer) || defined(__SANITIZE_THREAD__) || \
      defined(__SANITIZE_ADDRESS__))
  malloc_trim(0);
#endif
}

Backend joint_eager() {
  return [](graph::Graph graph, const GraphInfo&) { return std::make_shared<const graph::Program>(std::move(graph)); };
}

std::vector<std::string> Report::break_reasons() const {
  std::vector<std::string> reasons;
  for (const Compiled& graph : graphs) {
    if (!graph.break_reason.empty()) reasons.push_back(graph.break_reason);
  }
  return reasons;
}

std::string Report::text() const {
  std::string all = concat("compiled ", compiles, compiles == 1 ? " time, " : " times, ", graphs.size(),
                           graphs.size() == 1 ? " graph, " : " graphs, ", breaks.size(),
                           breaks.size() == 1 ? " break" : " breaks", "\n");
  for (size_t i = 0; i < graphs.size(); ++i) {
    const Compiled& graph = graphs[i];
    all += concat("graph ", i, ": ", graph.ops, " ops, ", graph.arena_bytes, " bytes of intermediate values");
    if (graph.bucket_bytes > 0) all += concat(", bucket of ", graph.bucket_bytes, " bytes");
    all += concat(graph.break_reason.empty() ? "" : "; ends at: ", graph.break_reason, "\n", graph.text);
    for (const chorale::graph::ListedKernel& kernel : graph.kernels) {
      all += concat("kernel ", kernel.node, ": ", kernel.name, ", ", kernel.bytes, " bytes, ",
                    std::ceil(kernel.microseconds * 10) / 10, " us expected\n");
    }
  }
  for (const std::string& guard : guards) all += concat("guard: ", guard, "\n");
  for (const std::string& reason : recompiles) all += concat("recompiled: ", reason, "\n");
  for (const std::string& reason : fixed) all += concat("fixed size: ", reason, "\n");
  if (resizes > 0) all += concat("further sizes without compiling: ", resizes, "\n");
  return all;
}

Frame::Frame(CompileOptions options) : state_(std::make_unique<State>()) {
  state_->options = std::move(options);
  CompileOptions& its = state_->options;
  if (!its.backend) its.backend = joint_eager();
  CHORALE_CHECK(its.memory_budget >= 0 && its.memory_budget <= 1,
                "[compile] memory_budget must lie between 0 and 1, not be ", its.memory_budget);
  CHORALE_CHECK(its.most_variants >= 1 && its.most_in_all >= 1, "[compile] most_variants and most_in_all must be at ",
                "least 1, not ", its.most_variants, " and ", its.most_in_all);
}

Frame::~Frame() {
  if (state_->explains) {
    std::fprintf(stderr, "%s: %s", state_->options.name.c_str(), report().text().c_str());
  }
}

Report Frame::report() const {
  const std::lock_guard lock(state_->mutex);
  return state_->report;
}

void Frame::reset() {
  const std::lock_guard lock(state_->mutex);
  state_->segments.clear();
  state_->variants.clear();
  state_->per_ordinal.clear();
  state_->families.clear();
  state_->seen = {};
  state_->empty_ones.clear();
  state_->report = {};
}

void Frame::State::note_compiled(const Segment& segment, const Family& family, const std::string& reason) {
  const std::vector<std::string> texts = family.texts();
  segment.log_buckets(options.name);
  ++report.compiles;
  for (size_t k = 0; k < segment.pieces().size(); ++k) {
    const Segment::Piece& piece = segment.pieces()[k];
    Report::Compiled made;
    made.text = family.is_learnt() ? texts[k] : graph::print(piece.forward.graph);
    made.ops = piece.forward.graph.nodes.size();
    made.bucket_bytes = piece.bucket_bytes;
    made.bucket = piece.bucket;
    if (piece.forward_program) {
      made.arena_bytes = piece.forward_program->plan().arena_bytes;
      made.kernels = graph::list_kernels(*piece.forward_program);
    }
    made.break_reason = segment.is_split()
                            ? concat("DDPOptimizer: bucket ", segment.pieces().size() - 1 - k, " of ",
                                     segment.pieces().size(), ", ", piece.bucket_bytes, " bytes of parameters")
                            : reason;
    report.graphs.push_back(std::move(made));
  }
}

void Frame::State::note_guards(const Segment& segment, const Recording& recording,
                               const std::vector<Argument>& arguments) {
  for (const SegmentKey::Outside& outside : segment.key().outside) {
    const Tensor& handle = recording.tensors()[outside.tensor].handle;
    const Argument* argument = argument_of(arguments, handle);
    const Recording::Managed* managed = recording.managed(*handle.storage());
    std::string guard = argument  ? concat("local ", argument->source())
                        : managed ? concat(managed->by, " ", *managed->name)
                                  : "captured";
    guard += concat(argument || managed ? " is " : " ", outside.layout.dtype, outside.layout.sizes,
                    outside.wants_grad && !managed ? " and requires a gradient" : "");
    std::vector<std::string>& all = report.guards;
    if (std::find(all.begin(), all.end(), guard) == all.end()) all.push_back(std::move(guard));
  }
}

bool Frame::State::is_full(size_t ordinal) const {
  const auto known = per_ordinal.find(ordinal);
  return (known != per_ordinal.end() && known->second >= options.most_variants) ||
         report.compiles >= options.most_in_all;
}

void Frame::State::note_uncompiled(const std::string& differs) {
  if (report.uncompiled++ > 0) return;
  log_warning(concat("[compile] ", options.name, " has ", report.compiles,
                     " variants, which is the most that is allowed; it runs uncompiled now. Last guard: ", differs));
}

void Frame::State::teach(Family& family, const std::vector<Family::Example>& examples) {
  const std::string why_not = family.teach(examples);
  if (!why_not.empty()) return report.fixed.push_back(concat("at another size of what is marked: ", why_not));
  const auto known =
      std::find_if(families.begin(), families.end(), [&](const Known& one) { return one.family.get() == &family; });
  const std::vector<std::string> texts = family.texts();
  for (size_t k = 0; k < family.segment()->pieces().size(); ++k) report.graphs[known->first_graph + k].text = texts[k];
}

Frame::State::Made Frame::State::make_programs(const std::shared_ptr<Segment>& segment, size_t ordinal,
                                               const std::vector<Argument>& arguments, Family::Example example,
                                               const std::string& differs, const std::string& break_reason,
                                               std::vector<std::string>* guards) {
  std::string reason = differs;
  {
    const std::lock_guard lock(mutex);
    for (auto known = families.rbegin(); known != families.rend(); ++known) {
      Family& family = *known->family;
      if (family.ordinal() != ordinal || !family.is_dynamic() || !family.is_comparable(example)) continue;
      bool is_own = false;
      const std::string why_not = family.mismatch(example, is_own);
      if (!why_not.empty()) {
        if (is_own && reason == differs) reason += concat(differs.empty() ? "" : "; ", why_not);
        continue;
      }
      segment->resize(family.segment());
      ++report.resizes;
      if (guards) *guards = family.guards();
      const std::vector<std::string> texts = family.texts();
      for (size_t k = 0; k < segment->pieces().size(); ++k) report.graphs[known->first_graph + k].text = texts[k];
      return Made::kResized;
    }
    if (is_full(ordinal)) {
      note_uncompiled(reason);
      segment->compile(joint_eager(), ordinal);
      return Made::kUncompiled;
    }
    if (per_ordinal[ordinal]++ > 0 && !reason.empty()) {
      report.recompiles.push_back(reason);
      log_info(concat("[compile] ", options.name, " is compiled again: ", reason));
    }
  }
  if (options.agree_on_sizes) {
    seen.share(*options.agree_on_sizes, arguments);
    if (options.dynamic != Dynamic::kNever) seen.mark(example.sources);
  }
  segment->compile(options.agree ? agreeing(options.backend, *options.agree) : options.backend, ordinal);
  trim_heap();
  const std::lock_guard lock(mutex);
  std::unique_ptr<Family> made;
  std::string why_fixed;
  for (auto known = families.rbegin(); known != families.rend() && options.dynamic != Dynamic::kNever; ++known) {
    if (known->family->ordinal() != ordinal || !known->family->is_comparable(example)) continue;
    auto wider = std::make_unique<Family>(*known->family, segment, example);
    if (why_fixed.empty()) why_fixed = wider->why_fixed();
    if (!wider->is_learnt()) continue;
    made = std::move(wider);
    break;
  }
  std::vector<std::string>& fixed = report.fixed;
  if (!made && !why_fixed.empty() && std::find(fixed.begin(), fixed.end(), why_fixed) == fixed.end()) {
    fixed.push_back(why_fixed);
  }
  if (!made) made = std::make_unique<Family>(ordinal, segment, std::move(example));
  const size_t first_graph = report.graphs.size();
  note_compiled(*segment, *made, break_reason);
  if (guards) *guards = made->guards();
  families.push_back({std::move(made), first_graph});
  return Made::kCompiled;
}

void Frame::State::compile_empty(size_t ordinal, const std::vector<Argument>& arguments) {
  if (!options.agree_on_sizes || !empty_ones.insert(ordinal).second) return;
  seen.share(*options.agree_on_sizes, arguments);
  const std::lock_guard lock(mutex);
  ++report.compiles;
}

std::vector<std::string> Frame::State::make_late_programs(const std::shared_ptr<Segment>& segment,
                                                          const Family::Example& first, Family::Example example,
                                                          const std::string& differs) {
  auto family = std::make_unique<Family>(0, segment, std::move(example));
  const std::string why_not = family->teach({first});
  CHORALE_CHECK_STATE(why_not.empty(), "[compile] ", options.name,
                      " does something else for another number that is read while it runs: ", why_not,
                      ". A whole graph may have such a number in sizes and factors, not in decisions; compile without "
                      "whole_graph to decide by it");
  Segment::Late late{family->symbolic_texts(), {}, {}};
  for (const std::vector<SizeSource>& symbol : family->symbols()) {
    if (symbol[0].is_late) late.symbols.push_back(late.sizes.size());
    late.sizes.push_back(symbol[0].value);
  }
  segment->interpret(std::move(late));
  const std::lock_guard lock(mutex);
  if (per_ordinal[0]++ > 0 && !differs.empty()) report.recompiles.push_back(differs);
  const size_t first_graph = report.graphs.size();
  note_compiled(*segment, *family, "");
  std::vector<std::string> guards = family->guards();
  families.push_back({std::move(family), first_graph});
  return guards;
}

// ---- one call

Frame::Call::Call(State& state, const std::vector<Argument>& arguments)
    : state_(state), arguments_(arguments), begin_(autograd::next_number(0)) {}

uint64_t Frame::Call::clock() { return autograd::next_number(0); }
uint64_t Frame::Call::region() { return autograd::checkpointed_call(); }

bool Frame::Call::run_now(Recording& recording, const std::string& reason) {
  if (is_tracing_gradients_ || is_strict()) return false;
  {
    const std::lock_guard lock(state_.mutex);
    state_.report.breaks.push_back(reason);
  }
  run(recording, reason);
  return true;
}

std::string Frame::Call::why_not(const std::string& reason) const {
  if (is_tracing_gradients_) return concat("[compile] the gradient needs a value while it is traced: ", reason);
  const std::string line = line_of_caller();
  return concat("[compile] ", line.empty() ? "" : line + ": ", "a value was asked for while a whole graph is traced (",
                reason, "): the graph has none yet. Return the tensor and look at it outside, or compile without ",
                "whole_graph");
}

// Storages whose contents are wanted: something still refers to them.
static std::vector<uint32_t> referenced_storages(const Recording& recording) {
  std::vector<uint32_t> live;
  for (uint32_t s = 0; s < recording.storages().size(); ++s) {
    const graph::RecordedStorage& storage = recording.storages()[s];
    if (!storage.has_bytes && !storage.is_tangent && storage.storage->use_count() > 1) live.push_back(s);
  }
  return live;
}

// The same where autograd's own references do not count: those of tensors that have a handle.
static std::vector<uint32_t> shown_storages(const Recording& recording, const std::vector<Tensor>& alive) {
  std::set<uint32_t> live;
  for (const Tensor& x : alive) {
    const uint32_t s = recording.tensors()[recording.find(x)].storage;
    if (!recording.storages()[s].has_bytes) live.insert(s);
  }
  return {live.begin(), live.end()};
}

std::shared_ptr<const Segment> Frame::Call::find(const EndOfSegment& end, std::string& reason) {
  const std::vector<SegmentKey::Outside> outside = Segment::outside_of(end.recording);
  const std::lock_guard lock(state_.mutex);
  auto& known = state_.segments;
  for (auto at = known.begin(); at != known.end(); ++at) {
    std::string differs = at->second->mismatch(end, outside);
    if (differs.empty()) {
      std::rotate(known.begin(), at, at + 1);
      return known.front().second;
    }
    // What was compiled last comes first.
    if (at->first == ordinal_ && reason.empty()) reason = std::move(differs);
  }
  return nullptr;
}

void Frame::Call::run(Recording& recording, const std::string& break_reason) {
  if (!recording.calls().empty()) {
    const CompileOptions& options = state_.options;
    EndOfSegment end{recording, begin_};
    end.layouts = sharded_->layouts();
    const std::vector<Tensor> alive = recording.live_tensors();
    if (options.joint) {
      std::vector<Tensor> shown = sharded_->alive();
      shown.insert(shown.begin(), alive.begin(), alive.end());
      for (const Tensor& x : shown) {
        const autograd::Edge edge = autograd::may_want_grad(x) ? autograd::edge_of(x) : autograd::Edge{};
        // What was differentiated inside already has no history that could be used again.
        if (edge.node && edge.node->number > begin_ && !edge.node->released) end.roots.push_back(x);
      }
    }
    end.live = end.roots.empty() ? referenced_storages(recording) : shown_storages(recording, alive);
    std::string differs;
    std::shared_ptr<const Segment> segment = find(end, differs);
    EndOfSegment plain{recording, begin_, {}, {}, {}, end.layouts};
    if (!segment && !end.roots.empty()) {
      plain.live = referenced_storages(recording);
      std::string ignored;
      if ((segment = find(plain, ignored))) {
        end.roots.clear();
        end.live = plain.live;
      }
    }
    if (!segment) segment = compile(recording, end, plain, break_reason, differs);
    const graph::RecordingPaused paused;
    segment->run(end);
    const std::lock_guard lock(state_.mutex);
    ++state_.report.runs;
  } else if (!break_reason.empty()) {
    state_.compile_empty(ordinal_, arguments_);
  }
  recording.clear();
  sharded_->clear();
  begin_ = autograd::next_number(0);
  ++ordinal_;
}

std::shared_ptr<const Segment> Frame::Call::compile(Recording& recording, EndOfSegment& end, const EndOfSegment& plain,
                                                    const std::string& break_reason, const std::string& differs) {
  const CompileOptions& options = state_.options;
  const BuildOptions build{options.joint, options.split, options.memory_budget};
  std::shared_ptr<Segment> segment;
  const size_t calls = recording.calls().size();
  try {
    is_tracing_gradients_ = true;
    segment = Segment::build(recording, end, build);
    is_tracing_gradients_ = false;
  } catch (const StateError&) {
    is_tracing_gradients_ = false;
    if (end.roots.empty()) throw;
    // Gradients go through the ops, one by one, as they were recorded.
    recording.truncate(calls);
    end.roots.clear();
    end.live = plain.live;
    segment = Segment::build(recording, end, build);
  }
  recording.truncate(calls);
  const State::Made made = state_.make_programs(
      segment, ordinal_, arguments_, {sources_of(recording, *segment, arguments_, options), segment->texts()}, differs,
      break_reason);
  if (options.agree && made != State::Made::kResized)
    check_agreement(*options.agree, segment->text(), options.agree_on_sizes != nullptr);
  if (made != State::Made::kUncompiled) {
    const std::lock_guard lock(state_.mutex);
    if (made == State::Made::kCompiled) state_.note_guards(*segment, recording, arguments_);
    state_.segments.emplace(state_.segments.begin(), ordinal_, segment);
    if (state_.segments.size() > kMostSizes) state_.segments.pop_back();
  }
  return segment;
}

std::vector<Tensor> Frame::call(const std::vector<Argument>& arguments, Body body) {
  if (Recording::current()) return body();  // part of what is being recorded
  wait_for_arguments(arguments);
  check_dynamic_dims(state_->options, arguments);
  if (state_->options.whole_graph) return call_whole(arguments, body);
  Call call(*state_, arguments);
  Recording recording(call);
  std::vector<Tensor> results;
  {
    ShardedSeen sharded(recording);
    call.watch(sharded);
    const graph::RecordingScope scope(recording);
    results = body();
    call.run(recording, "");
  }
  for (const Tensor& result : results) {
    if (const Tensor& part = part_of(result); part.defined() && part.is_traced()) part.need_bytes("a result");
  }
  return results;
}

}  // namespace compiled

Tensor constant(const Tensor& x) {
  if (graph::Recording* recording = graph::Recording::current()) recording->mark_constant(x);
  return x;
}

int64_t late_item(const Tensor& x) {
  CHORALE_CHECK(x.elems() == 1 && x.dtype() == DType::kI64, "[late_item] takes one number of i64, not ", x.dtype(),
                x.sizes());
  graph::Recording* recording = graph::Recording::current();
  // A copy: what is written to x later is another number.
  const int64_t stand_in = recording && recording->is_strict() ? recording->late_item(clone(detach(x))) : 0;
  return stand_in != 0 ? stand_in : x.item<int64_t>();
}

void break_graph(const std::string& what) {
  if (graph::Recording* recording = graph::Recording::current()) recording->need_values(what);
}

void set_device(Device device) {
  break_graph("set_device: tensors are made on another device from here on");
  op::set_creation_device(device);
}

}  // namespace chorale
