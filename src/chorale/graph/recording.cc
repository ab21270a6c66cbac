#include "chorale/graph/recording.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/base/generator.h"
#include "chorale/graph/ir.h"
#include "chorale/graph/tracer.h"
#include "chorale/op/collective.h"
#include "chorale/op/copy.h"
#include "chorale/op/prepare.h"

namespace chorale::graph {
namespace {

constinit thread_local Recording* current_recording = nullptr;
std::atomic<uint32_t> recordings{0};

const TracedValue* traced_value(const Tensor& x) {
  return x.is_traced() ? static_cast<const TracedValue*>(x.extension()) : nullptr;
}

// A tensor whose storage has got its bytes since.
void show_bytes(const Tensor& x) {
  Tensor::Impl& impl = *x.impl();
  impl.extension = nullptr;
  if (impl.elems > 0) impl.data = impl.storage->data() + impl.offset * static_cast<int64_t>(size_of(impl.dtype));
}

}  // namespace

Layout layout_of(const Tensor& x) { return {x.sizes(), x.strides(), x.offset(), x.dtype()}; }

std::string TracedValue::why_no_bytes(const Tensor& tensor) const {
  return concat("a traced tensor (", tensor.dtype(), " ", tensor.sizes(), made_by ? concat(", made by ", made_by) : "",
                ") has no value: it was recorded and never run, because the call that recorded it failed; let that "
                "call succeed, and return the tensor from it");
}
std::unique_ptr<TensorExtension> TracedValue::copy() const {
  auto other = std::make_unique<TracedValue>(recording, number);
  other->made_by = made_by;
  return other;
}

bool TracedValue::provide_bytes(const Tensor& tensor, const char* asked) {
  const base::Intrusive<Storage>& storage = tensor.storage();
  Recording* current = Recording::current();
  const bool is_here = current && current->number() == recording;
  if (is_here && (!storage->data() || current->is_pending(*storage) || current->is_strict())) {
    current->need_values(asked);  // `this` may be gone when it returns
  } else if (!storage->data() && tensor.elems() > 0) {
    return false;
  }
  if (tensor.extension()) show_bytes(tensor);
  return true;
}

Recording::Recording(RecordingOwner& owner) : owner_(owner), number_(++recordings) {}
Recording::~Recording() { clear(); }
Recording* Recording::current() { return current_recording; }

void Recording::clear() {
  for (const Tensor& x : std::exchange(hidden_, {})) {
    if (x.is_traced()) show_bytes(x);
  }
  calls_.clear();
  draws_.clear();
  late_sizes_.clear();
  host_reads_.clear();
  host_writes_.clear();
  region_ = 0;
  regions_ = 0;
  tensors_.clear();
  storages_.clear();
  storage_by_address_ = {};
  tensor_by_address_ = {};
  number_ = ++recordings;
  if (current_recording == this) Storage::set_current_trace(number_);
}

void Recording::note_managed(const Storage& storage, const char* by, const std::string& name) {
  if (owner_.guards_managed()) return;
  if (managed_by_address_.insert(&storage, static_cast<uint32_t>(managed_.size())).second)
    managed_.push_back({by, &name});
}

const Recording::Managed* Recording::managed(const Storage& storage) const {
  const uint32_t known = managed_by_address_.find(&storage);
  return known == base::PointerMap::kAbsent ? nullptr : &managed_[known];
}

void Recording::note_host_read(const std::shared_ptr<const int64_t>& cell, const char* what) {
  if (!is_strict()) return;
  const auto is_known = [&](const HostRead& known) { return known.cell == cell; };
  if (std::any_of(host_reads_.begin(), host_reads_.end(), is_known) ||
      std::find(host_writes_.begin(), host_writes_.end(), cell) != host_writes_.end())
    return;
  host_reads_.push_back({cell, *cell, what});
}

void Recording::note_host_write(const std::shared_ptr<const int64_t>& cell) {
  const auto is_known = [&](const HostRead& known) { return known.cell == cell; };
  if (std::none_of(host_reads_.begin(), host_reads_.end(), is_known)) host_writes_.push_back(cell);
}

bool Recording::is_pending(const Storage& storage) const {
  const uint32_t known = storage_by_address_.find(&storage);
  return known != kNone && storages_[known].first_write != kNone;
}

bool Recording::is_constant(const Storage& storage) const {
  return std::any_of(constants_.begin(), constants_.end(),
                     [&](const Tensor& x) { return x.storage().get() == &storage; });
}

uint32_t Recording::add_storage(const base::Intrusive<Storage>& storage, Device device) {
  const auto [number, fresh] = storage_by_address_.insert(storage.get(), static_cast<uint32_t>(storages_.size()));
  if (fresh) {
    RecordedStorage added;
    added.storage = storage;
    added.device = device;
    added.has_bytes = storage->data() || storage->bytes() == 0 || device.type == DeviceType::kNull;
    added.made_here = storage->made_in_trace() == number_;
    storages_.push_back(std::move(added));
  }
  return number;
}

uint32_t Recording::find(const Tensor& x) const {
  if (const TracedValue* value = traced_value(x); value && value->recording == number_) return value->number;
  return tensor_by_address_.find(x.impl());
}

uint32_t Recording::add(const Tensor& x) {
  if (!x.defined()) return kNone;
  if (const TracedValue* value = traced_value(x)) {
    if (value->recording == number_) return value->number;
    x.need_bytes("use in another recording");
  }
  const auto [number, fresh] = tensor_by_address_.insert(x.impl(), static_cast<uint32_t>(tensors_.size()));
  if (fresh) {
    tensors_.push_back({add_storage(x.storage(), x.device()), layout_of(x), x});
    if (is_group(x)) mark_constant(x);  // it only stands for its group
    if (owner_.is_strict()) hide(x);
  }
  CHORALE_INVARIANT(tensors_[number].layout == layout_of(x), "a tensor changed its shape while it was recorded");
  return number;
}

Tensor Recording::traced(Layout layout, Device device, base::Intrusive<Storage> storage, uint32_t storage_number) {
  const auto number = static_cast<uint32_t>(tensors_.size());
  Tensor x = Tensor::without_bytes(layout.sizes, layout.strides, layout.dtype, device,
                                   std::make_unique<TracedValue>(number_, number));
  if (storage) {
    x.impl()->storage = std::move(storage);
    x.impl()->offset = layout.offset;
  } else {
    storage_number = add_storage(x.storage(), device);
    storages_[storage_number].has_bytes = false;
    storages_[storage_number].made_here = false;
    storages_[storage_number].creator = number;
  }
  auto alive = std::make_shared<Alive>(Alive{x.impl()});
  static_cast<TracedValue&>(*x.impl()->extension).alive = alive;
  tensors_.push_back({storage_number, std::move(layout), {}, std::move(alive)});
  return x;
}

Tensor Recording::new_tensor(const op::OutSpec& spec, std::span<const Tensor> in) {
  if (spec.view_of >= 0) {
    const Tensor& of = in[static_cast<size_t>(spec.view_of)];
    return traced({spec.sizes, spec.strides, spec.offset, spec.dtype}, of.device(), of.storage(),
                  tensors_[find(of)].storage);
  }
  return traced({spec.sizes, spec.strided ? spec.strides : contiguous_strides(spec.sizes), 0, spec.dtype}, spec.device,
                {}, 0);
}

Tensor Recording::placeholder(const Layout& layout, Device device) {
  const Tensor x = traced(layout, device, {}, 0);
  storages_.back().is_tangent = true;
  return x;
}

void Recording::note_read(uint32_t tensor) {
  if (tensor == kNone) return;
  RecordedStorage& storage = storages_[tensors_[tensor].storage];
  if (storage.first_read == kNone) storage.first_read = static_cast<uint32_t>(calls_.size());
}

std::vector<Tensor> Recording::live_tensors() const {
  std::vector<Tensor> found;
  for (const RecordedTensor& tensor : tensors_) {
    if (!tensor.alive || !tensor.alive->impl) continue;
    const auto is_own = [&](const Draw& draw) { return draw.stretch.impl() == tensor.alive->impl; };
    if (std::none_of(draws_.begin(), draws_.end(), is_own)) found.push_back(Tensor::share(tensor.alive->impl));
  }
  return found;
}

void Recording::hide(const Tensor& x) {
  const uint32_t number = add(x);
  if (x.extension() || !x.impl()->data) return;
  x.impl()->extension = std::make_unique<TracedValue>(number_, number);
  x.impl()->data = nullptr;
  hidden_.push_back(x);
}

const char* Recording::why_not_recordable(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs,
                                          std::span<const Tensor> into) {
  if (op.dynamic) return "the shape of its result depends on data";
  std::optional<Device> device;
  const auto stays = [&](Device other) {
    if (other.type == DeviceType::kNull) return true;
    if (!device) device = other;
    return *device == other;
  };
  for (const Tensor& x : in) {
    if (!x.defined()) continue;
    if (x.is_sparse()) return "it has a sparse operand";
    if (x.is_sharded()) return "it has a sharded operand";
    if (!stays(x.device())) return "its operands are on several devices";
    // A result that is on its way between ranks since before: a graph has no place for what it knows.
    if (x.extension() && !x.is_traced() && !is_group(x)) return "it waits for what was begun outside";
  }
  for (const Tensor& x : into) {
    if (!stays(x.device())) return "it moves a tensor to another device";
  }
  if (&op == &op::kToDevice) {
    const auto& to = attrs.get<op::ToDeviceAttrs>();
    if (!stays({to.device, static_cast<int16_t>(to.device_index)})) return "it moves a tensor to another device";
  }
  if (device && *device != kCpu && is_collective(op)) return "it sends what is on a device";
  return nullptr;
}

void Recording::add_call(RecordedCall call) {
  call.time = owner_.clock();
  if (const uint64_t region = owner_.region()) {
    if (region != region_) ++regions_;
    region_ = region;
    call.region = regions_;
  }
  calls_.push_back(std::move(call));
}

void Recording::call(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out) {
  op::OutSpecs specs = op::prepare(op, in, attrs, out.size());
  RecordedCall call;
  call.op = &op;
  call.attrs = attrs;
  for (const Tensor& x : in) call.in.push_back(add(x));
  for (const uint32_t x : call.in) note_read(x);
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = new_tensor(specs[i], in);
    static_cast<TracedValue&>(*out[i].impl()->extension).made_by = op.name;
    call.out.push_back(static_cast<uint32_t>(tensors_.size() - 1));
  }
  add_call(std::move(call));
}

