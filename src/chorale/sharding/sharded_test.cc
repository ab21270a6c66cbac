// Making sharded tensors, and leaving them: sections A1 to A3 and B4 of spec/tensor-parallel.md.
#include "chorale/sharding/sharded.h"

#include "chorale/base/error.h"
#include "chorale/sharding/sharding_test_util.h"
#include "chorale/testing/message_test_util.h"

namespace chorale {
namespace {

constexpr int kWorld = 4;

// spec: test_distribute_tensor_rank
TEST(Sharded, DistributesWhatTheSourceHas) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const auto of = [](int rank) { return numbers({12, 3}, 100 * rank); };
    {
      const CommCounter counter;
      const Tensor x = distribute(of(group.rank()), mesh, {shard(0)});
      EXPECT_EQ(counter.count(CallKind::kScatter), 1);
      EXPECT_EQ(counter.total(), 1);
      expect_same(to_local(x), chunk_of_rank(of(0), 0, group.rank(), kWorld));
    }
    EXPECT_EQ(placements_of(distribute(of(0), mesh, {shard(-1)})), at({shard(1)}));
    for (const Placement& p : {shard(0), replicate(), partial(), partial(Reduce::kAverage)}) {
      expect_near(full_tensor(distribute(of(group.rank()), mesh, {p}, 1)), of(1), 1e-15, concat(p));
    }
    const CommCounter counter;
    const Tensor own = distribute(of(group.rank()), mesh, {shard(0)}, std::nullopt);
    EXPECT_EQ(counter.total(), 0);
    expect_same(to_local(own), chunk_of_rank(of(group.rank()), 0, group.rank(), kWorld));
  });
}

// spec: test_distribute_tensor_errors
TEST(Sharded, RefusesToDistributeWhatDoesNotFit) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {2, 2}), line(group, {4});
    const Tensor x = numbers({4, 4});
    EXPECT_THROW(distribute(x, mesh, {shard(0)}), InvalidArgument);
    EXPECT_THROW(distribute(x, line, {partial(Reduce::kProduct)}), InvalidArgument);
    const Tensor leaf = set_requires_grad(numbers({4, 4}));
    EXPECT_THROW(distribute(mul(leaf, 2), line, {shard(0)}), InvalidArgument);
    const Tensor y = distribute(x, line, {shard(0)});
    EXPECT_THROW(distribute(y, mesh, {shard(0), replicate()}), InvalidArgument);
    EXPECT_THROW(distribute(y, line, {replicate()}), InvalidArgument);
    EXPECT_TRUE(distribute(y, line, {shard(0)}).is(y));
  });
}

// spec: test_distribute_tensor_uneven_sharding, test_split_tensor_1D
TEST(Sharded, PartsAreChunksThatMayBeShortOrEmpty) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    for (const int64_t n : {13, 14, 5, 3, 1, 0}) {
      for (const int64_t dim : {0, 1, 2}) {
        Shape sizes{3, 3, 3};
        sizes[static_cast<size_t>(dim)] = n;
        const Tensor x = numbers(sizes);
        const Tensor y = distribute(x, mesh, {shard(dim)});
        expect_same(to_local(y), chunk_of_rank(x, dim, group.rank(), kWorld));
        expect_same(full_tensor(y), x);
      }
    }
    // 13 over 4 gives 4, 4, 4, 1; 5 gives 2, 2, 1, 0.
    const int64_t thirteen[] = {4, 4, 4, 1}, five[] = {2, 2, 1, 0};
    EXPECT_EQ(to_local(distribute(numbers({13}), mesh, {shard(0)})).size(0), thirteen[group.rank()]);
    EXPECT_EQ(to_local(distribute(numbers({5}), mesh, {shard(0)})).size(0), five[group.rank()]);
  });
}

