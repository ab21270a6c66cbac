#include "chorale/graph/program.h"

#include <algorithm>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/base/generator.h"
#include "chorale/device/program.h"
#include "chorale/device/stream.h"
#include "chorale/graph/stripes.h"
#include "chorale/kernel/kernel_maker.h"
#include "chorale/op/collective.h"
#include "chorale/op/copy.h"
#include "chorale/op/kernels.h"
#include "chorale/tensor/device_copy.h"
#include "chorale/trace/trace.h"

namespace chorale::graph {
namespace {

// A tensor whose pointer is set later.
Tensor bare(const Value& value) { return stand_in(value); }

int64_t place_in(const Value& value, int64_t elements) { return elements * static_cast<int64_t>(size_of(value.dtype)); }

void draw_into(const Tensor& stretch, Generator& generator, int64_t words) {
  const RandomStream stream = generator.take(words);
  if (!stretch.impl()->data) return;
  const bool on_host = stretch.device() == kCpu;
  const Tensor host = on_host ? stretch : empty_pinned({2}, DType::kI64, stretch.device());
  auto* place = static_cast<int64_t*>(host.impl()->data);
  place[0] = static_cast<int64_t>(stream.seed);
  place[1] = static_cast<int64_t>(stream.offset);
  if (!on_host) copy_between_devices(host, stretch);
}

}  // namespace

// Operands with addresses, for one run at a time.
struct Program::Instance {
  struct Step {
    enum class Kind : uint8_t { kKernel, kFused, kDraw, kBody, kStart, kWait } kind = Kind::kKernel;
    kernel::Kernel kernel = nullptr;
    const op::OpDef* row = nullptr;
    const kernel::Pointwise* pointwise = nullptr;
    Device device;
    Attrs attrs;
    std::vector<Tensor> in, out;
    FusedKernel fused;
    std::shared_ptr<Program> body;
    std::string name;  // for traces
    uint32_t generator = 0;
    int64_t words = 0;
  };
  struct Bound {  // a pointer that follows an input's or an output's
    Tensor::Impl* impl;
    int64_t offset;
    // The CPU's kernels look at pointers alone; other devices have kernels that make views of their operands.
    void lie_in(const Tensor& memory) const {
      impl->data = static_cast<std::byte*>(memory.raw()) + offset;
      if (impl->device == kCpu) return;
      impl->storage = memory.storage();
      const auto elem = static_cast<int64_t>(size_of(impl->dtype));
      impl->offset = (memory.offset() * static_cast<int64_t>(memory.elem_bytes()) + offset) / elem;
    }
  };
  // A kept instance keeps nobody's memory.
  void let_go() const {
    for (const auto* const all : {&of_input, &of_output}) {
      for (const std::vector<Bound>& list : *all) {
        for (const Bound& bound : list) {
          if (bound.impl->device != kCpu) bound.impl->storage = {};
        }
      }
    }
  }
  // Gives all its memory to what is recorded.
  bool hand_over() const {
    const auto may_go = [](const OnDevice& on) {
      return on.stream.device == kCpu || ::chorale::Recording::is_open_on(on.stream);
    };
    return std::all_of(devices.begin(), devices.end(), may_go) &&
           std::all_of(devices.begin(), devices.end(), [](const OnDevice& on) {
             return on.stream.device == kCpu || !on.arena.defined() ||
                    ::chorale::Recording::hand_over(on.arena.impl()->data, on.stream);
           });
  }
  struct OnDevice {
    Stream stream;  // on which its memory was taken, and may be used again at once
    Tensor arena;
  };
  std::vector<OnDevice> devices;
  std::vector<Tensor> tensors;  // by value
  std::vector<Tensor> others;   // views of values, for writes
  std::vector<std::vector<Bound>> of_input, of_output;
  std::vector<Step> steps;
  struct GroupUse {  // an operand that is the input itself, not its bytes
    size_t step, operand, input;
  };
  std::vector<GroupUse> groups;

