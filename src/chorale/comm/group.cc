// Groups: what they say of themselves, and their calls. Arguments are checked here, and turned into what each rank
// gives and takes (Note [Give and take]). How groups are made is in group_making.cc.
#include "chorale/comm/group.h"

#include <algorithm>
#include <iostream>

#include "chorale/base/error.h"
#include "chorale/comm/call_builder.h"
#include "chorale/comm/sparse.h"

namespace chorale::comm {

// ---- what it says of itself

void Group::raise_moved_from() {
  throw InvalidArgument("[group] the group was moved from: what it was moved to is this rank's end of it now");
}

const GroupState& Group::member_state(const char* what) const {
  CHORALE_CHECK(is_member(), "[group] the group is not valid for this rank: it is not a member, so it has no ", what);
  return *state_;
}

int Group::rank() const { return is_member() ? state_->rank() : -1; }
int Group::size() const { return is_member() ? state_->size() : -1; }
const std::string& Group::name() const { return member_state("name").membership().name; }
std::string Group::backend() const { return member_state("backend").engine->backend(); }
const std::vector<int>& Group::members() const { return member_state("members").membership().members; }
int Group::global_rank(int group_rank) const {
  const auto& ranks = members();
  CHORALE_CHECK(group_rank >= 0 && group_rank < size(), "[group] rank ", group_rank, " is outside 0 to ", size() - 1);
  return ranks[static_cast<size_t>(group_rank)];
}
int Group::group_rank(int global_rank) const { return member_state("ranks").group_rank("group_rank", global_rank); }
std::chrono::milliseconds Group::timeout() const { return member_state("timeout").timeout; }
int64_t Group::sequence_number() const {
  const auto& state = member_state("sequence number");
  const std::lock_guard lock(state.context->mutex);
  return state.engine->last_number();
}
bool Group::is_broken() const { return is_member() && state_->engine->is_broken(); }
void Group::note_exception(const std::string& what) const {
  if (!state_) return;
  const std::lock_guard lock(state_->context->mutex);
  state_->engine->note_exception(what);
}
std::string Group::flight_record() const {
  const auto& state = member_state("flight record");
  const std::lock_guard lock(state.context->mutex);
  return state.engine->flight_record();
}
const std::shared_ptr<Engine>& Group::engine() const { return member_state("engine").engine; }

bool Group::is_on_one_host() const { return member_state("is_on_one_host").engine->shares_host() || size() == 1; }
bool Group::moves_by_itself() const { return member_state("engine").engine->has_own_thread(); }

// ---- collectives

namespace {

int64_t elems_of(const std::vector<Tensor>& tensors) {
  int64_t total = 0;
  for (const Tensor& tensor : tensors) total += tensor.elems();
  return total;
}

// Equal sizes are a count; different ones are hashed. Either must agree on all ranks.
void set_sizes(CallBuilder& call, const std::vector<Tensor>& tensors) {
  const bool even = std::all_of(tensors.begin(), tensors.end(),
                                [&](const Tensor& tensor) { return tensor.elems() == tensors[0].elems(); });
  if (even && !tensors.empty()) return call.set_count(tensors[0].elems());
  for (const Tensor& tensor : tensors) call.add_detail(static_cast<uint64_t>(tensor.elems()));
}

// Chunks of one contiguous stretch, all of the same size.
Chunk part(const Chunk& whole, int index, int size) {
  const size_t bytes = whole.bytes / static_cast<size_t>(size);
  return {whole.data + bytes * static_cast<size_t>(index), bytes};
}

void check_count(const char* call, const char* what, const std::vector<Tensor>& tensors, int size) {
  CHORALE_CHECK(static_cast<int>(tensors.size()) == size, "[", call, "] ", what, " must hold one tensor per rank, ",
                size, ", not ", tensors.size());
}

Work launch_together(const std::shared_ptr<GroupState>& state, std::vector<CallBuilder>& calls) {
  Operations operations;
  for (CallBuilder& call : calls) operations.push_back(call.complete());
  CHORALE_CHECK_STATE(!state->collecting, "[coalescing] several tensors in one call are coalesced already");
  start_together(*state, operations);
  return Work(state->engine, std::move(operations));
}

// What a rank outside the group gets.
Work outside(const char* call) {
  std::cerr << concat("[", call, "] this rank is not in the group: nothing is done\n");
  return {};
}

}  // namespace

Work Group::barrier(const CallOptions& options) const {
  if (!is_member()) return outside("barrier");
  return CallBuilder(state_, CallKind::kBarrier, options).launch();
}

void Group::monitored_barrier(std::chrono::milliseconds timeout, bool wait_for_all) const {
  if (!is_member()) return;
  // Only rank 0 watches the time: if the others gave up first, no rank would find out which is missing.
  CallOptions options;
  if (state_->rank() == 0) options.timeout = timeout;
  CallBuilder call(state_, CallKind::kMonitoredBarrier, options);
  call.operation().wait_for_all = wait_for_all;
  call.launch().wait();
}

Work Group::broadcast_span(Span data, int root, const CallOptions& options) const {
  if (!is_member()) return outside("broadcast");
  CallBuilder call(state_, CallKind::kBroadcast, options);
  call.set_root(root);
  call.set_dtype(data.dtype);
  call.set_count(data.elems);
  const Chunk chunk{data.data, static_cast<size_t>(data.elems) * size_of(data.dtype)};
  if (call.operation().root == state_->rank()) {
    call.give(chunk);
  } else {
    call.take(chunk);
  }
  return call.launch();
}

Work Group::broadcast(const Tensor& tensor, int root, const CallOptions& options) const {
  if (!is_member()) return outside("broadcast");
  CallBuilder call(state_, CallKind::kBroadcast, options);
  call.set_root(root);
  if (call.operation().root == state_->rank()) {
    call.give(call.input(tensor));
    call.operation().results.push_back(tensor);
  } else {
    call.take(call.output(tensor));
    call.note_shape(tensor);
  }
  call.set_count(tensor.elems());
  return call.launch();
}

Work Group::reduce(const Tensor& tensor, int root, Reduction reduction, const CallOptions& options) const {
  if (!is_member()) return outside("reduce");
  CallBuilder call(state_, CallKind::kReduce, options);
  CHORALE_CHECK(tensor.defined(), "[reduce] the tensor is undefined");
  call.set_root(root);
  call.set_reduction(reduction, tensor.dtype());
  call.set_count(tensor.elems());
  const bool is_root = call.operation().root == state_->rank();
  const Chunk chunk = is_root ? call.in_place(tensor) : call.input(tensor);
  call.give(chunk);
  if (is_root) call.take(chunk);
  return call.launch();
}

Work Group::all_reduce_span(Span data, Reduction reduction, const CallOptions& options) const {
  if (!is_member()) return outside("all_reduce");
  CallBuilder call(state_, CallKind::kAllReduce, options);
  call.set_reduction(reduction, data.dtype);
  call.set_count(data.elems);
  const Chunk chunk{data.data, static_cast<size_t>(data.elems) * size_of(data.dtype)};
  call.give(chunk);
  call.take(chunk);
  return call.launch();
}

Work Group::all_reduce(const Tensor& tensor, Reduction reduction, const CallOptions& options) const {
  if (!is_member()) return outside("all_reduce");
  CallBuilder call(state_, CallKind::kAllReduce, options);
  CHORALE_CHECK(tensor.defined(), "[all_reduce] the tensor is undefined");
  call.set_reduction(reduction, tensor.dtype());
  call.set_count(tensor.elems());
  const Chunk chunk = call.in_place(tensor);
  call.give(chunk);
  call.take(chunk);
  return call.launch();
}

Work Group::all_gather_spans(Span output, Span input, const CallOptions& options) const {
  if (!is_member()) return outside("all_gather");
  CHORALE_CHECK(output.elems == input.elems * state_->size(), "[all_gather] the output must hold ",
                input.elems * state_->size(), " elements, ", input.elems, " of each rank, not ", output.elems);
  CallBuilder call(state_, CallKind::kAllGather, options);
  call.set_dtype(input.dtype);
  call.set_count(input.elems);
  call.give({input.data, static_cast<size_t>(input.elems) * size_of(input.dtype)});
  const Chunk whole{output.data, static_cast<size_t>(output.elems) * size_of(output.dtype)};
  for (int r = 0; r < state_->size(); ++r) call.take(part(whole, r, state_->size()));
  return call.launch();
}

Work Group::all_gather(const std::vector<Tensor>& outputs, const Tensor& input, const CallOptions& options) const {
  if (!is_member()) return outside("all_gather");
  check_count("all_gather", "outputs", outputs, state_->size());
  CallBuilder call(state_, CallKind::kAllGather, options);
  call.give(call.input(input));
  for (const Tensor& output : outputs) call.take(call.output(output));
  CHORALE_CHECK(outputs[static_cast<size_t>(state_->rank())].elems() == input.elems(),
                "[all_gather] the output for this rank has ", outputs[static_cast<size_t>(state_->rank())].elems(),
                " elements, its input ", input.elems());
  set_sizes(call, outputs);
  return call.launch();
}

Work Group::all_gather_into(const Tensor& output, const Tensor& input, const CallOptions& options) const {
  if (!is_member()) return outside("all_gather_into");
  CallBuilder call(state_, CallKind::kAllGather, options);
  call.give(call.input(input));
  const Chunk whole = call.output(output);
  CHORALE_CHECK(output.elems() == input.elems() * state_->size(), "[all_gather] the output must hold ",
                input.elems() * state_->size(), " elements, ", input.elems(), " of each rank, not ", output.elems());
  for (int r = 0; r < state_->size(); ++r) call.take(part(whole, r, state_->size()));
  call.set_count(input.elems());
  return call.launch();
}

Work Group::gather(const std::vector<Tensor>& outputs, const Tensor& input, int root,
                   const CallOptions& options) const {
  if (!is_member()) return outside("gather");
  CallBuilder call(state_, CallKind::kGather, options);
  call.set_root(root);
  call.give(call.input(input));
  if (call.operation().root == state_->rank()) {
    check_count("gather", "on the root, outputs", outputs, state_->size());
    for (const Tensor& output : outputs) {
      call.take(call.output(output));
      CHORALE_CHECK(output.elems() == input.elems(), "[gather] an output has ", output.elems(), " elements, the input ",
                    input.elems());
    }
  } else {
    CHORALE_CHECK(outputs.empty(), "[gather] only the root, rank ", root, ", passes outputs");
  }
  call.set_count(input.elems());
  return call.launch();
}

Work Group::scatter(const Tensor& output, const std::vector<Tensor>& inputs, int root,
                    const CallOptions& options) const {
  if (!is_member()) return outside("scatter");
  CallBuilder call(state_, CallKind::kScatter, options);
  call.set_root(root);
  call.take(call.output(output));
  call.note_shape(output);
  if (call.operation().root == state_->rank()) {
    check_count("scatter", "on the root, inputs", inputs, state_->size());
    for (const Tensor& input : inputs) {
      call.give(call.input(input));
      CHORALE_CHECK(output.elems() == input.elems(), "[scatter] an input has ", input.elems(), " elements, the output ",
                    output.elems());
    }
  } else {
    CHORALE_CHECK(inputs.empty(), "[scatter] only the root, rank ", root, ", passes inputs");
  }
  call.set_count(output.elems());
  return call.launch();
}

Work Group::reduce_scatter(const Tensor& output, const std::vector<Tensor>& inputs, Reduction reduction,
                           const CallOptions& options) const {
  if (!is_member()) return outside("reduce_scatter");
  check_count("reduce_scatter", "inputs", inputs, state_->size());
  CHORALE_CHECK(output.defined(), "[reduce_scatter] the output is undefined");
  CallBuilder call(state_, CallKind::kReduceScatter, options);
  call.set_reduction(reduction, output.dtype());
  for (const Tensor& input : inputs) call.give(call.input(input));
  call.take(call.output(output));
  CHORALE_CHECK(inputs[static_cast<size_t>(state_->rank())].elems() == output.elems(),
                "[reduce_scatter] the input for this rank has ", inputs[static_cast<size_t>(state_->rank())].elems(),
                " elements, the output ", output.elems());
  set_sizes(call, inputs);
  return call.launch();
}

Work Group::reduce_scatter_from(const Tensor& output, const Tensor& input, Reduction reduction,
                                const CallOptions& options) const {
  if (!is_member()) return outside("reduce_scatter_from");
  CHORALE_CHECK(output.defined(), "[reduce_scatter] the output is undefined");
  CallBuilder call(state_, CallKind::kReduceScatter, options);
  call.set_reduction(reduction, output.dtype());
  const Chunk whole = call.input(input);
  CHORALE_CHECK(input.elems() == output.elems() * state_->size(), "[reduce_scatter] the input must hold ",
                output.elems() * state_->size(), " elements, ", output.elems(), " for each rank, not ", input.elems());
  for (int r = 0; r < state_->size(); ++r) call.give(part(whole, r, state_->size()));
  call.take(call.output(output));
  call.set_count(output.elems());
  return call.launch();
}

Work Group::all_to_all(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                       const CallOptions& options) const {
  if (!is_member()) return outside("all_to_all");
  check_count("all_to_all", "inputs", inputs, state_->size());
  check_count("all_to_all", "outputs", outputs, state_->size());
  CallBuilder call(state_, CallKind::kAllToAll, options);
  for (const Tensor& input : inputs) call.give(call.input(input));
  for (const Tensor& output : outputs) call.take(call.output(output));
  // Sizes differ from pair to pair; each rank compares its own with what it is given.
  return call.launch();
}

Work Group::all_to_all_single(const Tensor& output, const Tensor& input, std::span<const int64_t> output_splits,
                              std::span<const int64_t> input_splits, const CallOptions& options) const {
  if (!is_member()) return outside("all_to_all_single");
  CallBuilder call(state_, CallKind::kAllToAll, options);
  const int size = state_->size();
  const auto cut = [&](const char* what, const Tensor& tensor, const Chunk& whole, std::span<const int64_t> splits,
                       auto add) {
    const int64_t rows = tensor.dims() > 0 ? tensor.size(0) : tensor.elems();
    if (splits.empty()) {
      CHORALE_CHECK(rows % size == 0, "[all_to_all] the ", what, " has ", rows, " rows, which ", size,
                    " ranks cannot share evenly; pass split sizes");
      for (int r = 0; r < size; ++r) add(part(whole, r, size));
      return;
    }
    CHORALE_CHECK(static_cast<int>(splits.size()) == size, "[all_to_all] one split size per rank, ", size, ", not ",
                  splits.size());
    int64_t total = 0;
    for (int64_t split : splits) {
      CHORALE_CHECK(split >= 0, "[all_to_all] a split size is ", split);
      total += split;
    }
    CHORALE_CHECK(total == rows, "[all_to_all] the split sizes of the ", what, " add up to ", total, ", it has ", rows,
                  " rows");
    const size_t row_bytes = rows > 0 ? whole.bytes / static_cast<size_t>(rows) : 0;
    size_t at = 0;
    for (int64_t split : splits) {
      const size_t bytes = static_cast<size_t>(split) * row_bytes;
      add({whole.data + at, bytes});
      at += bytes;
    }
  };
  const Chunk from = call.input(input), to = call.output(output);
  cut("input", input, from, input_splits, [&](Chunk chunk) { call.give(chunk); });
  cut("output", output, to, output_splits, [&](Chunk chunk) { call.take(chunk); });
  return call.launch();
}

Tensor Group::sparse_all_reduce(const Tensor& tensor, const CallOptions& options) const {
  return is_member() ? comm::sparse_all_reduce(*this, tensor, options) : tensor;
}

// ---- several at once

Work Group::all_reduce_coalesced(const std::vector<Tensor>& tensors, Reduction reduction,
                                 const CallOptions& options) const {
  if (!is_member()) return outside("all_reduce_coalesced");
  CHORALE_CHECK(!tensors.empty(), "[all_reduce] there is no tensor to reduce");
  // All are checked before the first one is started.
  std::vector<CallBuilder> calls;
  for (const Tensor& tensor : tensors) {
    CHORALE_CHECK(tensor.defined(), "[all_reduce] a tensor is undefined");
    CallBuilder& call = calls.emplace_back(state_, CallKind::kAllReduce, options);
    call.set_reduction(reduction, tensor.dtype());
    call.set_count(tensor.elems());
    const Chunk chunk = call.in_place(tensor);
    call.give(chunk);
    call.take(chunk);
  }
  return launch_together(state_, calls);
}

Work Group::all_gather_coalesced(const std::vector<std::vector<Tensor>>& outputs, const std::vector<Tensor>& inputs,
                                 const CallOptions& options) const {
  if (!is_member()) return outside("all_gather_coalesced");
  CHORALE_CHECK(outputs.size() == inputs.size() && !inputs.empty(), "[all_gather] ", inputs.size(), " inputs and ",
                outputs.size(), " lists of outputs");
  std::vector<CallBuilder> calls;
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_count("all_gather", "each list of outputs", outputs[i], state_->size());
    CallBuilder& call = calls.emplace_back(state_, CallKind::kAllGather, options);
    call.give(call.input(inputs[i]));
    for (const Tensor& output : outputs[i]) call.take(call.output(output));
    CHORALE_CHECK(elems_of(outputs[i]) == inputs[i].elems() * state_->size(), "[all_gather] outputs of ",
                  elems_of(outputs[i]), " elements do not fit an input of ", inputs[i].elems());
    call.set_count(inputs[i].elems());
  }
  return launch_together(state_, calls);
}