int64_t Recording::late_item(const Tensor& x) {
  const int64_t stand_in = owner_.stand_in(late_sizes_.size());
  if (stand_in != 0) late_sizes_.push_back({add(x), -1, stand_in});
  return stand_in;
}

bool Recording::late_nonzero(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs,
                             std::span<Tensor> out) {
  const int64_t stand_in = owner_.stand_in(late_sizes_.size());
  if (stand_in == 0) return false;
  op::check_inputs(op, in);
  RecordedCall call;
  call.op = &op;
  call.attrs = attrs;
  call.in.push_back(add(in[0]));
  note_read(call.in[0]);
  const Shape sizes{stand_in, in[0].dims()};
  out[0] = traced({sizes, contiguous_strides(sizes), 0, DType::kI64}, in[0].device(), {}, 0);
  call.out.push_back(static_cast<uint32_t>(tensors_.size() - 1));
  late_sizes_.push_back({call.out[0], 0, stand_in});
  add_call(std::move(call));
  return true;
}

void Recording::call_into(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs,
                          std::span<const Tensor> out) {
  op::prepare_into(op, in, attrs, out);
  RecordedCall call;
  call.kind = RecordedCall::Kind::kInto;
  call.op = &op;
  call.attrs = attrs;
  for (const Tensor& x : in) call.in.push_back(add(x));
  for (const uint32_t x : call.in) note_read(x);
  for (const Tensor& y : out) {
    const uint32_t number = add(y);
    call.out.push_back(number);
    RecordedStorage& storage = storages_[tensors_[number].storage];
    if (storage.first_write == kNone) storage.first_write = static_cast<uint32_t>(calls_.size());
    if (storage.has_bytes) hide(y);
  }
  add_call(std::move(call));
  op::note_writes(op, out);
}

