// What the files of compiled functions share.
#pragma once

#include <map>
#include <mutex>

#include "chorale/api/compile.h"

namespace chorale::compiled {

struct Frame::State {
  CompileOptions options;
  std::mutex mutex;
  std::vector<std::pair<size_t, std::shared_ptr<const Segment>>> segments;  // with their place in the function
  std::map<size_t, int> per_ordinal;
  std::vector<std::shared_ptr<Variant>> variants;  // whole graphs
  Report report;

  void note_compiled(const Segment& segment, const std::string& reason);
};

// One call of a compiled function: decides what happens when a value is asked for.
class Frame::Call : public graph::RecordingOwner {
 public:
  explicit Call(State& state);
  bool run_now(graph::Recording& recording, const std::string& reason) override;
  std::string why_not(const std::string& reason) const override;
  uint64_t clock() override;
  uint64_t region() override;
  // Runs what was recorded and begins anew.
  void run(graph::Recording& recording, const std::string& break_reason);

 protected:
  std::shared_ptr<const Segment> find(const EndOfSegment& end, std::string& reason);
  std::shared_ptr<const Segment> compile(graph::Recording& recording, EndOfSegment& end, const EndOfSegment& plain,
                                         const std::string& break_reason, const std::string& differs);

  State& state_;
  uint64_t begin_;
  size_t ordinal_ = 0;
  bool is_tracing_gradients_ = false;
};

}  // namespace chorale::compiled
