// Moving between placements: sections A4 and B5 of spec/tensor-parallel.md.
#include "chorale/sharding/redistribute.h"

#include <random>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/op/collective.h"
#include "chorale/sharding/sharding_test_util.h"

namespace chorale {
namespace {

constexpr int kWorld = 4;
const Placement S0 = shard(0), S1 = shard(1), S2 = shard(2), R = replicate(), P = partial();

std::vector<std::pair<Shape, int64_t>> split_shapes() {
  return {{{12, 3}, 0}, {{13, 3}, 0}, {{14, 3}, 0}, {{3, 12}, 1}, {{3, 13}, 1}, {{3, 14}, 1}};
}

// spec: test_shard_to_replicate_forward_backward
TEST(Redistribute, ShardToReplicate) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    for (const auto& [sizes, dim] : split_shapes()) {
      for (const DType dtype : {DType::kF64, DType::kC128}) {
        const Tensor whole = to(numbers(sizes), dtype);
        const Tensor x = set_requires_grad(distribute(whole, mesh, {shard(dim)}));
        CommCounter counter;
        const Tensor y = redistribute(x, {R});
        EXPECT_EQ(counter.all_gathers(), 1);
        EXPECT_EQ(counter.total(), 1);
        expect_same(real(to_local(y)), numbers(sizes));
        counter.reset();
        backward(y, ones_like(y));
        EXPECT_EQ(counter.total(), 0);
        EXPECT_EQ(placements_of(gradient(x)), at({shard(dim)}));
        expect_same(real(full_tensor(gradient(x))), ones(sizes, DType::kF64));
      }
    }
  });
}

// spec: test_replicate_to_shard_forward_backward
TEST(Redistribute, ReplicateToShard) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    for (const auto& [sizes, dim] : split_shapes()) {
      const Tensor whole = numbers(sizes);
      const Tensor x = set_requires_grad(distribute(whole, mesh, {R}));
      CommCounter counter;
      const Tensor y = redistribute(x, {shard(dim)});
      EXPECT_EQ(counter.total(), 0);
      expect_same(to_local(y), chunk_of_rank(whole, dim, group.rank(), kWorld));
      const Tensor dy = ones_like(y);
      counter.reset();
      backward(y, dy);
      EXPECT_EQ(counter.all_gathers(), 1);
      EXPECT_EQ(counter.total(), 1);
      EXPECT_EQ(placements_of(gradient(x)), at({R}));
      expect_same(to_local(gradient(x)), ones(sizes, DType::kF64));
    }
  });
}

// spec: test_{replicate_to_replicate,partial_to_partial}_forward_backward
// spec: test_partial_to_replicate_forward_backward
TEST(Redistribute, PartialToReplicateAndNothingToDo) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    for (const Placement& p : {R, P}) {
      const Tensor part = set_requires_grad(ones({12, 3}, DType::kF64));
      const Tensor x = from_local(part, mesh, {p}, {.grad_placements = at({p})});
      const CommCounter counter;
      const Tensor y = redistribute(x, {p});
      backward(y, from_local(ones({12, 3}, DType::kF64), mesh, {p}));
      EXPECT_EQ(counter.total(), 0) << p;
      expect_same(gradient(part), ones({12, 3}, DType::kF64));
    }
    const Tensor part = set_requires_grad(ones({12, 3}, DType::kF64));
    const Tensor x = from_local(part, mesh, {P});
    CommCounter counter;
    const Tensor y = redistribute(x, {R});
    EXPECT_EQ(counter.all_reduces(), 1);
    EXPECT_EQ(counter.total(), 1);
    expect_same(to_local(y), full({12, 3}, 4, DType::kF64));
    counter.reset();
    backward(y, ones_like(y));
    EXPECT_EQ(counter.total(), 0) << "the gradient of a sum that is a copy everywhere is that copy";
    expect_same(gradient(part), ones({12, 3}, DType::kF64));
  });
}

