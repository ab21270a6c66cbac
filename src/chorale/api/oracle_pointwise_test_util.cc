#include "chorale/api/oracle_calls_test_util.h"
#include "chorale/op/functions.h"

namespace chorale::oracle {
namespace {

Scalar scalar(const Json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number_integer()) return value.get<int64_t>();
  return value.get<double>();
}

Tensor input(In in, const Json& args) { return args.contains("transpose") ? t(in[0]) : in[0]; }

}  // namespace

std::vector<int64_t> ints(const Json& value) {
  if (value.is_number()) return {value.get<int64_t>()};
  return value.get<std::vector<int64_t>>();
}

Calls pointwise_calls() {
  Calls calls;
  // clang-format off
#define UNARY(name) \
  calls[#name] = [](In in, const Json& args) -> std::vector<Tensor> { return {name(input(in, args))}; };
  UNARY(neg)
  UNARY(abs)
  UNARY(sign)
  UNARY(reciprocal)
  UNARY(square) UNARY(sqrt) UNARY(rsqrt) UNARY(floor) UNARY(ceil) UNARY(round) UNARY(trunc) UNARY(exp) UNARY(exp2)
      UNARY(expm1) UNARY(log) UNARY(log2) UNARY(log10) UNARY(log1p) UNARY(sin) UNARY(cos) UNARY(tan) UNARY(tanh)
          UNARY(erf) UNARY(sigmoid) UNARY(relu) UNARY(silu) UNARY(isnan) UNARY(isinf) UNARY(isfinite) UNARY(logical_not)
              UNARY(bitwise_not) UNARY(real) UNARY(imag) UNARY(conj) UNARY(angle)
#undef UNARY
  // clang-format on
  // clang-format off
#define BINARY(name) calls[#name] = [](In in, const Json&) -> std::vector<Tensor> { return {name(in[0], in[1])}; };
                  BINARY(minimum) BINARY(maximum) BINARY(floor_divide) BINARY(eq) BINARY(ne) BINARY(lt) BINARY(le)
                      BINARY(gt) BINARY(ge) BINARY(logical_and) BINARY(logical_or) BINARY(logical_xor)
                          BINARY(bitwise_and) BINARY(bitwise_or) BINARY(bitwise_xor)
#undef BINARY
  // clang-format on
  // With a tensor or a number on the right.
  // clang-format off
#define EITHER(name)                                                           \
  calls[#name] = [](In in, const Json& args) -> std::vector<Tensor> {          \
    if (args.contains("scalar")) return {name(in[0], scalar(args["scalar"]))}; \
    return {name(in[0], in[1])};                                               \
  };
                              EITHER(add) EITHER(sub) EITHER(mul) EITHER(div) EITHER(remainder) EITHER(pow)
#undef EITHER
      // clang-format on
      calls["gelu"] = [](In in, const Json& args) -> std::vector<Tensor> {
    return {gelu(input(in, args), args.contains("approximate") ? Gelu::kTanh : Gelu::kErf)};
  };
  calls["leaky_relu"] = [](In in, const Json& a) -> std::vector<Tensor> { return {leaky_relu(in[0], a["slope"])}; };
  calls["elu"] = [](In in, const Json& a) -> std::vector<Tensor> { return {elu(in[0], a["alpha"])}; };
  calls["softplus"] = [](In in, const Json& a) -> std::vector<Tensor> {
    return {softplus(in[0], a["beta"], a["threshold"])};
  };
  calls["hardtanh"] = [](In in, const Json& a) -> std::vector<Tensor> { return {hardtanh(in[0], a["min"], a["max"])}; };
  calls["clamp"] = [](In in, const Json& a) -> std::vector<Tensor> {
    std::optional<Scalar> high;
    if (a.contains("max")) high = scalar(a["max"]);
    return {clamp(in[0], scalar(a["min"]), high)};
  };
  calls["to"] = [](In in, const Json& a) -> std::vector<Tensor> {
    return {to(in[0], dtype_from_name(a["dtype"].get<std::string>()))};
  };
  calls["where"] = [](In in, const Json&) -> std::vector<Tensor> { return {where(in[0], in[1], in[2])}; };
  calls["lerp"] = [](In in, const Json&) -> std::vector<Tensor> { return {lerp(in[0], in[1], in[2])}; };
  calls["addcmul"] = [](In in, const Json& a) -> std::vector<Tensor> {
    return {addcmul(in[0], in[1], in[2], scalar(a["value"]))};
  };
  calls["addcdiv"] = [](In in, const Json& a) -> std::vector<Tensor> {
    return {addcdiv(in[0], in[1], in[2], scalar(a["value"]))};
  };
  calls["masked_fill"] = [](In in, const Json& a) -> std::vector<Tensor> {
    return {masked_fill(in[0], in[1], scalar(a["value"]))};
  };
  return calls;
}

}  // namespace chorale::oracle
