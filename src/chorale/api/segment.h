// A stretch of recorded calls, compiled: how it is recognised, built and run.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "chorale/api/sharded_trace.h"
#include "chorale/api/tape_cut.h"
#include "chorale/graph/functionalize.h"
#include "chorale/graph/pieces.h"
#include "chorale/graph/program.h"
#include "chorale/graph/split.h"
#include "chorale/graph/symbolic.h"

namespace chorale::compiled {

// What a backend is told of a graph besides the graph.
struct GraphInfo {
  bool is_backward = false;
  size_t piece = 0, pieces = 1;  // of the splitter
  size_t stretch = 0;            // which one of the function, counted from its beginning; breaks lie between them
};
// Makes a program of a graph. Called once for every forward graph when it is compiled, and for a backward graph when a
// gradient first needs it.
using Backend = std::function<std::shared_ptr<const graph::Program>(graph::Graph, const GraphInfo&)>;

struct BuildOptions {
  bool joint = true;  // gradients through one node per piece; else through the ops, one by one
  bool split = true;  // where a data-parallel module is active
  double memory_budget = 1;
};

// What tells one stretch from another.
struct SegmentKey {
  struct Outside {
    uint32_t tensor = 0, storage = 0;
    graph::Layout layout;
    bool wants_grad = false;
    bool compare_offset = false;  // several tensors look at its storage
    bool is_managed = false;      // its kind is compared, and nothing else (Recording::note_managed)
  };
  std::vector<graph::RecordedCall> calls;
  std::vector<Outside> outside;
  std::vector<uint32_t> live;             // storages whose contents are wanted
  std::vector<uint32_t> roots;            // tensors that gradients come to
  std::vector<std::vector<size_t>> tape;  // the shape of the cut tape
  std::vector<LayoutPtr> layouts;         // of sharded tensors
};

// Where the recording of a stretch ended.
struct EndOfSegment {
  const graph::Recording& recording;
  uint64_t begin = 0;              // the tape's clock when it began
  std::vector<Tensor> roots{};     // tensors of the recording that have a history in it
  std::vector<uint32_t> live{};    // storages whose contents are wanted
  std::vector<uint32_t> wanted{};  // tensors that are wanted as they are (whole graphs)
  std::vector<LayoutPtr> layouts{};
};

class Segment : public std::enable_shared_from_this<Segment> {
 public:
  // Makes the graphs. Traces the backward of what was recorded, at the end of the recording, where there are roots.
  // It runs once compile() or resize() has made its programs.
  static std::shared_ptr<Segment> build(graph::Recording& recording, const EndOfSegment& end,
                                        const BuildOptions& options);
  void compile(const Backend& backend, size_t stretch);
  // Gives back the memory that its programs keep between runs.
  void release() const;
  // Takes programs of the same graphs at other sizes.
  void resize(std::shared_ptr<const Segment> like);
  // What graphs with late sizes have (Note [Late sizes] in graph/recording.h). They run node by node.
  struct Late {
    std::vector<graph::SymbolicText> texts{};  // as texts()
    std::vector<int64_t> sizes{};              // by symbol; stand-ins of those that only running tells
    std::vector<size_t> symbols{};             // by late size: its symbol
  };
  void interpret(Late late) { late_ = std::move(late); }
  // Runs the backward graph of a piece; `sizes` are those that its forward found.
  void run_backward(size_t piece, std::span<const Tensor> in, std::span<Tensor> out,
                    std::span<const int64_t> sizes) const;
  // Empty when it fits; else what differs first.
  std::string mismatch(const EndOfSegment& end) const { return mismatch(end, outside_of(end.recording)); }
  std::string mismatch(const EndOfSegment& end, const std::vector<SegmentKey::Outside>& outside) const;
  static std::vector<SegmentKey::Outside> outside_of(const graph::Recording& recording);

  // Runs forward.
  struct Bindings {
    std::vector<Tensor> outside;                     // by outside tensor of the key
    std::vector<std::vector<autograd::Edge>> exits;  // per piece; undefined where they lead to an earlier piece
    std::vector<Tensor> free{};                      // by result that is wanted: memory that it may lie in, if any
  };
  struct Results {
    std::vector<Tensor> live, wanted;
    std::vector<base::Intrusive<autograd::Node>> nodes;  // by piece
    // Each is called once live tensors lie where they stay: from then on a write to what backward needs is an error.
    std::vector<std::function<void()>> settle;
  };
  // Where gradients leave what was just recorded, by piece; no edge where they go to an earlier piece.
  std::vector<std::vector<autograd::Edge>> exits(const EndOfSegment& end) const;
  // Gives a result its history.
  void set_history(const Results& results, size_t root, const Tensor& x) const;
  Results run(const Bindings& bindings) const;
  // Where running is nothing but its one program: which of the tensors from outside is each input of it, and which of
  // its outputs is each wanted result.
  struct Direct {
    std::shared_ptr<const graph::Program> program;
    std::vector<size_t> inputs, wanted;
  };
  std::optional<Direct> direct() const;
  // Whether a wanted result may be given memory: one that a program makes, in row-major order.
  bool lies_in_order(size_t wanted) const;
  // Runs what was just recorded: storages that are live get their bytes, and roots their new history.
  Results run(const EndOfSegment& end) const;