// ---- point-to-point

Work Group::isend(const Tensor& tensor, int destination, uint64_t tag, const CallOptions& options) const {
  if (!is_member()) return outside("isend");
  CallBuilder call(state_, CallKind::kSend, options);
  call.operation().peer = state_->group_rank("send", destination);
  call.operation().tag = call.operation().print.tag = tag;
  call.give(call.input(tensor));
  call.set_count(tensor.elems());
  return call.launch();
}

Work Group::irecv(const Tensor& tensor, int source, uint64_t tag, const CallOptions& options) const {
  if (!is_member()) return outside("irecv");
  CallBuilder call(state_, CallKind::kRecv, options);
  call.operation().peer = source == kAnySource ? -1 : state_->group_rank("recv", source);
  call.operation().tag = call.operation().print.tag = tag;
  call.take(call.output(tensor));
  call.note_shape(tensor);
  call.set_count(tensor.elems());
  return call.launch();
}

void Group::send(const Tensor& tensor, int destination, uint64_t tag) const {
  if (!is_member()) return;
  CHORALE_CHECK(destination != global_rank(rank()), "[send] a blocking send to oneself (rank ", destination,
                ") would never end; use isend");
  isend(tensor, destination, tag).wait();
}

int Group::recv(const Tensor& tensor, int source, uint64_t tag) const {
  if (!is_member()) return -1;
  const Work work = irecv(tensor, source, tag);
  work.wait();
  return work.source_rank();
}