// spec: test_partial_to_shard
TEST(Redistribute, PartialToShard) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    for (const auto& [sizes, dim] : split_shapes()) {
      const Tensor x = from_local(ones(sizes, DType::kF64), mesh, {P});
      const CommCounter counter;
      const Tensor y = redistribute(x, {shard(dim)});
      EXPECT_EQ(counter.reduce_scatters(), 1);
      EXPECT_EQ(counter.total(), 1);
      expect_same(to_local(y), chunk_of_rank(full(sizes, 4, DType::kF64), dim, group.rank(), kWorld));
    }
  });
}

// spec: test_replicate_to_local_partial_grad
TEST(Redistribute, AHintOfPartialGradientsReducesThemOnce) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const Tensor part = set_requires_grad(ones({4, 3}, DType::kF64));
    const CommCounter counter;
    const Tensor y = to_local(redistribute(from_local(part, mesh, {R}), {R}), at({P}));
    backward(y, full({4, 3}, group.rank() + 1, DType::kF64));
    EXPECT_EQ(counter.all_reduces(), 1);
    EXPECT_EQ(counter.total(), 1);
    expect_same(gradient(part), full({4, 3}, 10, DType::kF64));
  });
}

// spec: test_replicate_to_partial{,_different_reduce_ops}
// spec: test_redistribute_to_partial
TEST(Redistribute, NothingBecomesPartialOnRequest) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld}), grid(group, {2, 2});
    const Tensor whole = numbers({12, 3}, 4), x = distribute(whole, mesh, {R});
    EXPECT_THROW(redistribute(x, {P}), InvalidArgument);
    const CommCounter counter;
    const auto moved = [&](const Mesh& over, const Placements& to) {
      return sharding::move_part(whole, whole.sizes(), over, Placements(over.dims()), to);
    };
    expect_same(moved(mesh, {P}), div(whole, 4));
    expect_same(moved(grid, {P, P}), div(whole, 4));
    for (const Reduce kind : {Reduce::kAverage, Reduce::kMin, Reduce::kMax})
      expect_same(moved(mesh, {partial(kind)}), whole);
    EXPECT_THROW(moved(mesh, {partial(Reduce::kProduct)}), InvalidArgument);
    EXPECT_EQ(counter.total(), 0);

    const Tensor sums = from_local(numbers({4, 4}), grid, {P, P}), split = from_local(numbers({4, 4}), grid, {P, S0}),
                 maxima = from_local(numbers({4, 4}), grid, {R, partial(Reduce::kMax)});
    EXPECT_EQ(placements_of(redistribute(sums, {P, P})), at({P, P}));
    EXPECT_EQ(placements_of(redistribute(split, {P, R})), at({P, R}));
    EXPECT_EQ(placements_of(redistribute(maxima, {S0, partial(Reduce::kMax)})), at({S0, partial(Reduce::kMax)}));
    EXPECT_THROW(redistribute(split, {P, P}), InvalidArgument);
    EXPECT_THROW(redistribute(maxima, {P, R}), InvalidArgument);
    EXPECT_THROW(redistribute(maxima, {R, P}), InvalidArgument);
    EXPECT_THROW(redistribute(distribute(numbers({4, 4}), grid, {S0, R}), {P, R}), InvalidArgument);
    EXPECT_THROW(redistribute(distribute(numbers({4, 4}), grid, {R, R}), {R, P}), InvalidArgument);
  });
}

// spec: test_{shard,replicate}_to_replicate_forward_backward_datatype_conversion
// spec: test_backward_dtype_runs_backward_collective_at_that_dtype, test_forward_and_backward_dtype_differ
TEST(Redistribute, SendsInTheDtypeThatIsAskedFor) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    // 1 + 2^-9 is a number in f32 and none in bf16: whether it survives says in which type it was sent.
    const double fine = 1 + 1.0 / 512;
    struct Case {
      std::optional<DType> forward, backward;
      double value, gradient;
    };
    for (const Case& c : {Case{std::nullopt, std::nullopt, fine, fine}, Case{DType::kBF16, std::nullopt, 1, 1},
                          Case{std::nullopt, DType::kBF16, fine, 1}, Case{DType::kBF16, DType::kF32, 1, 1}}) {
      for (const Placement& from : {S0, R}) {
        const Tensor x = set_requires_grad(distribute(full({8, 2}, fine), mesh, {from}));
        const Tensor y = redistribute(x, {R}, {.forward_dtype = c.forward, .backward_dtype = c.backward});
        EXPECT_EQ(y.dtype(), c.forward.value_or(DType::kF32));
        expect_same(to(to_local(y), DType::kF32), full({8, 2}, c.value));
        backward(y, full_like(y, fine));
        EXPECT_EQ(gradient(x).dtype(), DType::kF32) << "the input's, whatever was sent";
        expect_same(full_tensor(gradient(x)), full({8, 2}, c.gradient));
      }
    }
  });
}