  const SegmentKey& key() const { return key_; }
  const graph::Graph& graph() const { return functional_.graph; }
  struct Piece {
    graph::Part forward, backward;
    std::shared_ptr<const graph::Program> forward_program;
    std::vector<uint32_t> saved;                        // values that backward reads, tangents apart
    std::vector<uint32_t> tangents;                     // values, by root of the piece
    std::vector<uint32_t> gradients;                    // values, by exit; kNone where none arrives
    std::vector<TensorSpec> outputs;                    // by root
    std::vector<std::vector<bool>> reached_by;          // by exit: the tangents that its gradient depends on
    std::vector<std::optional<Whole>> tangent_wholes;   // by root: how its gradient is placed where that is sharded
    std::vector<std::optional<Whole>> gradient_wholes;  // by exit
    struct Exit {
      size_t piece = SIZE_MAX, root = SIZE_MAX;
    };
    std::vector<Exit> exits;
    size_t last_call = 0;                         // behind the last one of its forward pass
    size_t backward_begin = 0, backward_end = 0;  // calls of its backward pass
    std::vector<bool> again{};  // by node of the whole graph: those of its forward pass that its backward repeats
    int64_t bucket_bytes = 0;
    std::vector<Tensor> bucket;  // parameters, as charged
    std::vector<std::string> bucket_names;
    int extended = 0;  // calls that the bucket took beyond its cap (graph::Bucket)
  };
  const std::vector<Piece>& pieces() const { return pieces_; }
  const std::vector<std::pair<size_t, size_t>>& root_places() const { return root_places_; }
  bool is_split() const { return pieces_.size() > 1; }
  // Says of what a data-parallel module was cut into: how many buckets, and with CHORALE_DEBUG=INFO what is in each.
  void log_buckets(const std::string& name) const;
  // Forward graphs, then backward graphs, by piece, as they were traced: what is computed again is decided later, by
  // how large things are.
  const std::vector<std::string>& texts() const { return texts_; }
  // The forward ones, one behind the other.
  std::string text() const;
  std::shared_ptr<const graph::Program> backward_program(size_t piece) const;
  const std::vector<Generator*>& generators() const { return functional_.generators; }

 private:
  // Says where each input of the graph comes from.
  void place_inputs(const graph::Recording& recording, const std::vector<std::vector<uint32_t>>& tangent_of);
  // Makes the graphs of the pieces from the whole one.
  void cut();
  void cut_backward(Piece& piece) const;
  void cut_forward();
  // Which nodes of its forward pass the backward of a piece repeats.
  std::vector<bool> choose_again(size_t piece, double memory_budget) const;
  // The calls of a piece's forward pass: from the first to behind the last one.
  std::pair<size_t, size_t> forward_calls(size_t piece) const;
  void run_forward(size_t piece, std::span<const Tensor> in, std::span<Tensor> out, std::vector<int64_t>& sizes) const;

  SegmentKey key_;
  graph::Functional functional_;
  size_t live_ = 0, wanted_ = 0;  // how many outputs of the graph are such
  // For each result that is wanted, its place among the outputs of the only piece, or SIZE_MAX.
  std::vector<size_t> wanted_places_;
  std::vector<size_t> input_places_;  // by input of the graph: its place among those from outside, or SIZE_MAX
  std::vector<Tensor> own_inputs_;    // by input: what gradients alone read, a group or a constant
  struct LateValue {
    uint32_t value;
    int64_t dim;
  };
  std::vector<LateValue> late_values_;
  std::optional<Late> late_;
  std::vector<std::string> texts_;
  std::vector<Piece> pieces_;
  std::optional<int64_t> cap_;  // of the buckets of the data-parallel module that was active
  std::vector<std::pair<size_t, size_t>> root_places_;
  Backend backend_;
  size_t stretch_ = 0;
  std::shared_ptr<const Segment> like_;  // the one whose programs it takes, at other sizes
  mutable std::mutex mutex_;
  mutable std::vector<std::shared_ptr<const graph::Program>> backward_programs_;
};

}  // namespace chorale::compiled
