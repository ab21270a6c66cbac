// Mixed precision: inside a scope, ops compute in the dtype that suits them.
//
//   {
//     const Autocast scope(DType::kBF16);
//     loss = cross_entropy(model(x), y);  // products in bf16, softmax and sums in f32
//   }
//   backward(loss);  // gradients of f32 parameters are f32
//
// Each row of the op table says what happens to its floating inputs (op::Cast): to the lower dtype, to f32, to the
// widest among them, or nothing. f64 is never lowered. Writes into existing tensors (in-place and out forms) are left
// alone. Scopes belong to a thread and nest; without one there is no cost at all.
#pragma once

#include <memory>
#include <optional>
#include <unordered_map>

#include "chorale/op/builder.h"

namespace chorale {

namespace autocast {

class Caster final : public op::Builder {
 public:
  // `lower` is f16 or bf16.
  explicit Caster(DType lower) : Builder(op::Place::kAutocast), lower_(lower) {}

  DType lower() const { return lower_; }

  void call(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<Tensor> out,
            op::Rest rest) override;
  void call_into(const op::OpDef& op, std::span<const Tensor> in, const Attrs& attrs, std::span<const Tensor> out,
                 op::Rest rest) override {
    rest.call_into(op, in, attrs, out);
  }
  std::shared_ptr<Builder> keep() override { return std::make_shared<Caster>(lower_); }

 private:
  // A parameter is cast once in a scope, however often it is used, and its gradient comes back through that one cast.
  struct CastParameter {
    Tensor parameter;  // kept, so that its address is not another's
    Tensor cast;
    uint32_t version;  // of the parameter's storage then
    bool recorded;     // for backward
  };

  Tensor cast(const Tensor& x, DType dtype, op::Rest rest);

  DType lower_;
  std::unordered_map<const Tensor::Impl*, CastParameter> parameters_;
};

}  // namespace autocast

class Autocast {
 public:
  // `enabled` = false: no casts inside this scope, though it may lie in another one.
  explicit Autocast(DType lower, bool enabled = true);

 private:
  autocast::Caster caster_;
  op::Under under_;
};

// Whether this thread is in such a scope.
bool autocast_enabled();
// The dtype to which the current scope lowers; nothing outside of scopes.
std::optional<DType> autocast_dtype();

}  // namespace chorale
