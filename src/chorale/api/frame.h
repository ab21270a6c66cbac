// What the files of compiled functions share.
#pragma once

#include <map>
#include <mutex>
#include <set>

#include "chorale/api/compile.h"
#include "chorale/api/family.h"
#include "chorale/api/shared_sizes.h"
#include "chorale/base/env_number.h"

namespace chorale::compiled {

// Sizes that are ready to run, of all graphs of a function; of more, those that were not used for longest go.
inline constexpr size_t kMostSizes = 256;

struct Frame::State {
  CompileOptions options;
  const bool explains = config::is_on("CHORALE_EXPLAIN", false);  // when it ends
  std::mutex mutex;
  // The segments and their places in the function; what was used last comes first.
  std::vector<std::pair<size_t, std::shared_ptr<const Segment>>> segments;
  std::map<size_t, int> per_ordinal;               // compilations
  std::vector<std::shared_ptr<Variant>> variants;  // whole graphs; what was used last comes first
  struct Known {
    std::unique_ptr<Family> family;
    size_t first_graph = 0;  // its first one in the report
  };
  std::vector<Known> families;
  SeenSizes seen;               // by all ranks
  std::set<size_t> empty_ones;  // stretches without any op that were compiled, by their place in the function
  Report report;

  // Makes programs for what was just traced: those of the same graph at other sizes, or new ones. Where there are as
  // many as allowed it runs op by op, and is not to be kept. `guards`: what its symbols stand for.
  enum class Made : uint8_t { kCompiled, kResized, kUncompiled };
  Made make_programs(const std::shared_ptr<Segment>& segment, size_t ordinal, const std::vector<Argument>& arguments,
                     Family::Example example, const std::string& differs, const std::string& break_reason,
                     std::vector<std::string>* guards = nullptr);
  // The same for graphs with late sizes, from traces with two stand-ins; gives the guards of its symbols.
  std::vector<std::string> make_late_programs(const std::shared_ptr<Segment>& segment, const Family::Example& first,
                                              Family::Example example, const std::string& differs);
  // A stretch without any op is compiled like others: ranks meet there.
  void compile_empty(size_t ordinal, const std::vector<Argument>& arguments);
  // What follows from symbols that were marked, from traces that do not run.
  void teach(Family& family, const std::vector<Family::Example>& examples);
  bool is_full(size_t ordinal) const;
  void note_uncompiled(const std::string& differs);
  void note_compiled(const Segment& segment, const Family& family, const std::string& reason);
  // Notes the guards of a stretch of a segmented function.
  void note_guards(const Segment& segment, const graph::Recording& recording, const std::vector<Argument>& arguments);
};

// The argument that a recorded tensor is, or null.
const Argument* argument_of(const std::vector<Argument>& arguments, const Tensor& handle);
// What was said of arguments must fit them.
void check_dynamic_dims(const CompileOptions& options, const std::vector<Argument>& arguments);
// A result of a collective that was begun outside is waited for: graphs take tensors.
void wait_for_arguments(const std::vector<Argument>& arguments);
// What the options say of a dimension of an argument.
Mark mark_of(const CompileOptions& options, size_t argument, int64_t dim, int64_t dims);
// Numbers from outside that graphs may depend on.
std::vector<SizeSource> sources_of(const graph::Recording& recording, const Segment& segment,
                                   const std::vector<Argument>& arguments, const CompileOptions& options);

// One call of a compiled function: decides what happens when a value is asked for.
class Frame::Call : public graph::RecordingOwner {
 public:
  Call(State& state, const std::vector<Argument>& arguments);
  bool run_now(graph::Recording& recording, const std::string& reason) override;
  std::string why_not(const std::string& reason) const override;
  bool guards_managed() const override { return state_.options.guard_managed; }
  uint64_t clock() override;
  uint64_t region() override;
  // Runs what was recorded and begins anew.
  void run(graph::Recording& recording, const std::string& break_reason);
  // Where the sharded tensors of its recording are written down.
  void watch(ShardedSeen& sharded) { sharded_ = &sharded; }

 protected:
  std::shared_ptr<const Segment> find(const EndOfSegment& end, std::string& reason);
  std::shared_ptr<const Segment> compile(graph::Recording& recording, EndOfSegment& end, const EndOfSegment& plain,
                                         const std::string& break_reason, const std::string& differs);

  State& state_;
  const std::vector<Argument>& arguments_;
  ShardedSeen* sharded_ = nullptr;
  uint64_t begin_;
  size_t ordinal_ = 0;
  bool is_tracing_gradients_ = false;
};

}  // namespace chorale::compiled
