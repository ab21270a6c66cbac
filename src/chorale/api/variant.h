// A whole graph of a compiled function, and the guards under which it may run.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chorale/api/frame.h"

namespace chorale::compiled {

inline constexpr size_t kNowhere = SIZE_MAX;

// Where a tensor that a graph leaves behind comes from.
struct Left {
  enum class From : uint8_t { kNothing, kHandle, kOutside, kWanted } from = From::kNothing;
  Tensor handle;           // kHandle: a tensor that no op has seen
  size_t index = 0;        // kOutside: the tensor from outside that it lies in; kWanted: which result
  bool is_itself = false;  // kOutside: that tensor, not a view of it
  graph::Layout layout;    // kOutside: the view, counted from the other's offset
  size_t root = kNowhere;  // where its history is
};

// Modes that change what calls do.
struct Modes {
  bool grad, inference;
  std::optional<DType> autocast;
  bool same_bits;
  Device made_on;  // where new tensors are made (DeviceScope)
  bool operator==(const Modes&) const = default;
};
Modes modes_now();
// Whether gradients of a tensor are wanted.
bool wants_grad(const Tensor& x);
// The first of the arguments that lies on the same storage as argument `at`.
size_t first_on_storage(const std::vector<Argument>& arguments, size_t at);

struct Frame::Variant {
  struct ArgumentGuard {
    Argument then;
    graph::Layout layout;
    Device device;
    bool wants_grad = false;
    size_t same_storage_as = 0;  // the first argument on that storage
  };
  struct CapturedGuard {
    Tensor handle;
    const Storage* storage = nullptr;
    graph::Layout layout;
    bool wants_grad = false;
  };
  struct GradientGuard {
    Tensor leaf;
    bool has_one = false;
    Tensor gradient;  // the one that an op reads; undefined where it was only asked whether there is one
  };
  std::vector<ArgumentGuard> arguments;
  std::vector<CapturedGuard> captured;
  std::vector<GradientGuard> gradients;
  std::vector<int64_t> watched;
  std::vector<graph::Recording::HostRead> host;
  Modes modes{};

  std::shared_ptr<const Segment> segment;
  std::vector<size_t> from_argument;  // by tensor from outside: which argument, or kNowhere
  std::vector<Tensor> outside;        // those that are no arguments
  std::vector<Left> results;
  std::vector<std::pair<Tensor, Left>> left_gradients;
  std::vector<size_t> replaced;            // those among them whose old gradients no op reads
  std::vector<size_t> written;             // tensors from outside whose bytes change
  std::vector<std::vector<size_t>> exits;  // by piece: tensors from outside that gradients go to
  bool once = false;                       // for one call only: it made tensors that the host keeps

  // Note [Direct calls] A step whose graph is one program, with a result and gradients that it makes anew, needs
  // nothing of what the general way does for each tensor: the operands of the program are put together once, and a call
  // fills in its arguments. A gradient that nobody else holds stays where it is, and is written over.
  struct Direct {
    Segment::Direct of;
    std::vector<Tensor> in, out;                       // of the program
    std::vector<std::pair<size_t, size_t>> arguments;  // inputs of the program that are arguments
    std::vector<size_t> gradients;                     // by left gradient: the output of the program
    std::mutex mutex;                                  // one call at a time; others go the general way
  };
  std::unique_ptr<Direct> direct;
  // Called once it is compiled.
  void make_direct();

  std::string mismatch(const std::vector<Argument>& now, const CompileOptions& options) const;
  // What the host has set otherwise since; empty: nothing.
  std::string host_mismatch() const;
  std::vector<std::string> guards() const;
};

}  // namespace chorale::compiled
