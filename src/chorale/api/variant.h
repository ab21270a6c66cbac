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
  Tensor handle;               // kHandle: a tensor that no op has seen
  size_t index = 0;            // kOutside: the tensor from outside that it lies in; kWanted: which result
  bool is_itself = false;      // kOutside: that tensor, not a view of it
  graph::Layout layout;        // kOutside: the view, counted from the other's offset
  size_t root = kNowhere;      // where its history is
  std::optional<Whole> whole;  // what it is a part of; the rest is said of the part
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
    LayoutPtr placed{};          // of a sharded one
    bool is_captured = false;    // a captured tensor lies on that storage, too
    bool stays = false;          // it is one that the function captures, as an earlier graph has shown
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
    // Of one that an op reads: its place among the tensors from outside. Each call takes the one that is there then.
    size_t place = kNowhere;
    graph::Layout layout{};
    Device device{};
    LayoutPtr placed{};
    // One that must stay the tensor that it was, since others look at its memory.
    Tensor fixed{};
    size_t argument = kNowhere;  // of one that was an argument, too
  };
  // Where a gradient leaves the graph: to a tensor from outside, or to a leaf that ops know only a part or a view of.
  struct Exit {
    size_t place = kNowhere;
    Tensor leaf{};
  };
  std::vector<ArgumentGuard> arguments;
  std::vector<CapturedGuard> captured;
  std::vector<GradientGuard> gradients;
  std::vector<int64_t> watched;
  std::vector<graph::Recording::HostRead> host;
  Modes modes{};

  std::shared_ptr<const Segment> segment;
  std::vector<size_t> from_argument;  // by tensor from outside: which argument, or kNowhere
  std::vector<Tensor> gradient_of;    // by tensor from outside: the leaf whose gradient it is, if any
  std::vector<Tensor> outside;        // the rest
  // The tensor from outside at place p, in a call with these arguments; a part where that is sharded.
  Tensor outside_at(size_t p, const std::vector<Argument>& called_with) const;
  std::vector<Left> results;
  std::vector<std::pair<Tensor, Left>> left_gradients;
  std::vector<size_t> replaced;          // those among them whose old gradients no op reads
  std::vector<size_t> written;           // tensors from outside whose bytes change
  std::vector<std::vector<Exit>> exits;  // by piece
  bool once = false;                     // for one call only: it made tensors that the host keeps

  // Note [Direct calls] A step whose graph is one program, with a result and gradients that it makes anew, needs
  // nothing of what the general way does for each tensor: the operands of the program are put together once, and a call
  // fills in its arguments. A gradient that nobody else holds stays where it is, and is written over.
  struct Direct {
    Segment::Direct of;
    std::vector<Tensor> in, out;                      // of the program
    std::vector<std::pair<size_t, size_t>> changing;  // inputs of the program that calls bring, and their places
    std::vector<size_t> gradients;                    // by left gradient: the output of the program
    std::mutex mutex;                                 // one call at a time; others go the general way
  };
  std::unique_ptr<Direct> direct;
  // Called once it is compiled.
  void make_direct();

  std::string mismatch(const std::vector<Argument>& now, const CompileOptions& options) const;
  bool is_shared(const GradientGuard& guard, const Tensor& gradient, const std::vector<Argument>& now) const;
  // What the host has set otherwise since; empty: nothing.
  std::string host_mismatch() const;
  std::vector<std::string> guards() const;
};

}  // namespace chorale::compiled
