// An op is one row: everything that eager execution, autograd, tracing, sharding, docs and tests need to know of it
// (docs/dev/style.md, section 2). Rows are constants; families of them are joined in op/table.cc.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "chorale/kernel/pointwise.h"
#include "chorale/op/input_set.h"
#include "chorale/op/shard_rule.h"
#include "chorale/tensor/tensor.h"

namespace chorale::op {

struct OpDef;

// A set of dtypes, one bit each.
class DTypeSet {
 public:
  constexpr DTypeSet() = default;
  constexpr DTypeSet(std::initializer_list<DType> dtypes) {
    for (DType dtype : dtypes) bits_ |= 1u << static_cast<unsigned>(dtype);
  }
  constexpr bool has(DType dtype) const { return bits_ >> static_cast<unsigned>(dtype) & 1u; }
  constexpr bool empty() const { return bits_ == 0; }
  constexpr friend DTypeSet operator|(DTypeSet a, DTypeSet b) {
    DTypeSet both;
    both.bits_ = a.bits_ | b.bits_;
    return both;
  }

 private:
  uint32_t bits_ = 0;
};
inline constexpr DTypeSet kFloats{DType::kF16, DType::kBF16, DType::kF32, DType::kF64};
inline constexpr DTypeSet kComplexes{DType::kC64, DType::kC128};
inline constexpr DTypeSet kInts{DType::kU8, DType::kI8, DType::kI16, DType::kI32, DType::kI64};
inline constexpr DTypeSet kBools{DType::kBool};
inline constexpr DTypeSet kReals = kFloats | kInts | kBools;
inline constexpr DTypeSet kAll = kReals | kComplexes;

// What a tensor is like, without its bytes.
inline TensorSpec spec_of(const Tensor& x) { return {x.sizes(), x.dtype(), x.device()}; }

// What an op's result looks like. By default it is new and contiguous.
struct OutSpec : TensorSpec {
  Strides strides{};     // used when `strided`
  bool strided = false;  // new memory with these strides (a layout other than row-major)
  int view_of = -1;      // the input whose bytes this shows, with `strides` and `offset`
  int64_t offset = 0;
};

struct InferArgs {
  const OpDef& op;
  std::span<const Tensor> in;
  const Attrs& attrs;
};
// Checks shapes, dtypes and attributes (InvalidArgument) and says what comes out. Reads no data.
using Infer = void (*)(const InferArgs& args, std::span<OutSpec> out);

// What a gradient rule may ask of its caller.
class GradContext {
 public:
  // Known of every input that needs a gradient, and of the others where the row saves it (Saves::specs).
  virtual TensorSpec spec(size_t input) const = 0;
  // Memory in which the gradient of this input is wanted (a bucket view), or undefined.
  virtual Tensor destination(size_t input) const = 0;

 protected:
  ~GradContext() = default;
};

// What a gradient rule gets. in[i] and out[i] are defined only where the row saves them.
struct GradArgs {
  std::span<const Tensor> in;
  std::span<const Tensor> out;
  std::span<const Tensor> dout;  // undefined where no gradient arrived; with one output it is always defined
  const Attrs& attrs;
  InputSet needed;
  const GradContext& context;