void expect_moves(const Mesh& mesh, const Shape& sizes, const Placements& from, const Placements& to, int64_t comm) {
  const Tensor whole = numbers(sizes), x = distribute(whole, mesh, from, std::nullopt);
  const CommCounter counter;
  const Tensor y = redistribute(x, to);
  if (comm >= 0) {
    EXPECT_EQ(counter.total(), comm) << from << " to " << to;
  }
  expect_same(to_local(y), to_local(distribute(whole, mesh, to, std::nullopt)), concat(from, " to ", to));
}

// spec: test_redistribute_shard_dim_change, test_shard_dim_alltoall
TEST(Redistribute, BetweenDimensions) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh line(group, {4}), grid(group, {2, 2});
    for (const Shape& sizes : {Shape{8, 8}, Shape{8, 8, 8}, Shape{8, 5}, Shape{5, 8}, Shape{5, 5}}) {
      expect_moves(line, sizes, {S0}, {S1}, 1);
      expect_moves(line, sizes, {S1}, {S0}, 1);
      expect_moves(grid, sizes, {S0, S1}, {S0, S0}, 1);
      expect_moves(grid, sizes, {S0, S1}, {S1, S0}, 2);
      expect_moves(grid, sizes, {S0, S0}, {S1, S1}, 2);
    }
    const Tensor x = distribute(numbers({12, 4}), grid, {S0, S1});
    EXPECT_EQ(to_local(redistribute(x, {S0, S0})).sizes(), (Shape{3, 4}));
    EXPECT_EQ(to_local(redistribute(x, {S0, S0})).strides(), (Strides{4, 1}));
  });
}

// spec: test_redistribute_shard_dim_multi_dim_mesh
TEST(Redistribute, OnACubeOfRanks) {
  run_ranks(8, [](comm::Group& group) {
    const Mesh cube(group, {2, 2, 2});
    const Shape sizes{8, 8, 8};
    expect_moves(cube, sizes, {S0, S0, S0}, {S1, S1, S1}, 3);
    expect_moves(cube, sizes, {S0, S1, S0}, {S1, S0, S0}, 3);
    expect_moves(cube, sizes, {S0, S1, S2}, {S2, S1, S0}, 2);
    expect_moves(cube, sizes, {S1, S0, S0}, {R, S0, S0}, 1);
    expect_moves(cube, sizes, {S1, R, S0}, {R, S0, S0}, 2);
    expect_moves(cube, sizes, {S0, S0, S1}, {S0, S1, S2}, 2);
  });
}

// spec: test_redistribute_uneven_sharding
TEST(Redistribute, UnevenNestedShards) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh grid(group, {2, 2});
    for (const Shape& sizes : {Shape{10, 5}, Shape{9, 5}, Shape{3, 5}, Shape{1, 3}}) {
      for (const Placements& p : {at({S0, S0}), at({S0, S1})})
        expect_same(full_tensor(distribute(numbers(sizes), grid, p)), numbers(sizes));
    }
  });
}

// spec: test_one_chunk_mesh
TEST(Redistribute, ADimensionOfOneRankSendsNothing) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {4, 1});
    for (const Placement& from : {S0, S1, R, P}) {
      for (const Placement& to : {S0, S1, R}) {
        const Tensor x = from_local(numbers({4, 4}), mesh, {R, from});
        const CommCounter counter;
        expect_same(to_local(redistribute(x, {R, to})), numbers({4, 4}));
        EXPECT_EQ(counter.total(), 0) << from << " to " << to;
      }
    }
  });
}

