#include "chorale/api/replay.h"

#include <algorithm>
#include <optional>

#include "chorale/api/api.h"
#include "chorale/base/error.h"
#include "chorale/device/program.h"
#include "chorale/device/stream.h"

namespace chorale {

namespace {

// Images in this order stay in it: convolutions are chosen by it.
bool has_channels_last(const Tensor& x) { return x.dims() > 2 && !x.is_contiguous() && x.is_channels_last(); }

}  // namespace

// Inputs of one form, and what was recorded for them.
struct Replayed::Form {
  bool fits(const std::vector<Tensor>& in) const {
    return std::equal(in.begin(), in.end(), inputs.begin(), inputs.end(), [](const Tensor& a, const Tensor& b) {
      return a.sizes() == b.sizes() && a.dtype() == b.dtype() && a.device() == b.device() &&
             has_channels_last(a) == has_channels_last(b);
    });
  }
  std::vector<Tensor> inputs, results;  // where the program reads and writes
  Stream stream;                        // on which it was recorded
  std::optional<Program> program;
};

Replayed::Replayed(Function function) : function_(std::move(function)) {}
Replayed::~Replayed() = default;

Replayed::Form& Replayed::form_of(const std::vector<Tensor>& in) {
  for (const auto& form : forms_) {
    if (form->fits(in)) return *form;
  }
  auto made = std::make_unique<Form>();
  const Device device = in[0].device();
  for (const Tensor& x : in) {
    CHORALE_CHECK(x.device() == device, "[Replayed] inputs lie on one device, found ", device, " and ", x.device(),
                  "; move them with to()");
    made->inputs.push_back(has_channels_last(x)
                               ? Tensor::empty_strided(x.sizes(), channels_last_strides(x.sizes()), x.dtype(), device)
                               : empty(x.sizes(), x.dtype(), device));
  }
  made->stream = make_stream(device);
  return *forms_.emplace_back(std::move(made));
}

void Replayed::record(Form& form) {
  const StreamScope scope(form.stream);
  Recording recording(form.stream);
  form.results = function_(form.inputs);
  form.program.emplace(recording.finish());
  ++recordings_;
}

std::vector<Tensor> Replayed::inputs_like(const std::vector<Tensor>& in) const {
  for (const auto& form : forms_) {
    if (form->program && form->fits(in)) return form->inputs;
  }
  return {};
}

std::vector<Tensor> Replayed::operator()(const std::vector<Tensor>& in) {
  CHORALE_CHECK(!in.empty() && std::all_of(in.begin(), in.end(), [](const Tensor& x) { return x.defined(); }),
                "[Replayed] expected at least one input, each defined");
  const Device device = in[0].device();
  if (device.type != DeviceType::kCuda) return function_(in);
  const size_t known = forms_.size();
  Form& form = form_of(in);
  if (forms_.size() > known) {
    // The function runs once on the stream that is recorded next, so that what belongs to a stream (plans, workspaces)
    // is made now.
    synchronize(device);
    std::vector<Tensor> results;
    {
      const StreamScope scope(form.stream);
      results = function_(in);
    }
    synchronize(device);
    return results;
  }
  if (!form.program) record(form);
  for (size_t i = 0; i < in.size(); ++i) {
    if (in[i].is(form.inputs[i])) continue;
    const NoGrad quiet;
    copy_(form.inputs[i], in[i]);
  }
  form.program->run(current_stream(device));
  ++replays_;
  return form.results;
}

}  // namespace chorale
