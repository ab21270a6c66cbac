#include "chorale/op/prepare.h"

#include "chorale/base/error.h"
#include "chorale/op/collective.h"

namespace chorale::op {
namespace {

// "weight", the name of input i: "x, weight, bias?" is a list of them, and the last one of "xs..." stands for the rest.
std::string input_name(const OpDef& op, size_t i) {
  std::string_view list = op.inputs;
  for (size_t at = 0; at < i && list.find(',') != std::string_view::npos; ++at) list.remove_prefix(list.find(',') + 1);
  list = list.substr(0, list.find(','));
  const size_t begin = list.find_first_not_of(' '),
               end = list.find_first_of("?.", begin == std::string_view::npos ? 0 : begin);
  if (begin == std::string_view::npos) return concat("input ", i);
  return std::string(list.substr(begin, end == std::string_view::npos ? end : end - begin));
}

[[noreturn]] void raise_undefined(const OpDef& op, size_t i) {
  throw InvalidArgument(
      concat("[", op.name, "] ", op.lists ? "a tensor of its lists" : input_name(op, i), " (input ", i,
             ") is an undefined tensor: default-constructed, moved from, or a result that is absent"));
}

int category(DType dtype) { return is_complex(dtype) ? 3 : is_floating(dtype) ? 2 : dtype == DType::kBool ? 0 : 1; }

void check_output(const OpDef& op, const Tensor& out, const OutSpec& spec) {
  CHORALE_CHECK(out.defined(), "[", op.name, "] the tensor to write into is undefined");
  out.storage()->check_writable(op.name);
  CHORALE_CHECK(out.sizes() == spec.sizes, "[", op.name, "] the result has shape ", spec.sizes,
                " but the tensor to write into has ", out.sizes());
  CHORALE_CHECK(category(spec.dtype) <= category(out.dtype()), "[", op.name, "] a result of ", spec.dtype,
                " cannot be written into a tensor of ", out.dtype(), " without losing its kind; cast it first");
  CHORALE_CHECK(out.device() == spec.device, "[", op.name, "] the result is on ", spec.device,
                " but the tensor to write into is on ", out.device());
  for (size_t d = 0; d < out.sizes().size(); ++d) {
    CHORALE_CHECK(out.sizes()[d] <= 1 || out.strides()[d] != 0, "[", op.name,
                  "] cannot write into an expanded tensor of shape ", out.sizes(),
                  ": several elements share one place in memory; clone it first");
  }
}

}  // namespace

void check_inputs(const OpDef& op, std::span<const Tensor> in) {
  Device device{};
  bool found = false;
  for (size_t i = 0; i < in.size(); ++i) {
    if (!in[i].defined()) {
      if (!op.facts.optional.has(i)) [[unlikely]]
        raise_undefined(op, i);
      continue;
    }
    CHORALE_CHECK(!in[i].is_sparse(), "[", op.name, "] takes dense tensors, and input ", i,
                  " is sparse; see op/sparse.h, or call to_dense() first");
    if (!found) {
      device = in[i].device();
      found = true;
      // An image or a table of integers that was not cast.
      const bool wants_floating = !is_differentiable(in[i].dtype()) && op.dtypes.has(DType::kF32);
      CHORALE_CHECK(op.dtypes.has(in[i].dtype()), "[", op.name, "] is not defined for ", in[i].dtype(), " tensors",
                    wants_floating ? concat("; cast it first: to(", input_name(op, i), ", DType::kF32)") : "");
    }
    // A group is the host's, wherever the tensors are that it sends.
    CHORALE_CHECK(in[i].device() == device || (i == 1 && communicates(op)), "[", op.name,
                  "] inputs are on different devices: ", device, " and ", in[i].device(), "; move one of them");
  }
}

OutSpecs prepare_into(const OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out) {
  CHORALE_CHECK(!op.dynamic, "[", op.name, "] has no in-place or out form: the shape of its result depends on data");
  OutSpecs specs = prepare(op, in, attrs, out.size());
  for (size_t i = 0; i < out.size(); ++i) check_output(op, out[i], specs[i]);
  return specs;
}

void note_writes(const OpDef& op, std::span<const Tensor> out) {
  for (const Tensor& written : out) written.storage()->note_write(op.name);
}

}  // namespace chorale::op