// spec: test_from_local, test_from_local_negative_dim, test_redistribute_negative_shard_dim
TEST(Sharded, IsMadeOfParts) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const Tensor part = set_requires_grad(ones({3, 3}, DType::kF64));
    EXPECT_EQ(from_local(part, mesh, {shard(0)}).sizes(), (Shape{12, 3}));
    EXPECT_EQ(from_local(part, mesh, {shard(-1)}).sizes(), (Shape{3, 12}));
    EXPECT_EQ(placements_of(from_local(part, mesh, {shard(-1)})), at({shard(1)}));
    const Tensor rows = from_local(part, mesh, {shard(0)});
    EXPECT_EQ(placements_of(redistribute(rows, {shard(-1)})), at({shard(1)}));
    EXPECT_TRUE(redistribute(rows, {shard(-2)}).is(rows)) << "nothing to do";
    EXPECT_EQ(from_local(part, mesh, {replicate()}).sizes(), (Shape{3, 3}));
    EXPECT_EQ(from_local(part, mesh, {partial()}).sizes(), (Shape{3, 3}));
    const Tensor before = mul(part, 3);
    const Tensor x = from_local(before, mesh, {shard(0)});
    EXPECT_FALSE(is_leaf(x));
    const Tensor y = mul(x, 3);
    backward(y, ones_like(y));
    expect_same(gradient(part), full({3, 3}, 9, DType::kF64));
    EXPECT_THROW(from_local(x, mesh, {shard(0)}), InvalidArgument);
  });
}

// spec: test_from_local_{backward,grad_placements}
TEST(Sharded, GradientsOfPartsArriveAsTheTruthTableSays) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    struct Case {
      Placement forward, gradient;
      int64_t comm;
      double value;
    };
    // The gradient that arrives has 2 in each part: of a sum, parts add up to 8.
    for (const Case& c :
         {Case{shard(0), shard(0), 0, 2}, Case{replicate(), replicate(), 0, 2}, Case{replicate(), partial(), 1, 8},
          Case{partial(), partial(), 1, 8}, Case{partial(), replicate(), 0, 2}}) {
      const Tensor part = set_requires_grad(ones({3, 3}, DType::kF64));
      const Tensor x = from_local(part, mesh, {c.forward});
      const Tensor dx = from_local(full({3, 3}, 2, DType::kF64), mesh, {c.gradient});
      const CommCounter counter;
      backward(x, dx);
      EXPECT_EQ(counter.total(), c.comm) << c.forward << " " << c.gradient;
      EXPECT_EQ(counter.all_reduces(), c.comm);
      expect_same(gradient(part), full({3, 3}, c.value, DType::kF64), concat(c.forward, " ", c.gradient));
    }
    // Told that partial gradients are wanted, nothing is reduced.
    const Tensor part = set_requires_grad(ones({3, 3}, DType::kF64));
    const Tensor x = from_local(part, mesh, {replicate()}, {.grad_placements = at({partial()})});
    const CommCounter counter;
    backward(x, from_local(full({3, 3}, 2, DType::kF64), mesh, {partial()}));
    EXPECT_EQ(counter.total(), 0);
    expect_same(gradient(part), full({3, 3}, 2, DType::kF64));
  });
}

// spec: test_from_local_uneven_sharding{,_raise_error}
TEST(Sharded, UnevenPartsNeedTheShapeOfTheWhole) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const Tensor whole = numbers({5, 2}), part = clone(chunk_of_rank(whole, 0, group.rank(), kWorld));
    const Tensor x = from_local(part, mesh, {shard(0)}, {.sizes = Shape{5, 2}, .strides = Strides{2, 1}});
    EXPECT_EQ(x.sizes(), (Shape{5, 2}));
    expect_same(full_tensor(x), whole);
    EXPECT_THROW(from_local(part, mesh, {shard(0)}, {.sizes = Shape{5, 2}}), InvalidArgument);
    EXPECT_THROW(from_local(part, mesh, {shard(0)}, {.strides = Strides{2, 1}}), InvalidArgument);
    EXPECT_THROW(from_local(part, mesh, {shard(0)}, {.sizes = Shape{50, 2}, .strides = Strides{2, 1}}),
                 InvalidArgument);
  });
}

// spec: test_metadata_consistency_check
TEST(Sharded, ComparesPartsWhenAsked) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const bool odd = group.rank() == 0;
    const Tensor dtype = zeros({2, 3}, odd ? DType::kF64 : DType::kF32);
    const Tensor wanted = set_requires_grad(zeros({2, 3}), odd);
    const Tensor strides = odd ? transpose(zeros({3, 2}), 0, 1) : zeros({2, 3});
    for (const Tensor& part : {dtype, wanted, strides}) {
      EXPECT_THROW(from_local(part, mesh, {replicate()}, {.check = true}), InvalidArgument);
      EXPECT_NO_THROW(from_local(part, mesh, {replicate()}));
    }
    // Copies are made equal to those of the first rank.
    const Tensor x = from_local(full({2}, group.rank() + 5), mesh, {replicate()}, {.check = true});
    expect_same(to_local(x), full({2}, 5));
  });
}