// spec: test_multi_dim_mesh
TEST(Redistribute, EveryPairOnAGrid) {
  run_ranks(8, [](comm::Group& group) {
    const Mesh mesh(group, {4, 2});
    const Placement kinds[] = {S0, S1, R, P};
    // Only the first rank's data counts.
    const Tensor mine = group.rank() == 0 ? numbers({16, 24}) : full({16, 24}, -7, DType::kF64);
    for (const Placement& a : kinds) {
      for (const Placement& b : kinds) {
        const Tensor x = distribute(mine, mesh, {a, b});
        for (const Placement& c : kinds) {
          for (const Placement& d : kinds) {
            if ((c.is_partial() && !(a == c)) || (d.is_partial() && !(b == d))) continue;
            expect_near(full_tensor(redistribute(x, {c, d})), numbers({16, 24}), 1e-14, concat(a, b, " to ", c, d));
          }
        }
      }
    }
  });
}

// spec: test_shard_to_replicate_forward_backward_backward
TEST(Redistribute, SecondDerivatives) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const Tensor x0 = op::sample({8, 3}, 1), w0 = op::sample({3, 5}, 2);
    const auto loss_of = [](const Tensor& y) { return mean(square(y)); };
    const Tensor a = set_requires_grad(clone(x0));
    const Tensor da = grad({loss_of(relu(matmul(a, w0)))}, {a}, {.create_graph = true})[0];
    const Tensor dda = grad({sum(square(da))}, {a})[0];

    const Tensor x = set_requires_grad(distribute(x0, mesh, {S0})), w = distribute(w0, mesh, {R});
    CommCounter counter;
    const Tensor loss = loss_of(full_tensor(relu(matmul(x, w))));
    EXPECT_EQ(counter.all_gathers(), 1);
    EXPECT_EQ(counter.total(), 1);
    counter.reset();
    const Tensor dx = grad({loss}, {x}, {.create_graph = true})[0];
    EXPECT_EQ(counter.total(), 0);
    const Tensor penalty = sum(square(full_tensor(dx)));
    counter.reset();
    const Tensor ddx = grad({penalty}, {x})[0];
    EXPECT_EQ(counter.all_gathers(), 1) << "the gradient of the chunk that backward took";
    EXPECT_EQ(counter.total(), 1);
    expect_near(full_tensor(dx), da, 1e-12);
    expect_near(full_tensor(ddx), dda, 1e-12);
  });
}

// spec: test_strided_shard_{,to_shard_}redistribution, test_partial_to_strided_shard_redistribution
// spec: test_strided_shard_to_partial_raises
TEST(Redistribute, StridedShards) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh grid(group, {2, 2}), line(group, {4});
    // [S(0 in 2), S(0)] of 8 rows: (0,0) has 0-1, (0,1) 4-5, (1,0) 2-3, (1,1) 6-7.
    const Tensor x = distribute(numbers({8}), grid, {strided_shard(0, 2), S0});
    const double first[] = {0, 4, 2, 6};
    EXPECT_EQ((to_local(x).to_vector<double>()), (std::vector<double>{first[group.rank()], first[group.rank()] + 1}));
    expect_same(full_tensor(x), numbers({8}));
    // 9 elements in 2 pieces over 4 ranks.
    const std::vector<double> parts[] = {{0, 1, 5}, {2, 3, 6}, {4, 7}, {8}};
    const Tensor y = distribute(numbers({9}), line, {strided_shard(0, 2)});
    EXPECT_EQ((to_local(y).to_vector<double>()), parts[group.rank()]);
    expect_same(full_tensor(y), numbers({9}));
    expect_moves(line, {9, 2}, {strided_shard(0, 2)}, {S0}, 1);
    expect_moves(line, {9, 2}, {S0}, {strided_shard(0, 2)}, 1);
    expect_moves(line, {12, 8}, {strided_shard(0, 3)}, {S1}, 1);
    // What is cut behind a strided shard is cut anew where that changes.
    for (const Placements& from : {Placements{R, R}, {S0, R}, {R, S0}, {S0, S0}, {S0, S1}, {S1, S0}}) {
      expect_moves(grid, {8, 5}, from, {strided_shard(0, 2), S0}, -1);
      expect_moves(grid, {8, 5}, {strided_shard(0, 2), S0}, from, -1);
      expect_moves(grid, {9, 5}, from, {strided_shard(0, 2), S0}, -1);
      expect_moves(grid, {9, 5}, {strided_shard(0, 2), S0}, from, -1);
    }
    const Tensor sums = from_local(numbers({9}), line, {P});
    EXPECT_EQ((to_local(redistribute(sums, {strided_shard(0, 2)})).to_vector<double>()),
              (mul(Tensor::from(parts[group.rank()], {static_cast<int64_t>(parts[group.rank()].size())}), 4)
                   .to_vector<double>()));
    EXPECT_THROW(redistribute(y, {P}), InvalidArgument);
  });
}