namespace {

CallBuilder parcel(const std::shared_ptr<GroupState>& state, CallKind kind, uint64_t tag,
                   const ParcelOptions& options) {
  CHORALE_CHECK(state->engine->has_parcels(), "[", name_of(kind), "_parcel] there are no parcels over ",
                state->engine->backend(), "; make a group without CHORALE_FABRIC=mpi");
  CallBuilder call(state, kind, {.tag = tag, .timeout = options.timeout});
  call.operation().is_parcel = true;
  call.operation().tag = tag;
  call.operation().most_bytes = options.most_bytes;
  call.set_dtype(DType::kU8);
  return call;
}

}  // namespace

Work Group::send_parcel(const Tensor& bytes, int destination, uint64_t tag, const ParcelOptions& options) const {
  if (!is_member()) return outside("send_parcel");
  CHORALE_CHECK(bytes.defined() && bytes.dtype() == DType::kU8, "[send_parcel] a parcel is a tensor of bytes (u8)");
  CHORALE_CHECK(static_cast<uint64_t>(bytes.elems()) <= options.most_bytes, "[send_parcel] the parcel has ",
                bytes.elems(), " bytes, which is more than ", options.most_bytes, "; raise most_bytes on both sides");
  CallBuilder call = parcel(state_, CallKind::kSend, tag, options);
  call.operation().peer = state_->group_rank("send_parcel", destination);
  call.give(call.input(bytes));
  call.set_count(bytes.elems());
  return call.launch();
}

