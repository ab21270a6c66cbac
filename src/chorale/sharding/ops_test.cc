// Ops on sharded tensors: sections A5 and B6 of spec/tensor-parallel.md.
#include "chorale/base/error.h"
#include "chorale/op/reduce_numbers.h"
#include "chorale/sharding/sharding_test_util.h"

namespace chorale {
namespace {

constexpr int kWorld = 4;
const Placement S0 = shard(0), S1 = shard(1), S2 = shard(2), R = replicate(), P = partial(),
                Pavg = partial(Reduce::kAverage), Pmax = partial(Reduce::kMax), Pmin = partial(Reduce::kMin);

void on_line(const std::function<void(const Mesh& mesh)>& body) {
  run_ranks(kWorld, [&](comm::Group& group) { body(Mesh(group, {kWorld})); });
}
Tensor put(const Tensor& x, const Mesh& mesh, const Placement& p) { return distribute(x, mesh, {p}, std::nullopt); }
// The same value in each part.
Tensor each(const Tensor& x, const Mesh& mesh, const Placement& p) { return from_local(x, mesh, {p}); }

// spec: test_addmm
TEST(ShardedOps, Addmm) {
  on_line([](const Mesh& mesh) {
    const int64_t M = 12, K = 8, N = 4;
    const Tensor a = op::sample({M, K}, 1), b = op::sample({K, N}, 2);
    struct Case {
      Shape bias;
      Placement a, b, out;
    };
    for (const Case& c : {Case{{N}, S0, R, S0}, Case{{M, N}, S0, R, S0}, Case{{N}, R, S1, S1}, Case{{M, N}, R, S1, S1},
                          Case{{N}, S1, S0, P}, Case{{1, N}, S1, S0, P}, Case{{M, 1}, R, R, R}, Case{{}, R, S1, S1}}) {
      const Tensor bias = op::sample(c.bias, 3);
      const Tensor y = addmm(put(bias, mesh, R), put(a, mesh, c.a), put(b, mesh, c.b));
      EXPECT_EQ(placements_of(y), at({c.out})) << c.bias;
      expect_near(full_tensor(y), addmm(bias, a, b), 1e-12);
    }
  });
}

// spec: test_addmm_auto_redistribute, test_addmm_empty_operand
TEST(ShardedOps, AddmmWithABiasThatIsAddedOnce) {
  on_line([](const Mesh& mesh) {
    const Tensor a = op::sample({12, 8}, 1), b = op::sample({8, 4}, 2), bias = op::sample({4}, 3);
    const auto leaf = [](const Tensor& x) { return set_requires_grad(clone(x)); };
    const Tensor a1 = leaf(a), b1 = leaf(b), c1 = leaf(bias);
    backward(sum(square(addmm(c1, a1, b1))));
    const Tensor a2 = set_requires_grad(put(a, mesh, S1)), b2 = set_requires_grad(put(b, mesh, S0)),
                 c2 = set_requires_grad(put(bias, mesh, R));
    CommCounter counter;
    const Tensor y = addmm(c2, a2, b2);
    EXPECT_EQ(counter.total(), 0);
    EXPECT_EQ(placements_of(y), at({P}));
    backward(sum(square(redistribute(y, {R}))));
    expect_near(full_tensor(gradient(a2)), gradient(a1), 1e-12);
    expect_near(full_tensor(gradient(b2)), gradient(b1), 1e-12);
    expect_near(full_tensor(gradient(c2)), gradient(c1), 1e-12);
    const Tensor nothing =
        addmm(put(bias, mesh, R), put(zeros({12, 0}, DType::kF64), mesh, R), put(zeros({0, 4}, DType::kF64), mesh, R));
    expect_near(full_tensor(nothing), expand(bias, {12, 4}), 1e-15);
  });
}

// spec: test_mm, test_bmm, test_baddbmm, test_matmul
TEST(ShardedOps, Products) {
  on_line([](const Mesh& mesh) {
    const Tensor a = op::sample({12, 8}, 1), b = op::sample({8, 16}, 2);
    for (const Placement& p : {R, S0, S1, P}) {
      for (const Placement& q : {R, S0, S1, P})
        expect_near(full_tensor(matmul(put(a, mesh, p), put(b, mesh, q))), matmul(a, b), 1e-12, concat(p, q));
    }
    const Tensor c = op::sample({4, 8, 6}, 3), d = op::sample({4, 6, 5}, 4), e = op::sample({4, 8, 5}, 5);
    for (const Placement& p : {R, S0, S1, S2, P}) {
      for (const Placement& q : {R, S0, S1, S2, P}) {
        expect_near(full_tensor(matmul(put(c, mesh, p), put(d, mesh, q))), matmul(c, d), 1e-12, concat(p, q));
        expect_near(full_tensor(add(put(e, mesh, p), matmul(put(c, mesh, p), put(d, mesh, q)))), add(e, matmul(c, d)),
                    1e-12, concat(p, q));
      }
    }
  });
}

// spec: test_mm_partial_inputs
TEST(ShardedOps, PartialSumsFlowIntoOneFactor) {
  on_line([](const Mesh& mesh) {
    const Tensor a = op::sample({8, 6}, 1), b = op::sample({6, 5}, 2);
    for (const auto& [p, q] : {std::pair(P, R), std::pair(R, P)}) {
      const CommCounter counter;
      const Tensor y = matmul(put(a, mesh, p), put(b, mesh, q));
      EXPECT_EQ(counter.total(), 0);
      EXPECT_EQ(placements_of(y), at({P}));
      expect_near(full_tensor(y), matmul(a, b), 1e-12);
    }
    const CommCounter counter;
    const Tensor y = matmul(put(a, mesh, P), put(b, mesh, P));
    EXPECT_EQ(counter.total(), 1) << "one of them is reduced";
    expect_near(full_tensor(y), matmul(a, b), 1e-12);
  });
}

// spec: test_t{,_partial,_1d}
TEST(ShardedOps, Transposing) {
  on_line([](const Mesh& mesh) {
    const Tensor a = op::sample({12, 8}, 1);
    EXPECT_EQ(placements_of(transpose(put(a, mesh, S0), 0, 1)), at({S1}));
    EXPECT_EQ(placements_of(transpose(put(a, mesh, S1), 0, 1)), at({S0}));
    const Tensor y = transpose(put(a, mesh, P), 0, 1);
    EXPECT_EQ(placements_of(y), at({P}));
    expect_near(full_tensor(y), transpose(a, 0, 1), 1e-15);
    const Tensor v = op::sample({8}, 2);
    EXPECT_EQ(placements_of(permute(put(v, mesh, S0), {0})), at({S0}));
  });
}

// spec: test_scaled_dot_product_attention
TEST(ShardedOps, AttentionOverBatchAndHeads) {
  on_line([](const Mesh& mesh) {
    const auto leaf = [](int seed) { return set_requires_grad(op::sample({4, 8, 8, 8}, seed)); };
    const Tensor q = leaf(1), k = leaf(2), v = leaf(3);
    const Tensor y = scaled_dot_product_attention(q, k, v, {.is_causal = true});
    backward(sum(square(y)));
    for (const Placement& p : {R, S0, S1}) {
      const auto copy = [&](const Tensor& x) { return set_requires_grad(put(clone(detach(x)), mesh, p)); };
      const Tensor q2 = copy(q), k2 = copy(k), v2 = copy(v);
      CommCounter counter;
      const Tensor z = scaled_dot_product_attention(q2, k2, v2, {.is_causal = true});
      EXPECT_EQ(placements_of(z), at({p}));
      const Tensor dz = mul(detach(z), 2);
      backward(z, dz);
      EXPECT_EQ(counter.total(), 0);
      EXPECT_EQ(placements_of(gradient(q2)), at({p}));
      expect_near(full_tensor(z), y, 1e-12);
      expect_near(full_tensor(gradient(q2)), gradient(q), 1e-10);
      expect_near(full_tensor(gradient(k2)), gradient(k), 1e-10);
      expect_near(full_tensor(gradient(v2)), gradient(v), 1e-10);
    }
  });
}

// spec: test_partial_replicate_add
TEST(ShardedOps, ACopyIsAddedToPartialValuesOnce) {
  on_line([](const Mesh& mesh) {
    const Tensor a = op::sample({2, 2}, 1), b = op::sample({2, 1}, 2);
    for (const Placement& p : {P, Pavg}) {
      const Tensor x = put(a, mesh, p), y = put(b, mesh, R);
      const CommCounter counter;
      const Tensor z = add(x, y);
      EXPECT_EQ(counter.total(), 0);
      EXPECT_EQ(placements_of(z), at({p}));
      expect_near(full_tensor(z), add(a, b), 1e-12);
    }
  });
}

// spec: test_mul_div_replicate_partial_asymmetry
TEST(ShardedOps, PartialSumsAreNoDenominators) {
  on_line([](const Mesh& mesh) {
    const Tensor two = each(full({8, 8}, 2, DType::kF64), mesh, P), three = put(full({8, 8}, 3, DType::kF64), mesh, R);
    {
      const CommCounter counter;
      const Tensor y = mul(three, two);
      EXPECT_EQ(counter.total(), 0);
      EXPECT_EQ(placements_of(y), at({P}));
      expect_near(full_tensor(y), full({8, 8}, 24, DType::kF64), 1e-15);
    }
    const CommCounter counter;
    const Tensor y = div(three, two);
    EXPECT_GT(counter.total(), 0);
    expect_near(full_tensor(y), full({8, 8}, 3.0 / 8, DType::kF64), 1e-15);
  });
}

// spec: test_mul_div_scalar_partial, test_neg_partial, test_add_sub_scalar_partial
TEST(ShardedOps, NumbersAndPartialSums) {
  on_line([](const Mesh& mesh) {
    const auto mine = [&](double scale) { return full({3}, scale * (mesh.coordinate(0) + 1), DType::kF64); };
    for (const Placement& p : {P, Pavg}) {
      const Tensor x = each(mine(1), mesh, p);
      const double whole = p == P ? 10 : 2.5;
      const CommCounter counter;
      for (const auto& [y, value] :
           {std::pair(mul(x, 2), 2 * whole), std::pair(div(x, 2), whole / 2), std::pair(neg(x), -whole)}) {
        EXPECT_EQ(placements_of(y), at({p}));
        EXPECT_EQ(counter.total(), 0);
        EXPECT_DOUBLE_EQ(value, value);
      }
      expect_near(full_tensor(mul(x, 2)), full({3}, 2 * whole, DType::kF64), 1e-15);
      expect_near(full_tensor(neg(x)), full({3}, -whole, DType::kF64), 1e-15);
      expect_near(full_tensor(add(x, 1)), full({3}, whole + 1, DType::kF64), 1e-15);
      expect_near(full_tensor(sub(x, 1)), full({3}, whole - 1, DType::kF64), 1e-15);
    }
    // The largest becomes the smallest.
    const Tensor turned = neg(each(mine(1), mesh, Pmax));
    EXPECT_EQ(placements_of(turned), at({Pmin}));
    expect_near(full_tensor(turned), full({3}, -4, DType::kF64), 1e-15);
  });
}

// spec: test_inplace_op_partial_to_replicate
// spec: test_inplace_add_partial_avg_with_replicate, test_inplace_add_replicate_with_partial_avg_requires_comm
TEST(ShardedOps, InPlaceOpsKeepThePlacement) {
  on_line([](const Mesh& mesh) {
    const Tensor sums = each(Tensor::from<double>({1}, {}), mesh, P);
    try {
      clamp_(sums, 0, 2);
      ADD_FAILURE() << "partial sums were clamped in place";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("P(sum)"), std::string::npos) << error.what();
    }
    const Tensor averages = each(full({8, 8}, mesh.coordinate(0) + 1, DType::kF64), mesh, Pavg);
    const Tensor copies = put(full({8, 8}, 3, DType::kF64), mesh, R);
    {
      const Tensor x = clone(averages);
      const CommCounter counter;
      add_(x, copies);
      EXPECT_EQ(counter.total(), 0);
      EXPECT_EQ(placements_of(x), at({Pavg}));
      expect_near(full_tensor(x), full({8, 8}, 5.5, DType::kF64), 1e-15);
    }
    const Tensor x = clone(copies);
    const CommCounter counter;
    add_(x, averages);
    EXPECT_GT(counter.total(), 0);
    EXPECT_EQ(placements_of(x), at({R}));
    expect_near(to_local(x), full({8, 8}, 5.5, DType::kF64), 1e-15);
  });
}

// spec: test_activations, test_dropout{,_backward,_partial_redistributes}
TEST(ShardedOps, NonlinearOpsReducePartialSumsFirst) {
  on_line([](const Mesh& mesh) {
    const Tensor a = op::sample({8, 6}, 1);
    for (const auto& f : {+[](const Tensor& x) { return relu(x); }, +[](const Tensor& x) { return gelu(x); },
                          +[](const Tensor& x) { return tanh(x); }, +[](const Tensor& x) { return exp(x); }}) {
      for (const Placement& p : {S0, S1, R}) {
        const Tensor y = f(put(a, mesh, p));
        EXPECT_EQ(placements_of(y), at({p}));
        expect_near(full_tensor(y), f(a), 1e-12);
      }
      const Tensor y = f(put(a, mesh, P));
      EXPECT_EQ(placements_of(y), at({R}));
      expect_near(full_tensor(y), f(a), 1e-12);
    }
    for (const Placement& p : {S0, S1, R, P}) {
      Generator one(3), many(3);
      const Tensor whole = set_requires_grad(clone(a)), x = set_requires_grad(put(a, mesh, p == P ? R : p));
      const Tensor expected = dropout(whole, 0.5, true, one);
      const Tensor y = dropout(p == P ? put(a, mesh, P) : x, 0.5, true, many);
      EXPECT_EQ(placements_of(y), at({p == P ? R : p}));
      expect_near(full_tensor(y), expected, 1e-12);
      if (p == P) continue;
      backward(expected, a);
      backward(y, put(a, mesh, p));
      expect_near(full_tensor(gradient(x)), gradient(whole), 1e-12);
    }
  });
}

// spec: test_linear_op_reductions
TEST(ShardedOps, Reductions) {
  on_line([](const Mesh& mesh) {
    const Tensor a = op::sample({12, 8, 8}, 1);
    const Tensor truth = gt(a, 0.2);
    using Reduction = Tensor (*)(const Tensor&, int64_t, bool);
    const std::vector<std::pair<const char*, Reduction>> all_of = {
        {"sum", [](const Tensor& x, int64_t d, bool keep) { return sum(x, d, keep); }},
        {"prod", [](const Tensor& x, int64_t d, bool keep) { return prod(x, d, keep); }},
        {"mean", [](const Tensor& x, int64_t d, bool keep) { return mean(x, d, keep); }},
        {"var", [](const Tensor& x, int64_t d, bool keep) { return var(x, d, keep); }},
        {"amax", [](const Tensor& x, int64_t d, bool keep) { return amax(x, d, keep); }},
        {"amin", [](const Tensor& x, int64_t d, bool keep) { return amin(x, d, keep); }},
        {"std", [](const Tensor& x, int64_t d, bool keep) { return stddev(x, d, keep); }},
        {"max", [](const Tensor& x, int64_t d, bool keep) { return max(x, d, keep).values; }},
        {"min", [](const Tensor& x, int64_t d, bool keep) { return min(x, d, keep).values; }},
        // Some are no numbers: 0 / 0.
        {"nansum",
         [](const Tensor& x, int64_t d, bool keep) { return nansum(where(gt(x, 0.8), x / 0 * 0, x), d, keep); }},
    };
    for (const auto& [name, reduce] : all_of) {
      for (const int64_t dim : {0, 1, 2}) {
        for (const bool keep : {false, true}) {
          expect_near(full_tensor(reduce(put(a, mesh, S0), dim, keep)), reduce(a, dim, keep), 1e-12,
                      concat(name, " ", dim));
        }
      }
    }
    for (const int64_t dim : {0, 1, 2}) {
      expect_same(full_tensor(all(put(truth, mesh, S0), dim)), all(truth, dim), "all");
      expect_same(full_tensor(any(put(truth, mesh, S0), dim)), any(truth, dim), "any");
    }
    EXPECT_EQ(placements_of(amax(put(a, mesh, S0), 0)), at({Pmax}));
    EXPECT_EQ(placements_of(sum(put(a, mesh, S0), 1)), at({S0}));
    // An average of averages would be wrong: 5 rows over 4 ranks.
    const Tensor b = op::sample({5, 3}, 2);
    expect_near(full_tensor(mean(put(b, mesh, S0))), mean(b), 1e-12);
  });
}

// spec: test_softmax_fwd, test_softmax_with_bwd
TEST(ShardedOps, Softmax) {
  on_line([](const Mesh& mesh) {
    const Tensor a = op::sample({8, 12, 16}, 1), da = op::sample({8, 12, 16}, 2);
    for (const int64_t dim : {0, 1, 2}) {
      for (const int64_t split : {0, 1, 2}) {
        const Tensor whole = set_requires_grad(clone(a)), x = set_requires_grad(put(a, mesh, shard(split)));
        const Tensor y = softmax(x, dim), expected = softmax(whole, dim);
        EXPECT_EQ(placements_of(y), at({dim == split ? R : shard(split)}));
        expect_near(full_tensor(y), expected, 1e-12);
        backward(expected, da);
        backward(y, put(da, mesh, placements_of(y)[0]));
        expect_near(full_tensor(gradient(x)), gradient(whole), 1e-12);
      }
    }
  });
}

// spec: test_layer_norm_{fwd,bwd,bwd_req_grad}
TEST(ShardedOps, LayerNorm) {
  on_line([](const Mesh& mesh) {
    const Tensor a = op::sample({8, 5, 12}, 1), w = op::sample({12}, 2), b = op::sample({12}, 3),
                 dy = op::sample({8, 5, 12}, 4);
    for (const bool affine : {true, false}) {
      const Tensor whole = set_requires_grad(clone(a)), w1 = set_requires_grad(clone(w)),
                   b1 = set_requires_grad(clone(b));
      backward(layer_norm(whole, {12}, affine ? w1 : Tensor(), affine ? b1 : Tensor()), dy);
      const Tensor x = set_requires_grad(put(a, mesh, S0)), w2 = set_requires_grad(put(w, mesh, R)),
                   b2 = set_requires_grad(put(b, mesh, R));
      const CommCounter counter;
      const Tensor y = layer_norm(x, {12}, affine ? w2 : Tensor(), affine ? b2 : Tensor());
      EXPECT_EQ(placements_of(y), at({S0}));
      backward(y, put(dy, mesh, S0));
      EXPECT_EQ(counter.total(), 0);
      expect_near(full_tensor(gradient(x)), gradient(whole), 1e-11);
      if (!affine) continue;
      EXPECT_EQ(placements_of(gradient(w2)), at({P}));
      EXPECT_EQ(placements_of(gradient(b2)), at({P}));
      expect_near(full_tensor(gradient(w2)), gradient(w1), 1e-11);
      expect_near(full_tensor(gradient(b2)), gradient(b1), 1e-11);
    }
  });
}

// spec: test_sharded_embedding_colwise
TEST(ShardedOps, EmbeddingByColumns) {
  on_line([](const Mesh& mesh) {
    for (const Shape& sizes : {Shape{17, 12}, Shape{21, 11}, Shape{23, 13}, Shape{23, 16}, Shape{15, 14}}) {
      const Tensor table = set_requires_grad(op::sample(sizes, 1)),
                   ids = to(op::sample_ints({5, 4}, 0, sizes[0], 2), DType::kI64);
      const auto padding = sizes[0] == 15 ? std::optional<int64_t>(3) : std::nullopt;
      const Tensor y = embedding(ids, table, padding);
      const Tensor dy = op::sample(y.sizes(), 3);
      backward(y, dy);
      const Tensor w = set_requires_grad(put(clone(detach(table)), mesh, S1));
      CommCounter counter;
      const Tensor z = embedding(put(ids, mesh, R), w, padding);
      EXPECT_EQ(placements_of(z), at({S2}));
      const Tensor dz = put(dy, mesh, S2);
      backward(z, dz);
      EXPECT_EQ(counter.total(), 0);
      expect_near(full_tensor(z), y, 1e-15);
      expect_near(full_tensor(gradient(w)), gradient(table), 1e-12);
    }
  });
}

// spec: test_sharded_embedding_rowwise, test_multiple_embeddings_rowwise
TEST(ShardedOps, EmbeddingByRows) {
  on_line([](const Mesh& mesh) {
    for (const Shape& sizes : {Shape{16, 22}, Shape{13, 22}, Shape{15, 14}}) {
      const Tensor table = set_requires_grad(op::sample(sizes, 1)),
                   ids = to(op::sample_ints({5, 4}, 0, sizes[0], 2), DType::kI64),
                   others = to(op::sample_ints({5, 4}, 0, sizes[0], 5), DType::kI64);
      const Tensor y = embedding(ids, table);
      backward(y, op::sample(y.sizes(), 3));
      const Tensor w = set_requires_grad(put(clone(detach(table)), mesh, S0));
      // Two of them at once, with different indices, do not mix up.
      const Tensor z = embedding(put(ids, mesh, R), w), other = embedding(put(others, mesh, R), w);
      EXPECT_EQ(placements_of(z), at({P}));
      CommCounter counter;
      const Tensor all = redistribute(z, {R});
      EXPECT_EQ(counter.all_reduces(), 1);
      EXPECT_EQ(counter.total(), 1);
      expect_near(to_local(all), y, 1e-15);
      expect_near(full_tensor(other), embedding(others, detach(table)), 1e-15);
      backward(all, put(op::sample(y.sizes(), 3), mesh, R));
      expect_near(full_tensor(gradient(w)), gradient(table), 1e-12);
    }
  });
}

// spec: test_{vector,foreach}_norm{,_partial}
TEST(ShardedOps, Norms) {
  on_line([](const Mesh& mesh) {
    const Tensor a = op::sample({12, 8}, 1);
    for (const double p : {0.0, 1.0, 2.0, 3.0, HUGE_VAL}) {
      const Tensor n = norm(put(a, mesh, S0), p);
      EXPECT_EQ(placements_of(n), at({Placement::partial(op::Partial::norm(p))})) << p;
      expect_near(full_tensor(n), norm(a, p), 1e-12, concat("norm ", p));
    }
    // [rank, 1] in each part of a sum: [6, 4] as a whole.
    const Tensor x = each(Tensor::from<double>({static_cast<double>(mesh.coordinate(0)), 1.0}, {2}), mesh, P);
    expect_near(full_tensor(norm(x, 2)), norm(Tensor::from<double>({6, 4}, {2}), 2), 1e-12);
  });
}

// spec: test_deterministic_{dropout_1d,rand_1d,uniform_2d}, test_manual_seed, test_rng_tracker_init
TEST(ShardedOps, RandomStateStaysInStep) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld}), grid(group, {2, 2});
    Generator one(11), many(11);
    const Tensor whole = normal({8, 4}, 0, 1, DType::kF32, one);
    const Tensor parts = normal({8, 4}, mesh, {S0}, 0, 1, DType::kF32, many);
    expect_same(full_tensor(parts), whole);
    EXPECT_EQ(one.state().offset, many.state().offset);
    expect_same(full_tensor(uniform({6, 6}, grid, {S0, S1}, 0, 1, DType::kF32, many)),
                uniform({6, 6}, 0, 1, DType::kF32, one));
    const Tensor copies = uniform({6}, mesh, {R}, 0, 1, DType::kF32, many);
    expect_same(to_local(copies), uniform({6}, 0, 1, DType::kF32, one));
    EXPECT_EQ(one.state().offset, many.state().offset);
  });
}