Tensor Recording::draw(Generator& generator, int64_t words, Device device, const op::Stack& runs) {
  const RandomStream place = generator.state();
  for (const Draw& known : draws_) {
    if (known.generator != &generator || known.seed != place.seed || known.offset != place.offset) continue;
    if (known.words != words) continue;
    generator.take(words);
    return known.stretch;
  }
  if (!owner_.is_strict()) {
    const RecordingPaused paused;
    draws_.push_back({&generator, place.seed, place.offset, words, runs.all().draw(generator, words, device)});
    return draws_.back().stretch;
  }
  generator.take(words);
  const Tensor stretch = traced({{2}, {1}, 0, DType::kI64}, device, {}, 0);
  draws_.push_back({&generator, place.seed, place.offset, words, stretch});
  RecordedCall call;
  call.kind = RecordedCall::Kind::kDraw;
  call.generator = &generator;
  call.words = words;
  call.out.push_back(static_cast<uint32_t>(tensors_.size() - 1));
  add_call(std::move(call));
  return stretch;
}

void Recording::rewind_generators() const {
  for (auto draw = draws_.rbegin(); draw != draws_.rend(); ++draw) draw->generator->restore({draw->seed, draw->offset});
}

void Recording::need_values(const std::string& reason) {
  if (!owner_.run_now(*this, reason)) throw StateError(owner_.why_not(reason));
}

void finish_recorded(const char* reason) {
  Recording* recording = Recording::current();
  if (recording && !recording->calls().empty()) recording->need_values(reason);
}

RecordingScope::RecordingScope(Recording& recording)
    : before_(std::exchange(current_recording, &recording)),
      trace_before_(Storage::current_trace()),
      under_(op::current_stack().with(tracer())) {
  Storage::set_current_trace(recording.number_);
}
RecordingScope::~RecordingScope() {
  current_recording = before_;
  Storage::set_current_trace(trace_before_);
}

RecordingPaused::RecordingPaused()
    : before_(std::exchange(current_recording, nullptr)), trace_before_(Storage::current_trace()) {
  Storage::set_current_trace(0);
}
RecordingPaused::~RecordingPaused() {
  current_recording = before_;
  Storage::set_current_trace(before_ ? before_->number() : trace_before_);
}

}  // namespace chorale::graph