Work Group::receive_parcel(int source, uint64_t tag, const ParcelOptions& options) const {
  if (!is_member()) return outside("receive_parcel");
  CallBuilder call = parcel(state_, CallKind::kRecv, tag, options);
  call.operation().peer = source == kAnySource ? -1 : state_->group_rank("receive_parcel", source);
  return call.launch();
}

P2POp::P2POp(CallKind kind, const Group& group, const Tensor& tensor, int peer, uint64_t tag)
    : kind_(kind), group_(&group), tensor_(tensor), peer_(peer), tag_(tag) {
  CHORALE_CHECK(kind == CallKind::kSend || kind == CallKind::kRecv,
                "[batch_isend_irecv] a batch holds sends and receives, not ", name_of(kind));
}

std::vector<Work> batch_isend_irecv(const std::vector<P2POp>& operations) {
  CHORALE_CHECK(!operations.empty(), "[batch_isend_irecv] the list of operations is empty");
  for (const P2POp& operation : operations) {
    const bool same = operation.group_->is_member() == operations[0].group_->is_member() &&
                      (!operation.group_->is_member() || operation.group_->engine() == operations[0].group_->engine());
    CHORALE_CHECK(same, "[batch_isend_irecv] all operations of a batch must use one group");
  }
  std::vector<Work> works;
  works.reserve(operations.size());
  for (const P2POp& operation : operations) {
    works.push_back(operation.kind_ == CallKind::kSend
                        ? operation.group_->isend(operation.tensor_, operation.peer_, operation.tag_)
                        : operation.group_->irecv(operation.tensor_, operation.peer_, operation.tag_));
  }
  return works;
}

}  // namespace chorale::comm
