// Compiled functions: segmented calls.
#include "chorale/api/frame.h"

#include <algorithm>
#include <set>

#include "chorale/api/agreement.h"
#include "chorale/autograd/autograd.h"
#include "chorale/autograd/checkpoint.h"
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/base/log.h"

namespace chorale {
namespace compiled {

using graph::Recording;

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
  }
  for (const std::string& guard : guards) all += concat("guard: ", guard, "\n");
  for (const std::string& reason : recompiles) all += concat("recompiled: ", reason, "\n");
  return all;
}

Frame::Frame(CompileOptions options) : state_(std::make_unique<State>()) {
  state_->options = std::move(options);
  if (!state_->options.backend) state_->options.backend = joint_eager();
}
Frame::~Frame() {
  if (config::env("CHORALE_EXPLAIN") == "1") {
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
  state_->report = {};
}

void Frame::State::note_compiled(const Segment& segment, const std::string& reason) {
  ++report.compiles;
  for (size_t k = 0; k < segment.pieces().size(); ++k) {
    const Segment::Piece& piece = segment.pieces()[k];
    Report::Compiled made;
    made.text = graph::print(piece.forward.graph);
    made.ops = piece.forward.graph.nodes.size();
    made.bucket_bytes = piece.bucket_bytes;
    made.bucket = piece.bucket;
    made.arena_bytes = piece.forward_program ? piece.forward_program->plan().arena_bytes : 0;
    made.break_reason = segment.is_split()
                            ? concat("DDPOptimizer: bucket ", segment.pieces().size() - 1 - k, " of ",
                                     segment.pieces().size(), ", ", piece.bucket_bytes, " bytes of parameters")
                            : reason;
    report.graphs.push_back(std::move(made));
  }
}

// ---- one call

Frame::Call::Call(State& state) : state_(state), begin_(autograd::next_number(0)) {}

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
  return concat("[compile] a value was asked for while a whole graph is traced (", reason,
                "): the graph has none yet. Return the tensor and look at it outside, or compile without whole_graph");
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
  const std::lock_guard lock(state_.mutex);
  for (const auto& [ordinal, segment] : state_.segments) {
    std::string differs = segment->mismatch(end);
    if (differs.empty()) return segment;
    if (ordinal == ordinal_) reason = std::move(differs);
  }
  return nullptr;
}

void Frame::Call::run(Recording& recording, const std::string& break_reason) {
  if (!recording.calls().empty()) {
    const CompileOptions& options = state_.options;
    EndOfSegment end{recording, begin_};
    const std::vector<Tensor> alive = recording.live_tensors();
    if (options.joint) {
      for (const Tensor& x : alive) {
        const autograd::Edge edge = autograd::may_want_grad(x) ? autograd::edge_of(x) : autograd::Edge{};
        // What was differentiated inside already has no history that could be used again.
        if (edge.node && edge.node->number > begin_ && !edge.node->released) end.roots.push_back(x);
      }
    }
    end.live = end.roots.empty() ? referenced_storages(recording) : shown_storages(recording, alive);
    std::string differs;
    std::shared_ptr<const Segment> segment = find(end, differs);
    EndOfSegment plain{recording, begin_, {}, {}, {}};
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
  }
  recording.clear();
  begin_ = autograd::next_number(0);
  ++ordinal_;
}

std::shared_ptr<const Segment> Frame::Call::compile(Recording& recording, EndOfSegment& end, const EndOfSegment& plain,
                                                    const std::string& break_reason, const std::string& differs) {
  const CompileOptions& options = state_.options;
  BuildOptions build{options.backend, options.joint, options.split, options.memory_budget};
  bool keep = true;
  {
    const std::lock_guard lock(state_.mutex);
    int& variants = state_.per_ordinal[ordinal_];
    keep = variants < options.most_variants;
    if (keep && variants > 0) {
      state_.report.recompiles.push_back(differs);
      log_info(concat("[compile] ", options.name, " is compiled again: ", differs));
    }
    if (!keep) {
      ++state_.report.uncompiled;
      build.backend = joint_eager();
    } else {
      ++variants;
    }
  }
  std::shared_ptr<const Segment> segment;
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
  if (options.agree) check_agreement(*options.agree, segment->text());
  if (keep) {
    const std::lock_guard lock(state_.mutex);
    state_.segments.emplace_back(ordinal_, segment);
    state_.note_compiled(*segment, break_reason);
  }
  return segment;
}

std::vector<Tensor> Frame::call(const std::vector<Argument>& arguments,
                                const std::function<std::vector<Tensor>()>& body) {
  if (Recording::current()) return body();  // part of what is being recorded
  if (state_->options.whole_graph) return call_whole(arguments, body);
  Call call(*state_);
  Recording recording(call);
  std::vector<Tensor> results;
  {
    const graph::RecordingScope scope(recording);
    results = body();
    call.run(recording, "");
  }
  for (const Tensor& result : results) {
    if (result.defined() && result.is_traced()) result.need_bytes("a result");
  }
  return results;
}

}  // namespace compiled

Tensor constant(const Tensor& x) {
  if (graph::Recording* recording = graph::Recording::current()) recording->mark_constant(x);
  return x;
}

void break_graph(const std::string& what) {
  if (graph::Recording* recording = graph::Recording::current()) recording->need_values(what);
}

}  // namespace chorale