// spec: test_full_tensor_sync, test_dtensor_async_output
TEST(Redistribute, IsWaitedForAtFirstUse) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const Tensor x = distribute(numbers({8, 3}), mesh, {S0});
    const auto pending = [](const Tensor& y) { return is_pending(sharding::sharded(y).local); };
    const Tensor y = redistribute(x, {R}, {.async = true});
    EXPECT_TRUE(pending(y));
    const Tensor turned = view(y, {24});
    EXPECT_TRUE(pending(turned)) << "a view does not wait";
    const Tensor twice = add(turned, turned);
    EXPECT_FALSE(pending(twice)) << "an op does";
    expect_same(full_tensor(twice), mul(numbers({24}), 2));
    EXPECT_FALSE(is_pending(full_tensor(redistribute(x, {S1}, {.async = true}))));
    EXPECT_FALSE(is_pending(full_tensor(y)));
    expect_same(full_tensor(y), numbers({8, 3}));
    expect_same(to_local(redistribute(x, {S1}, {.async = true})), chunk_of_rank(numbers({8, 3}), 1, group.rank(), 4));
  });
}

// What a rank hands over at most when A4's planner moves a tensor, written from the catalogue's words: shards are
// cleared from the last mesh dimension to the first where the cuts outside of a target differ, then the rest follows
// from the first to the last; all parts are as long as the first, and what is cut to be sent is padded to equal pieces.
int64_t planned_bytes(const Shape& sizes, const Mesh& mesh, const Placements& from, const Placements& to) {
  Placements now = from;
  int64_t elems = 0;
  const auto step = [&](size_t m, const Placement& target) {
    if (now[m] == target) return;
    const auto up = [](int64_t size, int64_t parts) { return (size + parts - 1) / parts; };
    Shape part = sizes;
    for (size_t other = 0; other < mesh.dims(); ++other) {
      if (!now[other].is_shard()) continue;
      int64_t& size = part[static_cast<size_t>(now[other].dim())];
      size = now[other].pieces() * up(up(size, now[other].pieces()), mesh.shape()[other]);
    }
    if (!now[m].is_replicate()) {
      if (target.is_shard() && !target.is_strided()) {
        int64_t& size = part[static_cast<size_t>(target.dim())];
        size = up(size, mesh.shape()[m]) * mesh.shape()[m];
      }
      elems += count_elems(part);
    }
    now[m] = target;
  };
  const auto cuts = [](const Placements& placements, int64_t dim, size_t before) {
    std::vector<size_t> found;
    for (size_t m = 0; m < before; ++m) {
      if (placements[m].is_shard() && placements[m].dim() == dim) found.push_back(m);
    }
    return found;
  };
  for (size_t m = mesh.dims(); m-- > 0;) {
    const bool nested = to[m].is_shard() && cuts(now, to[m].dim(), m) != cuts(to, to[m].dim(), m);
    step(m, nested ? Placement() : to[m]);
  }
  for (size_t m = 0; m < mesh.dims(); ++m) step(m, to[m]);
  return elems * static_cast<int64_t>(sizeof(double));
}

