#include "chorale/graph/tracer.h"

#include "chorale/base/error.h"
#include "chorale/graph/recording.h"
#include "chorale/op/index.h"

namespace chorale::graph {
namespace {

// Bytes for an op that is run at once.
void need_operands(std::span<const Tensor> tensors, const std::string& reason) {
  for (const Tensor& x : tensors) {
    if (x.defined() && x.is_traced()) x.need_bytes(reason.c_str());
  }
}

// Runs an op that cannot be recorded, behind what was.
template <class Run>
void run_at_once(Recording& recording, const op::OpDef& op, const char* why, std::span<const Tensor> in, Run&& run) {
  const std::string reason = concat(op.name, ": ", why);
  recording.need_values(reason);
  need_operands(in, reason);
  const RecordingPaused paused;
  run();
}

}  // namespace

void Tracer::call(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out,
                  op::Rest) {
  Recording* recording = Recording::current();
  if (!recording) return runs_.all().call(op, in, attrs, out);
  const char* why = Recording::why_not_recordable(op, in, attrs);
  if (why && &op == &op::kNonzero && recording->late_nonzero(op, in, attrs, out)) return;
  if (why) {
    return run_at_once(*recording, op, why, in, [&] { runs_.all().call(op, in, attrs, out); });
  }
  recording->call(op, in, attrs, out);
}

void Tracer::call_into(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out,
                       op::Rest) {
  Recording* recording = Recording::current();
  if (!recording) return runs_.all().call_into(op, in, attrs, out);
  if (const char* why = Recording::why_not_recordable(op, in, attrs, out)) {
    return run_at_once(*recording, op, why, in, [&] {
      need_operands(out, op.name);
      runs_.all().call_into(op, in, attrs, out);
    });
  }
  recording->call_into(op, in, attrs, out);
}

Tensor Tracer::draw(Generator& generator, int64_t words, Device device, op::Rest) {
  Recording* recording = Recording::current();
  return recording ? recording->draw(generator, words, device, runs_) : runs_.all().draw(generator, words, device);
}

void Tracer::set_data(const Tensor& x, const Tensor& other, op::Rest) {
  if (Recording* recording = Recording::current()) {
    recording->need_values("set_data: a tensor gets other bytes");
    need_operands({&x, 1}, "set_data");
    need_operands({&other, 1}, "set_data");
  }
  runs_.all().set_data(x, other);
}

bool Tracer::may_reuse_memory() const { return Recording::current() == nullptr; }

Tracer& tracer() {
  static Tracer tracer(*op::default_stack().at(op::Place::kBottom));
  return tracer;
}

}  // namespace chorale::graph