  // False for an input without gradient: its product is never computed.
  bool needs(size_t i) const { return needed.has(i); }
  Shape shape(size_t i) const { return i < in.size() && in[i].defined() ? in[i].sizes() : context.spec(i).sizes; }
  DType dtype(size_t i) const { return i < in.size() && in[i].defined() ? in[i].dtype() : context.spec(i).dtype; }
  // A rule may ignore it; one whose last op is expensive writes there with call_into and returns it. See emit() in
  // op/builder.h.
  Tensor destination(size_t i) const { return context.destination(i); }
};
// Returns one gradient per input, undefined for none. Written with ops, so that one rule serves eager and traced code
// and can be differentiated again. A gradient of a broadcast input may have the broadcast shape, and any floating
// dtype: the caller of the rule sums it to the input's shape and casts it.
using Grad = Tensors (*)(const GradArgs&);

// Which values a rule reads: a table test poisons everything else.
struct Saves {
  InputSet in{}, out{};
  bool specs = false;  // the rule asks for shapes or dtypes of inputs that need no gradient
};
inline constexpr Saves kSavesNothing{}, kSavesInputs{.in = InputSet::all()}, kSavesOutputs{.out = InputSet::all()};
inline constexpr Saves kSavesBoth{.in = InputSet::all(), .out = InputSet::all()};
inline constexpr Saves kSavesSpecs{.specs = true};
constexpr Saves saves_in(InputSet inputs) { return {.in = inputs}; }

// What autocast does with floating inputs: cast to the lower type, to f32, to the widest among them, or nothing.
enum class Cast : uint8_t { kNone, kLower, kF32, kWidest };

// An example of a call, for the table tests and for docs. Floating inputs are f64 (complex: c128); tests cast them.
struct Sample {
  std::vector<Tensor> in;
  Attrs attrs{};
  bool grad = true;          // compare the gradient with finite differences here
  InputSet constant{};       // floating inputs that have no gradient by definition
  double f32_tolerance = 0;  // 0: the default of the table tests
};
using Samples = std::vector<Sample> (*)();

// The gradient rule of a row that has none.
Tensors not_differentiable(const GradArgs&);

// What the table finds out about its rows when it joins them (op/table.cc); before that, nothing.
struct RowFacts {
  uint16_t number = 0;  // the place in all_ops(): kernels of a device are found by it (op/kernels.h)
  InputSet optional{};  // inputs that may be absent
};

// A row over lists, whose length n is that of the call: behind `own` inputs come `count` lists, the tensors of the
// first one before those of the second. Tensors at one place of all lists belong together, and nothing else does: a
// call with lists of n is n calls with lists of one.
struct Lists {
  size_t own = 0;
  size_t count = 1;
  // Results: new values of own inputs and of lists (numbered behind the own inputs), in this order, which call_into
  // writes in place where it is given those very tensors; behind them `fresh` lists of others.
  InputSet written{};
  size_t fresh = 0;
};

struct OpDef {
  const char* name;
  const char* inputs = "";  // "a, b, bias?": names for people; "?" may be absent, "xs..." any number
  int outputs = 1;          // of a row over lists: see result_count() in op/lists.h
  Lists (*lists)(const Attrs& attrs) = nullptr;   // of a row over lists
  const kernel::AttrsType& (*attrs)() = nullptr;  // the type of its attributes
  DTypeSet dtypes{};                              // of the first input
  Infer infer = nullptr;
  std::optional<kernel::Pointwise>
      pointwise{};               // the scalar expression of a pointwise row, for fusing and rendering it
  kernel::Kernel cpu = nullptr;  // null for views, which have no work to do; other devices: op/kernels.h
  Grad grad = nullptr;
  bool twice = true;  // the gradient can be differentiated again
  ShardRule shard{};
  Linear linear{};      // partial sums flow through
  Monotone monotone{};  // partial extremes do
  Saves saves{};
  Cast autocast = Cast::kNone;
  bool view = false;  // results show inputs' bytes
  // A view of some elements of its input, each at most once: where the gradient of that input is there already, the
  // gradient of the part can be added in its place, while the rule would put zeros around it and add the whole.
  bool part = false;
  bool dynamic = false;   // shapes of results depend on data: the kernel allocates them
  bool in_place = false;  // an output may be exactly an input: elements depend on the same elements only
  Samples samples = nullptr;
  const char* formula = "";  // for people; that of a pointwise row is its expression: see formula_of()
  mutable RowFacts facts{};
};

template <class T>
const kernel::AttrsType& attrs_of() {
  return attrs_type(base::TypeTag<T>{});
}

}  // namespace chorale::op