// Any pair of placements, uneven shapes: what comes out is what a direct distribution gives.
void expect_random_move(const Mesh& mesh, int seed) {
  std::mt19937 random(static_cast<unsigned>(seed));
  const auto draw = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  const int dims = 1 + draw(3);
  Shape sizes;
  for (int d = 0; d < dims; ++d) sizes.push_back(1 + draw(9));
  Placements from, to;
  for (size_t m = 0; m < mesh.dims(); ++m) {
    const auto any = [&]() -> Placement {
      const int kind = draw(6);
      if (kind < 2) return R;
      // Pieces of rows that a mesh dimension further in has cut are for fully sharded training alone.
      return mesh.dims() == 1 && kind == 2 ? strided_shard(draw(dims), 2 + draw(2)) : shard(draw(dims));
    };
    from.push_back(draw(4) == 0 ? P : any());
    to.push_back(from.back().is_partial() && draw(3) == 0 ? P : any());
  }
  const Tensor whole = numbers(sizes), x = distribute(whole, mesh, from, std::nullopt);
  const std::string what = concat("seed ", seed, ": ", sizes, " over a ", mesh, ", ", from, " to ", to);
  CommCounter counter;
  const Tensor y = redistribute(x, to);
  EXPECT_LE(counter.bytes(), planned_bytes(sizes, mesh, from, to)) << what << ": " << counter;
  EXPECT_LE(counter.total(), static_cast<int64_t>(sharding::plan(from, to).size())) << what;
  expect_same(to_local(y), to_local(distribute(whole, mesh, to, std::nullopt)), what);
}

TEST(Redistribute, RandomPairsSendNoMoreThanPlanned) {
  constexpr int kSeeds = 500;
  run_ranks(4, [](comm::Group& group) {
    const Mesh grid(group, {2, 2}), line(group, {4});
    for (int seed = 0; seed < kSeeds && !testing::Test::HasFailure(); ++seed) {
      if (seed % 3 != 2) expect_random_move(seed % 3 == 0 ? grid : line, seed);
    }
  });
  run_ranks(8, [](comm::Group& group) {
    const Mesh cube(group, {2, 2, 2});
    for (int seed = 2; seed < kSeeds && !testing::Test::HasFailure(); seed += 3) expect_random_move(cube, seed);
  });
}

TEST(RedistributeFaults, NameCoordinatesInTheMesh) {
  const auto text_of = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const CommError& error) {
      return error.what();
    }
    return "";
  };
  const auto expect_text = [](const std::string& text, int rank, int culprit) {
    const auto place = [](int r) { return concat("rank ", r, " at dp ", r / 2, ", tp ", r % 2); };
    const std::string wanted =
        concat("in the mesh of 2 x 2 ranks (dp, tp) this is ", place(rank),
               rank == culprit ? ", which is the culprit" : concat(", and the culprit ", place(culprit)));
    EXPECT_NE(text.find(wanted), std::string::npos) << text << "\nwanted: " << wanted;
  };
  // Rank 3 makes another call than rank 2, with which it shares a line along tp.
  run_ranks(4, [&](comm::Group& group) {
    const Mesh mesh(group, {2, 2}, {"dp", "tp"});
    const Tensor x = distribute(numbers({4, 4}), mesh["tp"], {shard(0)}, std::nullopt);
    const std::string text =
        text_of([&] { group.rank() == 3 ? redistribute(x, {shard(1)}) : redistribute(x, {replicate()}); });
    if (group.rank() < 2) {
      EXPECT_EQ(text, "") << "the other line knows nothing of it";
    } else {
      expect_text(text, group.rank(), 3);
    }
  });
  // A rank has another shape.
  run_ranks(4, [&](comm::Group& group) {
    const Mesh mesh(group, {2, 2}, {"dp", "tp"});
    const Tensor x = from_local(numbers({2, group.rank() == 1 ? 5 : 4}), mesh["tp"], {partial()});
    const std::string text = text_of([&] { full_tensor(x); });
    if (group.rank() < 2) {
      expect_text(text, group.rank(), 1);
    } else {
      EXPECT_EQ(text, "");
    }
  });
  // A rank is gone; the error comes when what was begun is used.
  run_ranks(4, [&](comm::Group& group) {
    auto mesh = std::make_unique<Mesh>(group, std::vector<int>{2, 2}, std::vector<std::string>{"dp", "tp"});
    if (group.rank() == 2) return mesh.reset();
    const Tensor x = distribute(numbers({4, 4}), (*mesh)["tp"], {shard(0)}, std::nullopt);
    const std::string text = text_of([&] { to_local(redistribute(x, {replicate()}, {.async = true})); });
    if (group.rank() == 3) expect_text(text, 3, 2);
  });
}

}  // namespace
}  // namespace chorale
