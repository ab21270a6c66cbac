#include <cmath>

#include "chorale/api/oracle_calls_test_util.h"
#include "chorale/op/functions.h"

namespace chorale::oracle {
namespace {

using Out = std::vector<Tensor>;

double real_number(const Json& value) {
  if (!value.is_string()) return value.get<double>();
  return value == "inf" ? INFINITY : value == "-inf" ? -INFINITY : NAN;
}
Out pair(const ValuesIndices& both) { return {both.values, both.indices}; }

void add_reductions(Calls& calls) {
  // clang-format off
#define REDUCTION(name) \
  calls[#name] = [](In in, const Json& a) -> Out { return {name(in[0], ints(a["dims"]), a["keepdim"])}; };
  REDUCTION(sum)
  REDUCTION(mean)
  REDUCTION(prod)
  REDUCTION(amax)
  REDUCTION(amin) REDUCTION(logsumexp) REDUCTION(any) REDUCTION(all)
#undef REDUCTION
      // clang-format on
      calls["var"] =
          [](In in, const Json& a) -> Out { return {var(in[0], ints(a["dims"]), a["keepdim"], a["correction"])}; };
  calls["stddev"] = [](In in, const Json& a) -> Out {
    return {stddev(in[0], ints(a["dims"]), a["keepdim"], a["correction"])};
  };
  calls["norm"] = [](In in, const Json& a) -> Out { return {norm(in[0], real_number(a["p"]), ints(a["dims"]))}; };
  calls["cumsum"] = [](In in, const Json& a) -> Out { return {cumsum(in[0], a["dim"])}; };
  calls["cumprod"] = [](In in, const Json& a) -> Out { return {cumprod(in[0], a["dim"])}; };
  calls["argmax"] = [](In in, const Json& a) -> Out { return {argmax(in[0], a["dim"].get<int64_t>())}; };
  calls["argmin"] = [](In in, const Json& a) -> Out { return {argmin(in[0], a["dim"].get<int64_t>())}; };
  calls["max"] = [](In in, const Json& a) -> Out { return pair(max(in[0], a["dim"].get<int64_t>())); };
  calls["min"] = [](In in, const Json& a) -> Out { return pair(min(in[0], a["dim"].get<int64_t>())); };
}

void add_products(Calls& calls) {
  calls["matmul"] = [](In in, const Json&) -> Out { return {matmul(in[0], in[1])}; };
  calls["linear"] = [](In in, const Json&) -> Out { return {linear(in[0], in[1], in[2])}; };
  calls["addmm"] = [](In in, const Json& a) -> Out {
    return {addmm(in[0], in[1], in[2], a["beta"].get<double>(), a["alpha"].get<int64_t>())};
  };
  calls["einsum"] = [](In in, const Json& a) -> Out { return {einsum(a["equation"].get<std::string>(), in)}; };
  // clang-format off
#define CONVOLUTIONS(D)                                                                                                \
  calls["conv" #D "d"] = [](In in, const Json& a) -> Out {                                                             \
    return {conv##D##d(in[0], in[1], in[2], ints(a["stride"]), ints(a["padding"]), ints(a["dilation"]), a["groups"])}; \
  };                                                                                                                   \
  calls["conv_transpose" #D "d"] = [](In in, const Json& a) -> Out {                                                   \
    return {conv_transpose##D##d(in[0], in[1], in[2], ints(a["stride"]), ints(a["padding"]),                           \
                                 ints(a["output_padding"]), a["groups"])};                                             \
  };
  CONVOLUTIONS(1) CONVOLUTIONS(2) CONVOLUTIONS(3)
#undef CONVOLUTIONS
  // clang-format on
}

void add_indices(Calls& calls) {
  calls["index_select"] = [](In in, const Json& a) -> Out { return {index_select(in[0], a["dim"], in[1])}; };
  calls["gather"] = [](In in, const Json& a) -> Out { return {gather(in[0], a["dim"], in[1])}; };
  calls["scatter_add"] = [](In in, const Json& a) -> Out { return {scatter_add(in[0], a["dim"], in[1], in[2])}; };
  calls["scatter"] = [](In in, const Json& a) -> Out {
    return {scatter(in[0], a["dim"].get<int64_t>(), in[1], in[2])};
  };
  calls["index_add"] = [](In in, const Json& a) -> Out {
    return {index_add(in[0], a["dim"], in[1], in[2], a["alpha"].get<int64_t>())};
  };
  calls["take_along_dim"] = [](In in, const Json& a) -> Out {
    return {take_along_dim(in[0], in[1], a["dim"].get<int64_t>())};
  };
  calls["masked_select"] = [](In in, const Json&) -> Out { return {masked_select(in[0], in[1])}; };
  calls["nonzero"] = [](In in, const Json&) -> Out { return {nonzero(in[0])}; };
  calls["index"] = [](In in, const Json&) -> Out { return {index(in[0], {in[1]})}; };
  calls["index2"] = [](In in, const Json&) -> Out { return {index(in[0], {in[1], in[2]})}; };
  calls["index_put"] = [](In in, const Json& a) -> Out { return {index_put(in[0], {in[1]}, in[2], a["accumulate"])}; };
  calls["embedding"] = [](In in, const Json& a) -> Out {
    return {embedding(in[0], in[1], a["padding"].get<int64_t>())};
  };
  calls["embedding_bag"] = [](In in, const Json& a) -> Out {
    EmbeddingBagOptions options;
    options.mode = a["mode"] == "sum" ? BagMode::kSum : BagMode::kMean;
    return {embedding_bag(in[0], in[1], in[2], options)};
  };
  calls["one_hot"] = [](In in, const Json& a) -> Out { return {one_hot(in[0], a["classes"])}; };
}

void add_shapes(Calls& calls) {
  calls["cat"] = [](In in, const Json& a) -> Out { return {cat(std::span(in), a["dim"].get<int64_t>())}; };
  calls["stack"] = [](In in, const Json& a) -> Out { return {stack(std::span(in), a["dim"].get<int64_t>())}; };
  calls["pad"] = [](In in, const Json& a) -> Out {
    const PadMode mode = a["mode"] == "constant"  ? PadMode::kConstant
                         : a["mode"] == "reflect" ? PadMode::kReflect
                                                  : PadMode::kReplicate;
    return {pad(in[0], ints(a["pads"]), mode, a.value("value", 0.0))};
  };
  calls["tile"] = [](In in, const Json& a) -> Out { return {tile(in[0], ints(a["repeats"]))}; };
  calls["repeat_interleave"] = [](In in, const Json& a) -> Out {
    return {repeat_interleave(in[0], a["repeats"].get<int64_t>(), a["dim"].get<int64_t>())};
  };
  calls["roll"] = [](In in, const Json& a) -> Out { return {roll(in[0], ints(a["shifts"]), ints(a["dims"]))}; };
  calls["tril"] = [](In in, const Json& a) -> Out { return {tril(in[0], a["diagonal"])}; };
  calls["triu"] = [](In in, const Json& a) -> Out { return {triu(in[0], a["diagonal"])}; };
  calls["diagonal"] = [](In in, const Json& a) -> Out { return {diagonal(in[0], a["offset"], a["dim1"], a["dim2"])}; };
  calls["unfold"] = [](In in, const Json& a) -> Out { return {unfold(in[0], a["dim"], a["size"], a["step"])}; };
  calls["flip"] = [](In in, const Json& a) -> Out { return {flip(in[0], ints(a["dims"]))}; };
  calls["slice"] = [](In in, const Json& a) -> Out {
    return {slice(in[0], a["dim"], a["start"], a["end"], a["step"])};
  };
  calls["permute"] = [](In in, const Json& a) -> Out { return {permute(in[0], ints(a["dims"]))}; };
  calls["expand"] = [](In in, const Json& a) -> Out { return {expand(in[0], ints(a["sizes"]))}; };
}

void add_order(Calls& calls) {
  calls["sort"] = [](In in, const Json& a) -> Out { return pair(sort(in[0], a["dim"], a["descending"])); };
  calls["topk"] = [](In in, const Json& a) -> Out {
    const ValuesIndices top = topk(in[0], a["k"], a["dim"]);
    return a["values_only"] ? Out{top.values} : pair(top);
  };
  calls["unique"] = [](In in, const Json&) -> Out {
    const Unique found = unique(in[0], true, true);
    return {found.values, found.inverse, found.counts};
  };
  calls["searchsorted"] = [](In in, const Json& a) -> Out { return {searchsorted(in[0], in[1], a["right"])}; };
  calls["bincount"] = [](In in, const Json& a) -> Out { return {bincount(in[0], {}, a["minlength"])}; };
  calls["cholesky_of_square"] = [](In in, const Json& a) -> Out {
    const Tensor one = eye(in[0].size(-1), -1, in[0].dtype(), in[0].device());
    const Tensor spd = add(matmul(in[0], transpose(in[0], -2, -1)), mul(one, 3));
    return {cholesky(spd, a["upper"])};
  };
  calls["solve_triangular"] = [](In in, const Json& a) -> Out {
    return {solve_triangular(in[0], in[1], a["upper"], a["left"], a["unitriangular"])};
  };
  // The signs of q's columns are free; r is compared without them.
  calls["qr_product"] = [](In in, const Json&) -> Out { return {abs(qr(in[0]).r)}; };
}

}  // namespace

Calls structured_calls() {
  Calls calls;
  add_reductions(calls);
  add_products(calls);
  add_indices(calls);
  add_shapes(calls);
  add_order(calls);
  return calls;
}

}  // namespace chorale::oracle