// Views that take dimensions apart keep strided splits: what a fused projection of queries, keys and values needs.
TEST(ShardedOps, AFusedProjectionIsSplitByHeads) {
  for (const int ranks : {2, 4}) {
    run_ranks(ranks, [&](comm::Group& group) {
      const Mesh mesh(group, {ranks});
      const int64_t B = 2, T = 3, H = 4, D = 8;
      const Tensor x0 = op::sample({B * T, D}, 1), w0 = op::sample({D, 3 * D}, 2), b0 = op::sample({3 * D}, 3);
      const auto heads = [&](const Tensor& bias, const Tensor& x, const Tensor& w) {
        return permute(view(addmm(bias, x, w), {B, T, 3, H, D / H}), {2, 0, 3, 1, 4});
      };
      const Tensor w1 = set_requires_grad(clone(w0)), b1 = set_requires_grad(clone(b0));
      const Tensor y1 = heads(b1, x0, w1);
      const Tensor dy = op::sample(y1.sizes(), 4);
      backward(y1, dy);
      const Tensor w = set_requires_grad(put(w0, mesh, strided_shard(1, 3))),
                   b = set_requires_grad(put(b0, mesh, strided_shard(0, 3)));
      CommCounter counter;
      const Tensor y = heads(b, put(x0, mesh, R), w);
      EXPECT_EQ(placements_of(y), at({shard(2)})) << "by heads";
      expect_near(full_tensor(select(y, 0, 1)), select(y1, 0, 1), 1e-12);
      counter.reset();
      backward(y, put(dy, mesh, shard(2)));
      EXPECT_EQ(counter.total(), 0);
      EXPECT_EQ(placements_of(gradient(w)), at({strided_shard(1, 3)}));
      expect_near(full_tensor(gradient(w)), gradient(w1), 1e-12);
      expect_near(full_tensor(gradient(b)), gradient(b1), 1e-12);
    });
  }
}