// spec: test_to_local, test_from_local_then_to_local
TEST(Sharded, PartsAndWholesShareOneGraph) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const Tensor part = set_requires_grad(ones({3, 3}, DType::kF64));
    const Tensor x = from_local(mul(part, 3), mesh, {shard(0)});
    backward(sum(to_local(x)));
    expect_same(gradient(part), full({3, 3}, 3, DType::kF64));
    const Tensor leaf = set_requires_grad(ones({3, 3}, DType::kF64));
    const Tensor y = to_local(mul(from_local(mul(leaf, 3), mesh, {shard(0)}), 2));
    backward(sum(y));
    expect_same(gradient(leaf), full({3, 3}, 6, DType::kF64));
    const NoGrad quiet;
    EXPECT_TRUE(to_local(x).is(to_local(x))) << "without gradients it is the part itself";
  });
}

// spec: test_inplace_on_local_tensor_view
TEST(Sharded, APartThatHasAHistoryIsNotOverwritten) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const Tensor leaf = set_requires_grad(ones({3, 3}, DType::kF64));
    const Tensor x = from_local(mul(leaf, 3), mesh, {shard(0)});
    const Tensor part = to_local(x);
    for (const Tensor& y : {part, narrow(part, 0, 1, 2), view(part, {9})}) {
      const std::string message = message_of<StateError>([&] { mul_(y, 2); });
      EXPECT_NE(message.find("what to_local() gave (f64 [3, 3])"), std::string::npos) << message;
      EXPECT_NE(message.find("write into a clone"), std::string::npos) << message;
    }
    expect_same(part, full({3, 3}, 3, DType::kF64), "nothing was written");
    backward(sum(mul_(clone(part), 2)));
    expect_same(gradient(leaf), full({3, 3}, 6, DType::kF64));
    // Where nothing is recorded the part is the memory of the tensor, for the code that fills it.
    const NoGrad quiet;
    fill_(to_local(x), 5);
    expect_same(full_tensor(x), full({12, 3}, 5, DType::kF64));
  });
}

// spec: test_to_local_grad_hint, test_full_tensor_grad_hint
TEST(Sharded, ARankMaySayThatItsGradientIsAPartOfIt) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    for (const bool at_once : {false, true}) {
      const Tensor x = set_requires_grad(distribute(ones({8, 3}, DType::kF64), mesh, {shard(0)}));
      CommCounter counter;
      const Tensor y =
          at_once ? full_tensor(x, at({partial()})) : to_local(redistribute(x, {replicate()}), at({partial()}));
      EXPECT_EQ(counter.all_gathers(), 1);
      EXPECT_EQ(counter.total(), 1);
      counter.reset();
      backward(y, ones({8, 3}, DType::kF64));
      EXPECT_EQ(counter.reduce_scatters(), 1);
      EXPECT_EQ(counter.total(), 1);
      expect_same(full_tensor(gradient(x)), full({8, 3}, 4, DType::kF64));
    }
  });
}

// spec: test_to_local_from_local_backward
TEST(Sharded, AGradientIsNotCountedOncePerRank) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const Tensor x = set_requires_grad(distribute(numbers({4}, 1), mesh, {shard(0)}));
    const Tensor s = sum(x);
    EXPECT_EQ(placements_of(s), at({partial()}));
    const Tensor all = full_tensor(from_local(to_local(s), mesh, {partial()}));
    EXPECT_EQ(all.item<double>(), 10);
    backward(all);
    expect_same(full_tensor(gradient(x)), ones({4}, DType::kF64));
  });
}

// spec: test_dtensor_stride
TEST(Sharded, KnowsTheStridesOfTheWhole) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    EXPECT_EQ(from_local(zeros({4, 8}), mesh, {shard(0)}).strides(), (Strides{8, 1}));
    EXPECT_EQ(from_local(zeros({8, 4}), mesh, {shard(1)}).strides(), (Strides{16, 1}));
    const Tensor permuted = permute(zeros({8, 4, 8}), {1, 2, 0});
    EXPECT_EQ(permuted.strides(), (Strides{8, 1, 32}));
    EXPECT_EQ(from_local(permuted, mesh, {shard(1)}).strides(), (Strides{32, 1, 128}));
  });
}

