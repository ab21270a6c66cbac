// Inside comm: how calls of a group are put together and started.
#pragma once

#include "chorale/comm/group_state.h"

namespace chorale::comm {

class DeviceCall;

// Starts operations one right after the other; for the trace they are one call.
void start_together(GroupState& state, const Operations& operations);

// Calls that this thread starts while it lasts are parts of one that leaves its own event: they leave none.
class PartsOfOneCall {
 public:
  PartsOfOneCall() { ++depth_; }
  ~PartsOfOneCall() { --depth_; }
  PartsOfOneCall(const PartsOfOneCall&) = delete;
  PartsOfOneCall& operator=(const PartsOfOneCall&) = delete;
  static bool lasts() { return depth_ > 0; }

 private:
  static constinit thread_local int depth_;
};

// A call while it is put together.
class CallBuilder {
 public:
  CallBuilder(const std::shared_ptr<GroupState>& state, CallKind kind, const CallOptions& options);

  void set_root(int global_rank);
  // Throws InvalidArgument where the dtype cannot be reduced so.
  void set_reduction(Reduction reduction, DType dtype);
  void set_dtype(DType dtype);
  // The same on all ranks: the number of elements, or a list of numbers.
  void set_count(int64_t elems) { operation_->print.count = static_cast<uint64_t>(elems); }
  void add_detail(uint64_t value);

  // Contiguous bytes of a tensor that is read, written, or both; others are copied and, when done, copied back.
  Chunk input(const Tensor& tensor);
  Chunk output(const Tensor& tensor);
  Chunk in_place(const Tensor& tensor);
  // Notes a shape for the trace; inputs and what is changed in place are noted anyway.
  void note_shape(const Tensor& tensor);
  void give(Chunk chunk) { operation_->give.push_back(chunk); }
  void take(Chunk chunk) { operation_->take.push_back(chunk); }

  Operation& operation() { return *operation_; }
  // The operation as the engine gets it; nothing is added to it any more.
  const base::Intrusive<Operation>& complete();
  // The last that is done with the builder: the operation is then the work's.
  Work launch();

 private:
  void check(const Tensor& tensor);
  void collect();
  void note_result(const Tensor& tensor);
  // Whether its bytes stay on a device (Note [Calls by devices]): the first tensor decides.
  bool stays_on_device(const Tensor& tensor);
  Chunk written(const Tensor& tensor, bool copy_in);

  const std::shared_ptr<GroupState>& state_;
  base::Intrusive<Operation> operation_;
  const char* name_;
  bool has_dtype_ = false;  // the first tensor brings it
  bool decided_ = false;
  std::shared_ptr<DeviceCall> device_call_;  // null: the host moves its bytes
};

// Elements of a strided tensor to and from contiguous memory, in row-major order.
void pack(const Tensor& from, void* to);
void unpack(const void* from, const Tensor& to);

}  // namespace chorale::comm