// Rows that tensor parallel has split are cut further: two pieces of five over two ranks.
TEST(ShardedOps, FillsAndExpandsUnequalPartsOfPieces) {
  run_ranks(4, [](comm::Group& group) {
    const Mesh grid(group, {2, 2});
    const Placements cut{strided_shard(0, 2), S0};
    const auto cut_up = [&](const Tensor& x) { return distribute(x, grid, cut, std::nullopt); };
    const Tensor x = cut_up(numbers({10, 2}));
    CommCounter counter;
    EXPECT_EQ(placements_of(zeros_like(x)), cut);
    fill_(x, 3);
    const Tensor rows = expand(cut_up(numbers({10})), {3, 10});
    EXPECT_EQ(placements_of(rows), at({strided_shard(1, 2), S1}));
    EXPECT_EQ(counter.total(), 0);
    expect_same(full_tensor(x), full({10, 2}, 3.0, x.dtype()));
    expect_same(full_tensor(rows), expand(numbers({10}), {3, 10}));
  });
}

// Tokens of a batch as rows of one matrix, and back, where ranks have unequal numbers of them.
TEST(ShardedOps, ViewsKeepUnevenSplits) {
  for (const int ranks : {2, 3, 4}) {
    run_ranks(ranks, [&](comm::Group& group) {
      const Mesh mesh(group, {ranks});
      const Tensor x0 = op::sample({3, 5, 4}, 1), w0 = op::sample({4, 2}, 2);
      const auto f = [](const Tensor& x, const Tensor& w) { return view(matmul(view(x, {15, 4}), w), {3, 5, 2}); };
      const Tensor x1 = set_requires_grad(clone(x0)), w1 = set_requires_grad(clone(w0));
      const Tensor y1 = f(x1, w1), dy = op::sample(y1.sizes(), 3);
      backward(y1, dy);
      const Tensor x = set_requires_grad(put(x0, mesh, shard(1))), w = set_requires_grad(put(w0, mesh, R));
      CommCounter counter;
      EXPECT_EQ(placements_of(view(x, {15, 4})), at({strided_shard(0, 3)}));
      const Tensor y = f(x, w);
      EXPECT_EQ(placements_of(y), at({shard(1)}));
      backward(y, put(dy, mesh, shard(1)));
      EXPECT_EQ(counter.total(), 0) << counter;
      expect_near(full_tensor(y), y1, 1e-12);
      expect_near(full_tensor(gradient(x)), gradient(x1), 1e-12);
      expect_near(full_tensor(gradient(w)), gradient(w1), 1e-12);
      // Something stands behind the split dimension: chunks of the longer one would begin elsewhere.
      expect_same(full_tensor(view(put(numbers({2, 5, 3}), mesh, shard(1)), {30})), numbers({30}));
    });
  }
  // More stretches than a placement counts.
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh(group, {2});
    const Tensor x = numbers({70'000, 2});
    expect_same(full_tensor(view(put(x, mesh, shard(1)), {140'000})), numbers({140'000}));
  });
}

}  // namespace
}  // namespace chorale
