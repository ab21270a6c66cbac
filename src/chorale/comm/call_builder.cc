#include "chorale/comm/call_builder.h"

#include <cstring>

#include "chorale/base/debug_level.h"
#include "chorale/base/error.h"
#include "chorale/comm/comm_counter.h"
#include "chorale/comm/device_calls.h"
#include "chorale/comm/failure.h"
#include "chorale/comm/stream_wait.h"
#include "chorale/comm/timeout_extension.h"
#include "chorale/device/stream.h"
#include "chorale/tensor/device_copy.h"
#include "chorale/tensor/strided.h"
#include "chorale/trace/trace.h"
#include "chorale/vec/combine.h"
#include "chorale/vec/strided_copy.h"

namespace chorale::comm {

namespace {

// Packed memory as a tensor of the same shape.
Tensor packed_as(const Tensor& tensor, void* memory) {
  const size_t bytes = static_cast<size_t>(tensor.elems()) * tensor.elem_bytes();
  return Tensor::on(Storage::wrap(memory, bytes, kCpu), tensor.sizes(), contiguous_strides(tensor.sizes()), 0,
                    tensor.dtype());
}
// Bytes that the host has, in row-major order: algorithms use them where they are.
bool is_usable(const Tensor& tensor) { return tensor.is_contiguous() && tensor.device() == kCpu; }

// Calls of a group want bytes, which a traced tensor does not have: the graph is told which call it was, and which op
// would be part of the graph (op/collective.h).
std::string why_not_traced(const Operation& operation) {
  const std::string call = concat("Group::", name_of(operation.kind), " cannot be part of a graph");
  switch (operation.kind) {
    case CallKind::kBroadcast:
    case CallKind::kReduce:
    case CallKind::kAllReduce:
    case CallKind::kAllGather:
    case CallKind::kReduceScatter:
    case CallKind::kAllToAll:
    case CallKind::kSend:
    case CallKind::kRecv:
      return concat(call,
                    "; use the op chorale::", operation.kind == CallKind::kRecv ? "receive" : name_of(operation.kind),
                    " of chorale/op/collective.h");
    default:
      return call;
  }
}

}  // namespace

void pack(const Tensor& from, void* to) {
  if (from.device() != kCpu) return copy_between_devices(from, packed_as(from, to));
  const Strides rows = contiguous_strides(from.sizes());
  vec::StridedView packed = strided(from);
  packed.data = to;
  packed.strides = rows;
  vec::copy_strided(strided(from), packed, vec::Threads::kOne);
}

void unpack(const void* from, const Tensor& to) {
  if (to.device() != kCpu) {
    const StreamScope scope(copy_stream(to.device()));
    return copy_between_devices(packed_as(to, const_cast<void*>(from)), to);
  }
  const Strides rows = contiguous_strides(to.sizes());
  vec::StridedView packed = strided(to);
  packed.data = const_cast<void*>(from);
  packed.strides = rows;
  vec::copy_strided(packed, strided(to), vec::Threads::kOne);
}

constinit thread_local int PartsOfOneCall::depth_ = 0;

CallBuilder::CallBuilder(const std::shared_ptr<GroupState>& state, CallKind kind, const CallOptions& options)
    : state_(state), operation_(Operation::make()), name_(name_of(kind).data()) {
  if (state_->context->made.is_foreign()) [[unlikely]]
    raise_in_child(name_, state_->membership(), *state_->context);
  operation_->kind = kind;
  operation_->print.kind = static_cast<uint8_t>(kind);
  operation_->print.tag = options.tag;
  if (state_->context->checksum) operation_->print.variant = kChecksummed;
  operation_->traced = trace::enabled() && !PartsOfOneCall::lasts();
  operation_->issued = Deadline::Clock::now();
  operation_->timeout = options.timeout.value_or(state_->timeout);
  operation_->deadline = Deadline(operation_->issued + operation_->timeout);
  if (!options.timeout) take_extension(*operation_);
}

void CallBuilder::set_root(int global_rank) {
  operation_->root = state_->group_rank(name_, global_rank);
  operation_->print.root = operation_->root;
}

void CallBuilder::set_dtype(DType dtype) {
  has_dtype_ = true;
  operation_->dtype = dtype;
  operation_->print.dtype = static_cast<uint8_t>(dtype);
}

void CallBuilder::set_reduction(Reduction reduction, DType dtype) {
  set_dtype(dtype);
  CHORALE_CHECK(vec::can_combine(reduction.op, dtype), "[", name_, "] ", name_of(reduction.op), " of ",
                is_complex(dtype) ? "complex " : "", dtype, " tensors is not defined",
                is_complex(dtype) ? "; complex numbers can be summed and averaged" : "");
  CHORALE_CHECK(reduction.factor == 1 || (reduction.op == Reduce::kSum && dtype >= DType::kF16), "[", name_,
                "] a factor needs a sum of floating or complex numbers, not ", name_of(reduction.op), " of ", dtype);
  operation_->reduction = reduction;
  operation_->print.reduce = static_cast<uint8_t>(reduction.op);
  if (reduction.factor != 1) {
    uint64_t bits;
    std::memcpy(&bits, &reduction.factor, sizeof(bits));
    add_detail(bits);
  }
}

void CallBuilder::add_detail(uint64_t value) {
  // FNV-1a over the bytes.
  uint64_t hash = operation_->print.detail == 0 ? 0xcbf29ce484222325u : operation_->print.detail;
  for (int byte = 0; byte < 8; ++byte) hash = (hash ^ (value >> (8 * byte) & 0xff)) * 0x100000001b3u;
  operation_->print.detail = hash;
}

void CallBuilder::check(const Tensor& tensor) {
  CHORALE_CHECK(tensor.defined(), "[", name_, "] a tensor is undefined");
  CHORALE_CHECK(tensor.device().type != DeviceType::kNull, "[", name_,
                "] a tensor on device null has no bytes to send");
  if (tensor.is_traced()) [[unlikely]]
    tensor.need_bytes(why_not_traced(*operation_).c_str());
  CHORALE_CHECK(!tensor.is_sparse(), "[", name_, "] sparse tensors are reduced by sparse_all_reduce");
  if (!has_dtype_) set_dtype(tensor.dtype());
  CHORALE_CHECK(tensor.dtype() == operation_->dtype, "[", name_, "] tensors of one call have one dtype: found ",
                tensor.dtype(), " beside ", operation_->dtype);
}

bool CallBuilder::stays_on_device(const Tensor& tensor) {
  if (!decided_) {
    decided_ = true;
    if (tensor.device() != kCpu) [[unlikely]]
      device_call_ = begin_device_call(state_, *operation_, tensor);
  }
  return device_call_ != nullptr;
}

Chunk CallBuilder::input(const Tensor& tensor) {
  check(tensor);
  note_shape(tensor);
  if (stays_on_device(tensor)) [[unlikely]]
    return device_call_->chunk_of(tensor, /*read=*/true, /*written=*/false);
  const size_t bytes = static_cast<size_t>(tensor.elems()) * tensor.elem_bytes();
  if (is_usable(tensor)) {
    operation_->keep.push_back(tensor.storage());
    return {static_cast<std::byte*>(tensor.raw()), bytes};
  }
  const Tensor packed = Tensor::empty(tensor.sizes(), tensor.dtype());
  pack(tensor, packed.raw());
  operation_->keep.push_back(packed.storage());
  return {static_cast<std::byte*>(packed.raw()), bytes};
}

void CallBuilder::note_result(const Tensor& tensor) {
  check(tensor);
  tensor.storage()->check_writable(name_);
  tensor.storage()->note_write(name_);
  operation_->results.push_back(tensor);
}

Chunk CallBuilder::written(const Tensor& tensor, bool copy_in) {
  note_result(tensor);
  if (stays_on_device(tensor)) [[unlikely]]
    return device_call_->chunk_of(tensor, copy_in, /*written=*/true);
  const size_t bytes = static_cast<size_t>(tensor.elems()) * tensor.elem_bytes();
  if (is_usable(tensor)) return {static_cast<std::byte*>(tensor.raw()), bytes};
  const Tensor packed = Tensor::empty(tensor.sizes(), tensor.dtype());
  if (copy_in) {
    pack(tensor, packed.raw());
  } else {
    synchronize(current_stream(tensor.device()));  // what was asked of the device before may still read or write it
  }
  operation_->finish.push_back([packed, tensor] { unpack(packed.raw(), tensor); });
  return {static_cast<std::byte*>(packed.raw()), bytes};
}
Chunk CallBuilder::output(const Tensor& tensor) { return written(tensor, false); }
Chunk CallBuilder::in_place(const Tensor& tensor) {
  const Chunk chunk = written(tensor, true);
  note_shape(tensor);
  return chunk;
}

void CallBuilder::note_shape(const Tensor& tensor) {
  if (!operation_->traced) return;
  std::vector<int64_t> shape(tensor.sizes().begin(), tensor.sizes().end());
  if (is_complex(tensor.dtype())) shape.push_back(2);  // it travels as pairs of reals
  operation_->shapes.push_back(std::move(shape));
}

namespace {
// Every call of a rank comes by here.
void meet_chaos(const GroupState& state) {
  if (state.context->chaos) [[unlikely]]
    state.context->chaos->enter_call();
}

void count_call(std::span<const base::Intrusive<Operation>> operations) {
  if (!CommCounter::listens() || operations.empty()) [[likely]]
    return;
  size_t bytes = 0;
  for (const auto& operation : operations) {
    for (const Chunk& chunk : given(*operation)) bytes += chunk.bytes;
  }
  CommCounter::note(kind_of(operations[0]->print), bytes);
}
}  // namespace

void start_together(GroupState& state, const Operations& operations) {
  for (size_t i = 1; i < operations.size(); ++i) {
    auto& shapes = operations[i]->shapes;
    operations[0]->shapes.insert(operations[0]->shapes.end(), shapes.begin(), shapes.end());
    operations[i]->traced = false;
  }
  for (size_t i = 0; i < operations.size(); ++i) meet_chaos(state);
  count_call({operations.data(), operations.size()});
  const std::lock_guard lock(state.context->mutex);
  for (const auto& operation : operations) state.engine->submit(operation);
}

void CallBuilder::collect() {
  Operations& collected = *state_->collecting;
  CHORALE_CHECK_STATE(collected.empty() || (collected[0]->print.kind == operation_->print.kind &&
                                            collected[0]->print.reduce == operation_->print.reduce),
                      "[", name_, "] a coalescing scope holds calls of one kind and one reduction: found ",
                      describe(operation_->print), " after ", describe(collected[0]->print));
  collected.push_back(operation_);
}

const base::Intrusive<Operation>& CallBuilder::complete() {
  if (device_call_) [[unlikely]] {
    device_call_->seal(*operation_);
    set_device_part(*operation_, std::move(device_call_));
  }
  return operation_;
}

Work CallBuilder::launch() {
  complete();
  if (state_->collecting) {
    collect();
    return {};
  }
  // In detail, a rank that stays away is found before data moves.
  const bool collective = operation_->kind != CallKind::kSend && operation_->kind != CallKind::kRecv &&
                          operation_->kind != CallKind::kMonitoredBarrier;
  if (debug_level() == DebugLevel::kDetail && collective) {
    CallOptions options;
    if (state_->rank() == 0)
      options.timeout = std::chrono::duration_cast<std::chrono::milliseconds>(operation_->timeout);
    CallBuilder(state_, CallKind::kMonitoredBarrier, options).launch().wait();
  }
  meet_chaos(*state_);
  count_call({&operation_, 1});
  const Membership& who = state_->membership();
  const trace::Span span("start", trace::Kind::kComm, who.own_global());
  const std::lock_guard lock(state_->context->mutex);
  state_->engine->submit(operation_);
  Operations operations;
  operations.push_back(std::move(operation_));
  return Work(state_->engine, std::move(operations));
}

}  // namespace chorale::comm
