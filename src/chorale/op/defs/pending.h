// What rows that communicate share. Their kernels run on the host for tensors of any device, whose bytes groups know
// how to send. Results in flight are tensors that hide their bytes until wait_for() shows them.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/comm/work.h"
#include "chorale/kernel/creation_attrs.h"
#include "chorale/op/kernels.h"
#include "chorale/op/table.h"
#include "chorale/tensor/tensor.h"

namespace chorale::op {

struct Pending final : TensorExtension {
  // Beyond those that the tensor layer knows by name; 16 is that of group_tensor.cc.
  static constexpr auto kKind = static_cast<TensorExtension::Kind>(17);

  explicit Pending(comm::Work in_flight) : TensorExtension(kKind), work(std::move(in_flight)) {}
  std::unique_ptr<TensorExtension> copy() const override { return std::make_unique<Pending>(work); }
  std::string why_no_bytes(const Tensor& tensor) const override {
    return concat("a result of shape ", tensor.sizes(), " is still on its way between ranks: call wait_for() on it");
  }

  comm::Work work;
};

// Hides the bytes of `out`, into which the work that begin() starts writes.
template <class Begin>
void show_when_done(const Tensor& out, const Begin& begin) {
  // A call keeps what it writes, and the tensor keeps the call: with a view neither keeps itself.
  const Tensor bytes = out.view_as(out.sizes(), out.strides(), out.offset());
  out.impl()->extension = std::make_unique<Pending>(begin(bytes));
  out.impl()->data = nullptr;
}

// What a rank has where only others get something.
inline void fill_with_zeros(const Tensor& out) {
  Tensor target = out;
  launch(*find_op("full"), out.device(), {}, kernel::FullAttrs{out.sizes(), 0, out.dtype()}, {&target, 1});
}

}  // namespace chorale::op