// spec: test_dtensor_spec_{hash,read_only_after_set}
TEST(Sharded, EqualLayoutsAreOne) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh(group, {2}), same(group, {2});
    EXPECT_TRUE(mesh == same);
    EXPECT_EQ(mesh.hash(), same.hash());
    Placements placements{shard(0)};
    const Tensor x = from_local(zeros({2}), mesh, placements), y = from_local(zeros({2}), same, placements);
    EXPECT_EQ(sharding::sharded(x).layout, sharding::sharded(y).layout);
    placements[0] = replicate();
    EXPECT_EQ(placements_of(x), at({shard(0)})) << "the list was copied";
    EXPECT_NE(sharding::layout_of(mesh, placements), sharding::sharded(x).layout);
  });
}

// spec: test_shard_tensor{,_2d}
TEST(Sharded, ASplitGridGivesEachRankItsOwnElement) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh line(group, {4}), grid(group, {2, 2});
    const Tensor x = numbers({4, 4});
    expect_same(to_local(distribute(x, line, {shard(0)})), narrow(x, 0, group.rank(), 1));
    expect_same(to_local(distribute(x, line, {shard(1)})), narrow(x, 1, group.rank(), 1));
    const Tensor ranks = numbers({2, 2});
    EXPECT_EQ(to_local(distribute(ranks, grid, {shard(0), shard(1)})).item<double>(), group.rank());
  });
}

// spec: test_dtensor_2d_mesh, DTensorMeshTest.test_device_mesh_nd
TEST(Sharded, MeshesOfSeveralDimensionsMultiplySizes) {
  run_ranks(8, [](comm::Group& group) {
    const Mesh grid(group, {2, 4}), cube(group, {2, 2, 2});
    const Tensor flat = full({3, 3}, group.rank()), deep = full({3, 3, 3}, group.rank());
    EXPECT_EQ(from_local(flat, grid, {shard(0), shard(1)}).sizes(), (Shape{6, 12}));
    EXPECT_EQ(from_local(flat, grid, {shard(0), shard(0)}).sizes(), (Shape{24, 3}));
    EXPECT_EQ(from_local(deep, cube, {shard(0), shard(1), shard(2)}).sizes(), (Shape{6, 6, 6}));
    EXPECT_EQ(from_local(deep, cube, {shard(0), shard(2), shard(0)}).sizes(), (Shape{12, 3, 6}));
    // Nested: rank (i, j) has block 4 i + j.
    const Tensor nested = full_tensor(from_local(flat, grid, {shard(0), shard(0)}));
    for (int r = 0; r < 8; ++r) EXPECT_EQ((nested.to_vector<int>()[static_cast<size_t>(9 * r)]), r);
  });
}

// spec: test_dtensor_spec_local_shard_offset
TEST(Sharded, KnowsWhereItsPartBegins) {
  run_ranks(8, [](comm::Group& group) {
    const Mesh grid(group, {2, 4});
    const op::Part part = sharding::own_part({24, 24}, {grid, {shard(0), shard(1)}});
    EXPECT_EQ(part.first, (Shape{12 * (group.rank() / 4), 6 * (group.rank() % 4)}));
    EXPECT_EQ(part.sizes, (Shape{12, 6}));
    const op::Part nested = sharding::own_part({24, 24}, {grid, {shard(0), shard(0)}});
    EXPECT_EQ(nested.first, (Shape{3 * group.rank(), 0}));
  });
}