  static void run_step(Step& step, std::span<Generator* const> generators);
  // Collectives in flight that the steps have not waited for: none is left when the memory is used again.
  void wait_for_all() noexcept {
    for (Step& step : steps) {
      if (step.kind != Step::Kind::kStart || !is_pending(step.out[0])) continue;
      try {
        wait_for(step.out[0]);
      } catch (const std::exception&) {  // the group is broken: nothing more comes, and the caller has been told
      }
      step.out[0].impl()->extension = nullptr;
    }
  }
};

Program::Program(Graph graph, const FusedKernels& fused, Resize resize)
    : graph_(std::move(graph)),
      plan_(plan_memory(graph_, fused != nullptr)),
      fused_(fused),
      resize_(std::move(resize)) {
  for (const Value& value : graph_.values) {
    if (value.device.type != DeviceType::kNull &&
        std::find(devices_.begin(), devices_.end(), value.device) == devices_.end())
      devices_.push_back(value.device);
  }
  for (const Output& output : graph_.outputs) {
    const Value& value = graph_.values[output.value];
    is_in_order_.push_back(value.strides == contiguous_strides(value.sizes));
  }
  auto first = make();
  kernels_ = first->steps.size();
  idle_.push_back(std::move(first));
}
Program::~Program() = default;

void Program::release() const {
  const std::lock_guard lock(mutex_);
  idle_.clear();
}

std::shared_ptr<const Program> Program::at_other_sizes(Graph graph) const {
  return resize_ ? resize_(std::move(graph)) : std::make_shared<const Program>(std::move(graph));
}

std::unique_ptr<Program::Instance> Program::make() const {
  auto made = std::make_unique<Instance>();
  Instance& instance = *made;
  instance.of_input.resize(graph_.inputs.size());
  instance.of_output.resize(graph_.outputs.size());
  for (const Device device : devices_) {
    Tensor arena;
    if (plan_.arena_bytes > 0) arena = Tensor::empty({plan_.arena_bytes}, DType::kU8, device);
    instance.devices.push_back({current_stream(device), std::move(arena)});
  }
  const auto bind = [&](const Tensor& tensor, const Plan::Place& place) {
    if (tensor.elems() == 0 || tensor.device().type == DeviceType::kNull) return;
    if (place.in == Plan::In::kArena) {
      const auto found = std::find(devices_.begin(), devices_.end(), tensor.device());
      const Tensor& arena = instance.devices[static_cast<size_t>(found - devices_.begin())].arena;
      Instance::Bound{tensor.impl(), place.offset}.lie_in(arena);
    } else if (place.in == Plan::In::kInput) {
      instance.of_input[place.index].push_back({tensor.impl(), place.offset});
    } else if (place.in == Plan::In::kOutput) {
      instance.of_output[place.index].push_back({tensor.impl(), place.offset});
    }
  };
  for (uint32_t v = 0; v < graph_.values.size(); ++v) {
    instance.tensors.push_back(bare(graph_.values[v]));
    bind(instance.tensors.back(), plan_.places[v]);
  }
  const auto copy = [&](const Tensor& from, const Tensor& to) {
    Instance::Step step;
    step.row = &op::kTo;
    step.kernel = op::find_kernel(op::kTo, to.device().type);
    step.device = to.device();
    step.attrs = op::CopyAttrs{to.dtype()};
    step.in = {from};
    step.out = {to};
    step.name = "copy";
    if (step.kernel) instance.steps.push_back(std::move(step));
  };
  for (size_t n = 0; n < graph_.nodes.size(); ++n) {
    const Node& node = graph_.nodes[n];
    if (plan_.is_view[n] && !is_wait(node)) continue;
    if (node.kind == Node::Kind::kWrite) {
      const Tensor& whole = instance.tensors[node.out[0]];
      if (!plan_.writes_over[n]) copy(instance.tensors[node.in[0]], whole);
      Plan::Place place = plan_.places[node.out[0]];
      const Value& value = graph_.values[node.out[0]];
      place.offset += place_in(value, node.region.offset);
      instance.others.push_back(bare({node.region.sizes, node.region.strides, value.dtype, value.device}));
      bind(instance.others.back(), place);
      copy(instance.tensors[node.in[1]], instance.others.back());
      continue;
    }
    Instance::Step step;
    for (const uint32_t x : node.in) step.in.push_back(x == kNone ? Tensor{} : instance.tensors[x]);
    for (const uint32_t y : node.out) step.out.push_back(instance.tensors[y]);
    step.device = graph_.values[node.out[0]].device;
    step.attrs = node.attrs;
    step.name = node.name();
    switch (node.kind) {
      case Node::Kind::kDraw:
        step.kind = Instance::Step::Kind::kDraw;
        step.generator = node.generator;
        step.words = node.words;
        break;
      case Node::Kind::kFused:
      case Node::Kind::kBlock:
        step.fused = fused_ ? fused_(node) : FusedKernel{};
        step.kind = step.fused ? Instance::Step::Kind::kFused : Instance::Step::Kind::kBody;
        if (!step.fused) step.body = std::make_shared<Program>(*node.body);
        if (step.fused && plan_.rooms[n] != Plan::kNoRoom) {
          const int64_t bytes = stripe_room_bytes(node);
          step.out.push_back(bare({{bytes}, {1}, DType::kU8, step.device}));
          bind(step.out.back(), {Plan::In::kArena, 0, plan_.rooms[n]});
        }
        break;
      default:
        step.row = node.op;
        step.kernel = op::find_kernel(*node.op, step.device.type);
        step.pointwise = node.op->pointwise ? &*node.op->pointwise : nullptr;
        CHORALE_CHECK_STATE(step.kernel, "[", node.op->name, "] has no kernel for ", step.device);
        if (is_start(node)) step.kind = Instance::Step::Kind::kStart;
        if (is_wait(node)) step.kind = Instance::Step::Kind::kWait;
        if (is_collective(node)) {
          const auto group = std::find(graph_.inputs.begin(), graph_.inputs.end(), node.in[1]);
          CHORALE_CHECK_STATE(group != graph_.inputs.end(), "[", node.op->name,
                              "] its group was computed inside of the graph; make it outside, with group_tensor()");
          instance.groups.push_back({instance.steps.size(), 1, static_cast<size_t>(group - graph_.inputs.begin())});
        }
    }
    instance.steps.push_back(std::move(step));
  }
  for (uint32_t o = 0; o < graph_.outputs.size(); ++o) {
    if (!plan_.copied[o]) continue;
    const Output& output = graph_.outputs[o];
    const Value& value = output.into == kNone ? graph_.values[output.value] : graph_.values[graph_.inputs[output.into]];
    instance.others.push_back(bare(value));
    bind(instance.others.back(),
         {output.into == kNone ? Plan::In::kOutput : Plan::In::kInput, output.into == kNone ? o : output.into, 0});
    copy(instance.tensors[output.value], instance.others.back());
  }
  for (size_t i = 0; i < instance.steps.size(); ++i) {
    instance.steps[i].name = concat("kernel ", i, ": ", instance.steps[i].name);
  }
  return made;
}

void Program::Instance::run_step(Step& step, std::span<Generator* const> generators) {
  switch (step.kind) {
    case Step::Kind::kKernel:
      step.kernel({step.in, step.out, step.attrs, current_stream(step.device), step.pointwise, step.row});
      break;
    case Step::Kind::kStart: {
      Tensor::Impl& out_impl = *step.out[0].impl();
      void* const data = out_impl.data;
      step.kernel({step.in, step.out, step.attrs, Stream{step.device}, nullptr});
      out_impl.data = data;  // the plan knows when it may be read
      break;
    }
    case Step::Kind::kWait:
      step.kernel({step.in, step.out, step.attrs, Stream{step.device}, nullptr});
      step.in[0].impl()->extension = nullptr;
      break;
    case Step::Kind::kFused:
      step.fused(step.in, step.out);
      break;
    case Step::Kind::kDraw:
      draw_into(step.out[0], *generators[step.generator], step.words);
      break;
    case Step::Kind::kBody: {
      std::vector<Tensor> results(step.out.size());
      step.body->run(step.in, generators, results);
      for (size_t i = 0; i < results.size(); ++i) {
        op::launch(op::kTo, step.device, {&results[i], 1}, op::CopyAttrs{results[i].dtype()}, {&step.out[i], 1});
      }
      break;
    }
  }
}

void Program::run_steps(Instance& instance, std::span<Generator* const> generators) {
  // However it ends: memory that other ranks write to may not be given away.
  struct WaitAtEnd {
    Instance& instance;
    ~WaitAtEnd() {
      if (!instance.groups.empty()) instance.wait_for_all();
    }
  } const at_end{instance};
  if (trace::enabled()) {
    for (Instance::Step& step : instance.steps) {
      const trace::Span span(step.name.c_str());
      Instance::run_step(step, generators);
    }
    return;
  }
  for (Instance::Step& step : instance.steps) Instance::run_step(step, generators);
}

// Kernels that devices would compile one by one as they are reached.
void Program::make_kernels(Instance& instance) const {
  for (const Device device : devices_) {
    kernel::KernelMaker* const maker = kernel::find_kernel_maker(device.type);
    if (!maker) continue;
    maker->make_ahead(device, [&] {
      for (Instance::Step& step : instance.steps) {
        const bool has_kernel = step.kind == Instance::Step::Kind::kKernel || step.kind == Instance::Step::Kind::kFused;
        if (has_kernel && step.device == device && !(step.row && (step.row->dynamic || op::communicates(*step.row))))
          Instance::run_step(step, {});
      }
    });
  }
}

// One whose memory was taken on the current streams; null when there is none.
std::unique_ptr<Program::Instance> Program::take_idle() const {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(idle_.rbegin(), idle_.rend(), [](const std::unique_ptr<Instance>& one) {
    return std::all_of(one->devices.begin(), one->devices.end(), [](const Instance::OnDevice& on) {
      return on.stream.device == kCpu || on.stream == current_stream(on.stream.device);
    });
  });
  if (found == idle_.rend()) return nullptr;
  std::unique_ptr<Instance> instance = std::move(*found);
  idle_.erase(std::next(found).base());
  return instance;
}

void Program::run(std::span<const Tensor> in, std::span<Generator* const> generators, std::span<Tensor> out) const {
  CHORALE_INVARIANT(in.size() == graph_.inputs.size() && out.size() == graph_.outputs.size(), "a program got ",
                    in.size(), " inputs and ", out.size(), " outputs");
  // What a device is recorded with belongs to the recording (device/program.h): it takes over the memory of an instance
  // that is there, which is as large as all others together.
  const bool is_recorded = std::any_of(devices_.begin(), devices_.end(), [](Device device) {
    return device != kCpu && ::chorale::Recording::is_open_on(current_stream(device));
  });
  std::unique_ptr<Instance> instance = take_idle();
  if (is_recorded && instance && !instance->hand_over()) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::exchange(instance, nullptr));
  }
  if (!instance) instance = make();
  for (size_t i = 0; i < in.size(); ++i) {
    for (const Instance::Bound& bound : instance->of_input[i]) bound.lie_in(in[i]);
  }
  for (size_t o = 0; o < out.size(); ++o) {
    const Output& output = graph_.outputs[o];
    if (output.into != kNone) continue;
    const Value& value = graph_.values[output.value];
    if (!out[o].defined()) {
      out[o] = is_in_order_[o] ? Tensor::empty(value.sizes, value.dtype, value.device)
                               : Tensor::empty_strided(value.sizes, value.strides, value.dtype, value.device);
    }
    for (const Instance::Bound& bound : instance->of_output[o]) bound.lie_in(out[o]);
  }
  for (const Instance::GroupUse& use : instance->groups) instance->steps[use.step].in[use.operand] = in[use.input];
  std::call_once(kernels_made_, [&] { make_kernels(*instance); });
  run_steps(*instance, generators);
  if (is_recorded) return;
  instance->let_go();
  const std::lock_guard lock(mutex_);
  idle_.push_back(std::move(instance));
}

}  // namespace chorale::graph
