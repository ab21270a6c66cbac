// What a callable did, call by call: ops as they came, with writes in place, on tensors that mostly have no bytes yet.
// Written by a Tracer; functionalize.h makes a Graph of it.
#pragma once

#include <string>
#include <vector>

#include "chorale/base/pointer_map.h"
#include "chorale/op/builder.h"

namespace chorale::graph {

inline constexpr uint32_t kNone = ~0u;

// Where a tensor's elements lie in its storage.
struct Layout {
  Shape sizes;
  Strides strides;
  int64_t offset = 0;
  DType dtype = DType::kF32;
  friend bool operator==(const Layout&, const Layout&) = default;
};
Layout layout_of(const Tensor& x);

// Bytes that several tensors may look at.
struct RecordedStorage {
  base::Intrusive<Storage> storage;
  Device device;
  bool has_bytes = false;        // it was there before, or was made from host data while recording
  bool made_here = false;        // while recording, by other means than an op: from host data, or to be written into
  bool is_tangent = false;       // stands for a gradient that comes later (joint graphs)
  uint32_t first_write = kNone;  // the call
  uint32_t first_read = kNone;
  uint32_t creator = kNone;  // the tensor that shows all of it, where an op made it
};

// Says whether the tensor that was made for a recorded value is still there.
struct Alive {
  Tensor::Impl* impl = nullptr;
};

struct RecordedTensor {
  uint32_t storage = 0;
  Layout layout;
  Tensor handle;                   // of a tensor that is not made by a recorded op
  std::shared_ptr<Alive> alive{};  // of one that is
};

struct RecordedCall {
  enum class Kind : uint8_t { kCall, kInto, kDraw };
  Kind kind = Kind::kCall;
  const op::OpDef* op = nullptr;
  Attrs attrs;
  SmallVector<uint32_t, 4> in;  // tensors; kNone where absent
  SmallVector<uint32_t, 2> out;
  Generator* generator = nullptr;  // kDraw
  int64_t words = 0;
  uint64_t time = 0;    // of the owner's clock
  uint32_t region = 0;  // calls of one region stay together: 1, 2, … as they came; 0: none
};

// What to do when a value is asked for.
class Recording;
struct TracedValue;
class RecordingOwner {
 public:
  // Runs what was recorded, so that its live storages have bytes, and begins anew. False: values cannot be had.
  virtual bool run_now(Recording& recording, const std::string& reason) = 0;
  // Said in the error where they cannot.
  virtual std::string why_not(const std::string& reason) const = 0;
  // Whether even values that are there already, of tensors from outside, may not be looked at.
  virtual bool is_strict() const { return false; }
  // A number that only grows: calls are ordered by it against what the owner itself writes down.
  virtual uint64_t clock() { return 0; }
  // A number for calls that belong together (a checkpointed part); 0: for none.
  virtual uint64_t region() { return 0; }
  // Whether tensors of modules that bring and take away their bytes (note_managed) are compared like any others.
  virtual bool guards_managed() const { return false; }
  // What stands for late size `number` (Note [Late sizes]) while it is not known; 0: values are asked for instead.
  virtual int64_t stand_in(size_t /*number*/) { return 0; }

 protected:
  ~RecordingOwner() = default;
};

// Note [Late sizes] A number that only running tells (the element of a tensor, the length of what nonzero finds) has a
// stand-in while it is recorded, which sizes and attributes may be made from. What is recorded with two different
// stand-ins must differ in numbers only; that tells what follows from the number, and that nothing branched on it.
struct LateSize {
  uint32_t tensor = 0;
  int64_t dim = -1;  // its length; -1: its only element
  int64_t stand_in = 0;
};

class Recording {
 public:
  explicit Recording(RecordingOwner& owner);
  ~Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

  const std::vector<RecordedStorage>& storages() const { return storages_; }
  const std::vector<RecordedTensor>& tensors() const { return tensors_; }
  const std::vector<RecordedCall>& calls() const { return calls_; }
  uint32_t number() const { return number_; }
  // Tensors that recorded ops made and that still have their own handles.
  std::vector<Tensor> live_tensors() const;