// spec: test_from_local_sub_mesh, test_inplace_op_sub_mesh, test_default_value_sub_mesh, test_redistribute_sub_mesh
TEST(Sharded, RanksOutsideTheMeshTakePartWithNothing) {
  run_ranks(8, [](comm::Group& group) {
    const Mesh mesh(group, {2}, {}, {0, 2});
    const bool inside = group.rank() == 0 || group.rank() == 2;
    EXPECT_EQ(mesh.is_member(), inside);
    const Tensor x = from_local(full({3, 4}, group.rank() + 1, DType::kF64), mesh, {shard(0)});
    EXPECT_EQ(x.sizes(), (Shape{6, 4}));
    EXPECT_EQ(to_local(x).elems(), inside ? 12 : 0);
    const Tensor y = add(x, x);
    EXPECT_EQ(to_local(y).elems(), inside ? 12 : 0);
    if (inside) {
      EXPECT_EQ((to_local(y).to_vector<double>()[0]), 2 * (group.rank() + 1));
    }
    add_(x, y);
    if (inside) {
      EXPECT_EQ((to_local(x).to_vector<double>()[0]), 3 * (group.rank() + 1));
    }
    EXPECT_TRUE(equal_sharded(x, x));
    const Tensor total = sum(x);
    EXPECT_EQ(full_tensor(total).item<double>(), inside ? 12 * 3 * (1 + 3) : 0);
    const Tensor copies = redistribute(x, {replicate()});
    EXPECT_EQ(to_local(copies).elems(), inside ? 24 : 0);
    const auto halves = split(x, 3, 0);
    EXPECT_EQ(halves.size(), 2u);
    EXPECT_EQ(to_local(halves[0]).elems(), inside ? to_local(halves[0]).elems() : 0);
    // Views, products, random numbers and gradients too; shapes are those of the whole everywhere.
    Generator own(7);
    const Tensor w = set_requires_grad(uniform({4, 5}, mesh, {replicate()}, 0, 1, DType::kF64, own));
    const Tensor z = matmul(reshape(transpose(view(x, {2, 3, 4}), 0, 1), {6, 4}), w);
    EXPECT_EQ(z.sizes(), (Shape{6, 5}));
    backward(sum(softmax(z, 1)));
    EXPECT_EQ(gradient(w).sizes(), (Shape{4, 5}));
    const NoGrad quiet;
    EXPECT_EQ(full_tensor(gradient(w)).elems(), inside ? 20 : 0);
    sub_(w, gradient(w));
    EXPECT_EQ(to_local(w).elems(), inside ? 20 : 0);
  });
}

// spec: test_implicit_replication, test_auto_implicit_replication
TEST(Sharded, WholeAndShardedTensorsMixOnlyWhereThatIsSaid) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const Tensor x = distribute(numbers({4, 3}), mesh, {shard(0)});
    const Tensor row = numbers({3}, 10);
    try {
      add(x, row);
      ADD_FAILURE() << "a whole tensor was taken for a copy";
    } catch (const InvalidArgument& error) {
      EXPECT_NE(std::string(error.what()).find("distribute() it"), std::string::npos) << error.what();
    }
    for (const Tensor& one : {Tensor::from<double>({2}, {}), Tensor::from<double>({2}, {1})}) {
      const Tensor y = add(x, one);
      EXPECT_EQ(placements_of(y), at({shard(0)}));
      expect_same(full_tensor(y), add(numbers({4, 3}), 2));
    }
    {
      const ImplicitReplication scope;
      const Tensor y = add(x, row);
      EXPECT_EQ(placements_of(y), at({shard(0)}));
      expect_same(full_tensor(y), add(numbers({4, 3}), row));
    }
    EXPECT_THROW(add(x, row), InvalidArgument);
  });
}

// spec: test_mixed_partial_types_rejected
TEST(Sharded, PartialValuesAreOfOneKind) {
  run_ranks(8, [](comm::Group& group) {
    const Mesh mesh(group, {2, 4});
    EXPECT_THROW(from_local(zeros({2}), mesh, {partial(), partial(Reduce::kMax)}), InvalidArgument);
    EXPECT_NO_THROW(from_local(zeros({2}), mesh, {partial(), partial(Reduce::kAverage)}));
  });
}

// spec: x_implicit_redistribution_not_differentiated
TEST(Sharded, WhatAnOpMovesIsNotRecorded) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const Tensor a = set_requires_grad(distribute(numbers({8, 8}), mesh, {shard(0)}));
    const Tensor b = set_requires_grad(distribute(numbers({8, 8}, 5), mesh, {shard(1)}));
    const Tensor y = add(a, b);
    EXPECT_EQ(placements_of(y), at({shard(0)}));
    const CommCounter counter;
    backward(y, ones_like(y));
    EXPECT_EQ(counter.total(), 0) << "the gradient of a sum is sent nowhere";
    expect_same(full_tensor(gradient(a)), ones({8, 8}, DType::kF64));
    expect_same(full_tensor(gradient(b)), ones({8, 8}, DType::kF64));
  });
}

// spec: test_ops_zero_size_shards, test_redistribute_zero_size_shards
TEST(Sharded, EmptyPartsTakePart) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const Tensor whole = numbers({2, 8}), x = distribute(whole, mesh, {shard(0)});
    EXPECT_EQ(to_local(x).size(0), group.rank() < 2 ? 1 : 0);
    expect_same(full_tensor(add(x, x)), add(whole, whole));
    expect_same(full_tensor(mul(x, x)), mul(whole, whole));
    EXPECT_EQ(placements_of(sum(x)), at({partial()}));
    EXPECT_EQ(full_tensor(sum(x)).item<double>(), 120);
    const Tensor turned = transpose(x, 0, 1);
    EXPECT_EQ(placements_of(turned), at({shard(1)}));
    expect_same(full_tensor(turned), transpose(whole, 0, 1));
    expect_same(to_local(redistribute(x, {replicate()})), whole);
    const Tensor columns = redistribute(x, {shard(1)});
    EXPECT_EQ(to_local(columns).sizes(), (Shape{2, 2}));
    expect_same(to_local(columns), chunk_of_rank(whole, 1, group.rank(), kWorld));
  });
}

TEST(Sharded, RandomNumbersAreThoseOfOneRank) {
  for (const int ranks : {2, 3, 4}) {
    run_ranks(ranks, [&](comm::Group& group) {
      const Mesh mesh(group, {ranks});
      for (const Placement& p : {shard(0), shard(1), replicate()}) {
        Generator one(7), many(7);
        const Tensor expected = normal({5, 6}, 0, 1, DType::kF32, one);
        expect_same(full_tensor(normal({5, 6}, mesh, {p}, 0, 1, DType::kF32, many)), expected);
        const Tensor x = distribute(ones({5, 6}), mesh, {p});
        expect_same(full_tensor(dropout(x, 0.5, true, many)), dropout(ones({5, 6}), 0.5, true, one));
        expect_same(full_tensor(uniform({4, 3}, mesh, {p}, 0, 1, DType::kF32, many)),
                    uniform({4, 3}, 0, 1, DType::kF32, one));
      }
    });
  }
}

TEST(Sharded, SaysWhyItHasNoBytes) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh(group, {2}, {"tp"});
    const Tensor x = distribute(numbers({4}), mesh, {shard(0)});
    try {
      x.to_vector<double>();
      ADD_FAILURE();
    } catch (const StateError& error) {
      EXPECT_NE(std::string(error.what()).find("to_local()"), std::string::npos) << error.what();
    }
    EXPECT_NE(to_string(x).find("sharded as [S(0)] over a mesh of 2 ranks (tp)"), std::string::npos) << to_string(x);
    const Tensor y = local_map([](const std::vector<Tensor>& in) { return std::vector<Tensor>{mul(in[0], 3)}; }, {x},
                               {{shard(0)}}, {{shard(0)}})[0];
    expect_same(full_tensor(y), mul(numbers({4}), 3));
    const std::string text = explain_sharding([&] { sum(add(x, x)); });
    EXPECT_EQ(text, "add([S(0)], [S(0)]) -> [S(0)]\nsum([S(0)]) -> [P(sum)]\n");
  });
}

TEST(Sharded, ExplainsWhatIsSentAndWhatItCosts) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh(group, {2});
    const Tensor a = distribute(numbers({4, 8}), mesh, {shard(0)}), b = distribute(numbers({8, 2}), mesh, {shard(0)});
    const std::string text =
        explain_sharding([](const std::vector<Tensor>& in) { full_tensor(relu(matmul(in[0], in[1]))); }, {a, b});
    // A rank gives its 4 x 2 numbers of b, and then its 2 x 2 of the result; 6.6 us to begin and 0.6 for the hop.
    EXPECT_EQ(text,
              "matmul([S(0)], [S(0)] to [R]) -> [S(0)]  sends 1 all_gather, 64 B; about 7 us\n"
              "relu([S(0)]) -> [S(0)]\n"
              "redistribute([S(0)]) -> [R]  sends 1 all_gather, 32 B; about 7 us\n");
  });
}

// Each op without a rule, once for the same shapes and placements, with what it costs.
TEST(Sharded, WarnsOfWhatIsGathered) {
  testing::internal::CaptureStderr();
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh(group, {2});
    const Tensor x = distribute(numbers({4}), mesh, {shard(0)}, std::nullopt),
                 y = distribute(numbers({6}), mesh, {shard(0)}, std::nullopt);
    for (int i = 0; i < 2; ++i) {
      nonzero(x);
      nonzero(y);
    }
  });
  const std::string text = testing::internal::GetCapturedStderr();
  const auto count = [&](const std::string& part) {
    int found = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
    return found;
  };
  EXPECT_EQ(
      count("[sharding] nonzero cannot be split: its operands, [4] as [S(0)], are gathered on every rank (about 7"), 2)
      << text;
  EXPECT_EQ(count("[6] as [S(0)]"), 2) << text;
}

}  // namespace
}  // namespace chorale