  // The number of a tensor here; one that is new to the recording is something from outside.
  uint32_t add(const Tensor& x);
  // Like add(), but without adding.
  uint32_t find(const Tensor& x) const;
  void call(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out);
  void call_into(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out);
  // Note [Draws] The generator moves on while a draw is recorded, so that its place says which stretch it was: a
  // recomputation (checkpointing) that goes back there gets the same one. Where host code does not run again, drawing
  // is a call that runs with the others, and the generator goes back before they run; else a stretch is there at once.
  Tensor draw(Generator& generator, int64_t words, Device device, const op::Stack& runs);
  // Puts generators back to where they were before the first recorded draw.
  void rewind_generators() const;
  // A tensor without bytes that stands for what comes from outside later.
  Tensor placeholder(const Layout& layout, Device device);
  // A stand-in for the only element of a tensor that is not written to any more; 0 where there is none.
  int64_t late_item(const Tensor& x);
  // Records nonzero(x), whose length is late; false where there is no stand-in for it.
  bool late_nonzero(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out);
  const std::vector<LateSize>& late_sizes() const { return late_sizes_; }
  // Says of a tensor made from host data that it may be part of what is recorded as it is.
  void mark_constant(const Tensor& x) { constants_.push_back(x); }
  bool is_constant(const Storage& storage) const;
  // Says that a module brings the bytes of this storage and takes them away, and makes sure that it is always the same
  // tensor of it: `by` and `name` tell people which, and must outlive the recording. Holds also behind clear().
  void note_managed(const Storage& storage, const char* by, const std::string& name);
  struct Managed {
    const char* by;
    const std::string* name;
  };
  const Managed* managed(const Storage& storage) const;
  // Numbers of the host that were read while nothing but what was recorded runs again, as they were when the recording
  // began (graph/host_value.h).
  struct HostRead {
    std::shared_ptr<const int64_t> cell;
    int64_t value;
    const char* what;
  };
  const std::vector<HostRead>& host_reads() const { return host_reads_; }
  void note_host_read(const std::shared_ptr<const int64_t>& cell, const char* what);
  // What the function itself sets, it does not find.
  void note_host_write(const std::shared_ptr<const int64_t>& cell);
  // Whether writes to its bytes are recorded and not done.
  bool is_pending(const Storage& storage) const;
  // Whether the op cannot be recorded: what is run at once then.
  static const char* why_not_recordable(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs,
                                        std::span<const Tensor> into = {});
  // Takes a tensor's bytes out of sight until clear(): they are about to change, or may not be looked at.
  void hide(const Tensor& x);
  // Hands the reason to the owner; afterwards bytes are there, or StateError.
  void need_values(const std::string& reason);
  bool is_strict() const { return owner_.is_strict(); }
  // Forgets the calls from number `calls` on.
  void truncate(size_t calls) { calls_.resize(calls); }
  // Gives storages that got bytes to the tensors that the recording hid bytes of, and forgets everything.
  void clear();

  // What this thread is recording, or null.
  static Recording* current();

 private:
  friend class RecordingScope;
  Tensor new_tensor(const op::OutSpec& spec, std::span<const Tensor> in);
  Tensor traced(Layout layout, Device device, base::Intrusive<Storage> storage, uint32_t storage_number);
  uint32_t add_storage(const base::Intrusive<Storage>& storage, Device device);
  void add_call(RecordedCall call);
  void note_read(uint32_t tensor);
  void note_write(const op::OpDef& op, const Tensor& written, uint32_t tensor);

  RecordingOwner& owner_;
  uint32_t number_;
  uint64_t region_ = 0;  // the owner's number of the last one
  uint32_t regions_ = 0;
  std::vector<RecordedStorage> storages_;
  std::vector<RecordedTensor> tensors_;
  std::vector<RecordedCall> calls_;
  base::PointerMap storage_by_address_, tensor_by_address_;
  std::vector<Managed> managed_;
  base::PointerMap managed_by_address_;  // of the storage
  struct Draw {
    Generator* generator;
    uint64_t seed, offset;
    int64_t words;
    Tensor stretch;
  };
  std::vector<Draw> draws_;
  std::vector<Tensor> constants_;
  std::vector<LateSize> late_sizes_;
  std::vector<HostRead> host_reads_;
  std::vector<std::shared_ptr<const int64_t>> host_writes_;  // before they were read
  std::vector<Tensor> hidden_;  // real tensors whose bytes are about to change: they have none to show until then
};

// Runs what was recorded so far, if anything is being recorded: host code comes that is no part of a graph.
void finish_recorded(const char* reason);

// Records for the length of a scope.
class RecordingScope {
 public:
  explicit RecordingScope(Recording& recording);
  ~RecordingScope();
  RecordingScope(const RecordingScope&) = delete;
  RecordingScope& operator=(const RecordingScope&) = delete;

 private:
  Recording* before_;
  uint32_t trace_before_;
  op::Under under_;
};

// Runs the rest of the scope as if nothing was being recorded.
class RecordingPaused {
 public:
  RecordingPaused();
  ~RecordingPaused();
  RecordingPaused(const RecordingPaused&) = delete;
  RecordingPaused& operator=(const RecordingPaused&) = delete;

 private:
  Recording* before_;
  uint32_t trace_before_;
};

// A value of a recording. Tensors that share a storage have one each.
struct TracedValue final : TensorExtension {
  TracedValue(uint32_t of_recording, uint32_t its_number)
      : TensorExtension(Kind::kTraced), recording(of_recording), number(its_number) {}
  ~TracedValue() override {
    if (alive) alive->impl = nullptr;
  }
  std::unique_ptr<TensorExtension> copy() const override;
  std::string why_no_bytes(const Tensor& tensor) const override;
  bool provide_bytes(const Tensor& tensor, const char* asked) override;

  uint32_t recording, number;     // the number of the recording, and of the tensor in it
  const char* made_by = nullptr;  // the op
  std::shared_ptr<Alive> alive{};
};

}  // namespace chorale::graph
