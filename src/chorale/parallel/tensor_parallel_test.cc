// Styles of tensor parallel: sections A7, A8, B2 and B3 of spec/tensor-parallel.md.
#include "chorale/parallel/tensor_parallel.h"

#include <gtest/gtest.h>

#include "chorale/api/api.h"
#include "chorale/base/error.h"
#include "chorale/comm/comm_counter.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/nn/nn.h"
#include "chorale/op/samples.h"
#include "chorale/parallel/tensor_parallel_test_util.h"

namespace chorale::parallel {
namespace {

using comm::CommCounter;
using comm::run_ranks;

struct Stack : nn::Module {
  std::vector<Mlp> layers;
  CHORALE_MODULE(Stack, layers)
  Stack() : layers(2) {}
  Tensor forward(const Tensor& x) { return layers[1](layers[0](x)); }
};
struct Identity : nn::Module {
  CHORALE_MODULE(Identity)
  Tensor forward(const Tensor& x) { return x; }
};

struct Both : nn::Module {
  nn::Linear linear{8, 8};
  CHORALE_MODULE(Both, linear)
  Tensor forward(const Tensor& x, const Tensor& y) { return linear(x) + y; }
};
struct Three : nn::Module {
  CHORALE_MODULE(Three)
  Tensor forward(const Tensor& x, const Tensor& y, const Tensor& z) { return x + y + z; }
};
// Arguments with names: a struct, which a caller fills field by field.
struct NamedInput {
  Tensor x, y{}, z{};
  CHORALE_TENSORS(NamedInput, x, y, z)
};
struct ByName : nn::Module {
  CHORALE_MODULE(ByName)
  Tensor forward(const NamedInput& in) { return in.z.defined() ? in.x + in.y + in.z : in.x + in.y; }
};
struct Row : nn::Module {
  nn::Linear fc{16, 10};
  CHORALE_MODULE(Row, fc)
  Tensor forward(const Tensor& x) { return fc(x); }
};
struct Col : nn::Module {
  nn::Linear fc{10, 16};
  CHORALE_MODULE(Col, fc)
  Tensor forward(const Tensor& x) { return fc(x); }
};
// spec: test_colwise_parallel_style
TEST(TensorParallel, Colwise) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const Tensor x0 = op::sample({8, 16}, 7);
    nn::Linear reference = filled(nn::Linear(16, 16));
    {
      nn::Linear layer = filled(nn::Linear(16, 16));
      tensor_parallel(layer, mesh, {{"", Colwise()}});
      EXPECT_EQ(placements_of(layer.weight), at({shard(0)}));
      EXPECT_EQ(placements_of(layer.bias), at({shard(0)}));
      const Tensor x = set_requires_grad(clone(x0));
      CommCounter counter;
      const Tensor y = layer(x);
      EXPECT_EQ(counter.total(), 0);
      expect_near(y, chunk_of_rank(reference(x0), 1, group.rank()), 1e-12);
      backward(sum(y));
      EXPECT_EQ(counter.all_reduces(), 1);
      EXPECT_EQ(counter.total(), 1);
      const Tensor whole = set_requires_grad(clone(x0));
      backward(sum(reference(whole)));
      expect_near(gradient(x), gradient(whole), 1e-12);
    }
    nn::Linear layer = filled(nn::Linear(16, 16));
    tensor_parallel(layer, mesh, {{"", Colwise().with_input(shard(0))}});
    const Tensor x = set_requires_grad(op::sample({8, 16}, 20 + group.rank()));
    CommCounter counter;
    const Tensor y = layer(x);
    EXPECT_EQ(y.sizes(), (Shape{32, 4}));
    EXPECT_EQ(counter.all_gathers(), 1);
    EXPECT_EQ(counter.total(), 1);
    backward(sum(y));
    EXPECT_EQ(counter.reduce_scatters(), 1);
    EXPECT_EQ(counter.total(), 2);
  });
}

// spec: test_colwise_parallel_embedding
TEST(TensorParallel, ColwiseEmbedding) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    nn::Embedding table = filled(nn::Embedding(16, 16)), reference = filled(nn::Embedding(16, 16));
    tensor_parallel(table, mesh, {{"", Colwise()}});
    EXPECT_EQ(placements_of(table.weight), at({shard(1)}));
    const Tensor ids = reshape(arange(8), {4, 2});
    const CommCounter counter;
    const Tensor y = table(ids);
    EXPECT_EQ(y.sizes(), (Shape{4, 2, 4}));
    backward(sum(y));
    EXPECT_EQ(counter.total(), 0);
    expect_near(y, chunk_of_rank(reference(ids), 2, group.rank()), 1e-15);
  });
}

// spec: test_rowwise_parallel_style
TEST(TensorParallel, Rowwise) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const Tensor x0 = op::sample({8, 16}, 7);
    nn::Linear reference = filled(nn::Linear(16, 16));
    for (const bool scattered : {false, true}) {
      nn::Linear layer = filled(nn::Linear(16, 16));
      tensor_parallel(layer, mesh, {{"", scattered ? Rowwise().with_output(shard(0)) : Rowwise()}});
      EXPECT_EQ(placements_of(layer.weight), at({shard(1)}));
      EXPECT_EQ(placements_of(layer.bias), at({replicate()}));
      const Tensor x = set_requires_grad(clone(chunk_of_rank(x0, 1, group.rank())));
      CommCounter counter;
      const Tensor y = layer(x);
      EXPECT_EQ(scattered ? counter.reduce_scatters() : counter.all_reduces(), 1);
      EXPECT_EQ(counter.total(), 1);
      expect_near(y, scattered ? chunk_of_rank(reference(x0), 0, group.rank()) : reference(x0), 1e-12);
      counter.reset();
      backward(sum(y));
      EXPECT_EQ(counter.all_gathers(), scattered ? 1 : 0);
      EXPECT_EQ(counter.total(), scattered ? 1 : 0);
      const Tensor whole = set_requires_grad(clone(x0));
      backward(sum(reference(whole)));
      expect_near(gradient(x), chunk_of_rank(gradient(whole), 1, group.rank()), 1e-12);
    }
  });
}

// spec: test_rowwise_parallel_embedding
TEST(TensorParallel, RowwiseEmbedding) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    nn::Embedding reference = filled(nn::Embedding(16, 16));
    for (const bool scattered : {false, true}) {
      nn::Embedding table = filled(nn::Embedding(16, 16));
      const Rowwise style = Rowwise().with_input(replicate());
      tensor_parallel(table, mesh, {{"", scattered ? style.with_output(shard(1)) : style}});
      EXPECT_EQ(placements_of(table.weight), at({shard(0)}));
      const Tensor ids = scattered ? arange(8) : reshape(arange(8), {4, 2});
      CommCounter counter;
      const Tensor y = table(ids);
      EXPECT_EQ(scattered ? counter.reduce_scatters() : counter.all_reduces(), 1);
      EXPECT_EQ(counter.total(), 1);
      EXPECT_EQ(y.sizes(), scattered ? (Shape{8, 4}) : (Shape{4, 2, 16}));
      expect_near(y, scattered ? chunk_of_rank(reference(ids), 1, group.rank()) : reference(ids), 1e-15);
      counter.reset();
      backward(sum(y));
      EXPECT_EQ(counter.total(), scattered ? 1 : 0);
      EXPECT_EQ(counter.all_gathers(), scattered ? 1 : 0);
    }
  });
}

// spec: test_{colwise,rowwise}_parallel_preserves_requires_grad, test_distribute_module_preserves_requires_grad
TEST(TensorParallel, ParametersKeepTheirObjectsAndTheirWish) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh(group, {2});
    const auto check = [&](const std::function<void(nn::Linear&)>& apply) {
      nn::Linear layer(8, 8);
      set_requires_grad(layer.weight, false);
      const Tensor weight = layer.weight, bias = layer.bias;
      apply(layer);
      EXPECT_TRUE(layer.weight.is_sharded() && layer.bias.is_sharded());
      EXPECT_FALSE(requires_grad(layer.weight));
      EXPECT_TRUE(requires_grad(layer.bias));
      EXPECT_TRUE(layer.weight.is(weight) && layer.bias.is(bias)) << "the objects are the same";
    };
    check([&](nn::Linear& layer) { tensor_parallel(layer, mesh, {{"", Colwise()}}); });
    check([&](nn::Linear& layer) { tensor_parallel(layer, mesh, {{"", Rowwise()}}); });
    check([&](nn::Linear& layer) { distribute_module(layer, mesh); });
  });
}

// spec: TensorParallelStyleTest.test_prepare_module_input, TensorParallelStyleTest.test_prepare_module_output
// spec: TensorParallelAPITests.test_prepare_module_{input,output}, test_prepare_module_input_output
TEST(TensorParallel, PreparesInputsAndOutputs) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    {
      Identity module;
      tensor_parallel(module, mesh, {{"", PrepareInput({shard(0)}, {replicate()})}});
      const Tensor y = module(ones({2, 16}));
      EXPECT_TRUE(y.is_sharded());
      expect_near(full_tensor(y), ones({8, 16}), 0);
    }
    {
      Identity module;
      tensor_parallel(module, mesh, {{"", PrepareOutput({replicate()}, {shard(0)})}});
      EXPECT_EQ(module(ones({8, 16})).sizes(), (Shape{2, 16}));
    }
    const Tensor x = op::sample({5, 7}, group.rank());
    {
      Identity module;
      tensor_parallel(module, mesh, {{"", PrepareInput({shard(0)}, {replicate()})}});
      const Tensor back = to_local(redistribute(module(x), {shard(0)}));
      expect_near(back, x, 0);
    }
    {
      Identity module;
      tensor_parallel(module, mesh, {{"", PrepareOutput({replicate()}, {shard(0)})}});
      const Tensor whole = op::sample({16, 7}, 3);
      expect_near(module(whole), chunk_of_rank(whole, 0, group.rank()), 0);
    }
    Identity module;
    tensor_parallel(
        module, mesh,
        {{"", PrepareInputOutput(PrepareInput({shard(0)}, {replicate()}), PrepareOutput({replicate()}, {shard(1)}))}});
    const Tensor direct = to_local(redistribute(from_local(x, mesh, {shard(0)}), {shard(1)}));
    expect_near(module(x), direct, 0);
  });
}

// spec: test_prepare_module_input_multiple_inputs
TEST(TensorParallel, PreparesEachArgument) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    EXPECT_THROW(PrepareInput({shard(0)}, {replicate(), replicate()}), InvalidArgument) << "lengths differ";
    {
      Both module;
      tensor_parallel(module, mesh, {{"", PrepareInput({shard(0)}, {replicate()})}});
      EXPECT_THROW(module(ones({2, 8}), ones({2, 8})), InvalidArgument) << "two tensors, one placement";
    }
    Both module;
    tensor_parallel(module, mesh, {{"", PrepareInput({shard(0), std::nullopt}, {replicate(), std::nullopt}, true)}});
    EXPECT_EQ(module(ones({2, 8}), ones({8, 8})).sizes(), (Shape{8, 8}));

    Three three;
    tensor_parallel(three, mesh,
                    {{"", PrepareInput({std::nullopt, shard(0), shard(0)}, {std::nullopt, replicate(), replicate()})}});
    const CommCounter counter;
    const Tensor x = from_local(ones({4, 8}), mesh, {replicate()});
    EXPECT_EQ(three(x, ones({1, 8}), ones({1, 8})).sizes(), (Shape{4, 8}));
    EXPECT_EQ(counter.total(), 2);
  });
}

// spec: test_prepare_module_kwargs_input
TEST(TensorParallel, PreparesArgumentsByName) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const Tensor mine = full({1, 8}, group.rank() + 1), whole = full({4, 8}, 10);
    const auto expect_rows = [&](const Tensor& found, double factor) {
      Tensor wanted = clone(whole);
      for (int64_t r = 0; r < 4; ++r) add_(narrow(wanted, 0, r, 1), factor * static_cast<double>(r + 1));
      expect_near(found, wanted, 0);
    };
    {
      ByName module;  // y alone; x is left as it is
      tensor_parallel(module, mesh, {{"", PrepareInput({{"y", shard(0), replicate()}}, true)}});
      const CommCounter counter;
      expect_rows(module(NamedInput{.x = whole, .y = mine}), 1);
      EXPECT_EQ(counter.total(), 1);
    }
    {
      ByName module;  // y and z
      tensor_parallel(module, mesh,
                      {{"", PrepareInput({{"z", shard(0), replicate()}, {"y", shard(0), replicate()}}, true)}});
      CommCounter counter;
      expect_rows(module(NamedInput{.x = whole, .y = mine, .z = mine}), 2);
      EXPECT_EQ(counter.total(), 2);
      counter.reset();
      expect_rows(module(NamedInput{.x = whole, .y = mine}), 1);
      EXPECT_EQ(counter.total(), 1) << "a call may leave one out";
    }
    {
      ByName module;  // x is a sharded tensor already
      tensor_parallel(module, mesh, {{"", PrepareInput({{"y", shard(0), replicate()}, {"z", shard(0), replicate()}})}});
      const CommCounter counter;
      const Tensor y = module(NamedInput{.x = from_local(whole, mesh, {replicate()}), .y = mine, .z = mine});
      EXPECT_EQ(counter.total(), 2);
      EXPECT_EQ(y.sizes(), (Shape{4, 8}));
      expect_rows(to_local(y), 2);
    }
    ByName typo;
    tensor_parallel(typo, mesh, {{"", PrepareInput({{"w", shard(0), replicate()}})}});
    EXPECT_THROW(typo(NamedInput{.x = whole, .y = mine}), InvalidArgument) << "there is no w";
    Both both;
    tensor_parallel(both, mesh, {{"", PrepareInput({{"y", shard(0), replicate()}})}});
    EXPECT_THROW(both(whole, mine), InvalidArgument) << "its arguments have no names";
  });
}

// spec: test_sharded_embedding_colwise_max_norm_errors
TEST(TensorParallel, TablesWithALargestNormAreNotSplit) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    nn::Embedding table(8, 8, {.max_norm = 1});
    EXPECT_THROW(tensor_parallel(table, mesh, {{"", Colwise()}}), InvalidArgument);
    EXPECT_FALSE(table.weight.is_sharded()) << "nothing was done";
    distribute_module(table, mesh, [](const std::string&, const Tensor&) { return Placements{shard(1)}; });
    EXPECT_THROW(table(distribute(zeros({4}, DType::kI64), mesh, {replicate()})), InvalidArgument);
  });
}

// spec: test_sequence_parallel_style
TEST(TensorParallel, Sequence) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const int64_t B = 20, T = 32, E = 12;
    const Tensor x0 = op::sample({B, T, E}, 3), dy = op::sample({B, T, E}, 4);
    const auto check = [&](auto make, bool affine) {
      auto reference = filled(make()), layer = filled(make());
      const Tensor whole = set_requires_grad(clone(x0));
      const Tensor expected = reference(whole);
      backward(expected, dy);
      tensor_parallel(layer, mesh, {{"", SequenceParallel()}});
      const Tensor x = set_requires_grad(clone(chunk_of_rank(x0, 1, group.rank())));
      const Tensor dz = from_local(clone(chunk_of_rank(dy, 1, group.rank())), mesh, {shard(1)});
      CommCounter counter;
      const Tensor y = layer(x);
      EXPECT_EQ(placements_of(y), at({shard(1)}));
      backward(y, dz);
      EXPECT_EQ(counter.total(), 0);
      expect_near(full_tensor(y), expected, 1e-11);
      expect_near(gradient(x), chunk_of_rank(gradient(whole), 1, group.rank()), 1e-11);
      const auto parameters = layer.parameters(), wanted = reference.parameters();
      ASSERT_EQ(parameters.size(), wanted.size());
      EXPECT_EQ(parameters.empty(), !affine);
      for (size_t i = 0; i < parameters.size(); ++i) {
        EXPECT_EQ(placements_of(gradient(parameters[i])), at({partial()}));
        expect_near(full_tensor(gradient(parameters[i])), gradient(wanted[i]), 1e-11);
      }
      // Split along the batch it comes and goes by an exchange.
      const Tensor rows = set_requires_grad(distribute(x0, mesh, {shard(0)}));
      counter.reset();
      const Tensor z = layer(rows);
      EXPECT_EQ(placements_of(z), at({shard(1)}));
      backward(z, dz);
      EXPECT_EQ(counter.total(), 2);
    };
    check([] { return nn::LayerNorm(12); }, true);
    check([] { return nn::LayerNorm(12, {.affine = false}); }, false);
    check([] { return nn::RMSNorm(12); }, true);
    // Which numbers a dropout draws is the business of sharding/ops_test.cc.
    nn::Dropout dropout(0.5);
    tensor_parallel(dropout, mesh, {{"", SequenceParallel()}});
    const Tensor part = clone(chunk_of_rank(x0, 1, group.rank()));
    const CommCounter counter;
    const Tensor y = dropout(part);
    EXPECT_EQ(counter.total(), 0);
    EXPECT_EQ(placements_of(y), at({shard(1)}));
    const auto found = to_local(y).to_vector<double>(), given = part.to_vector<double>();
    for (size_t i = 0; i < found.size(); ++i) ASSERT_TRUE(found[i] == 0 || found[i] == 2 * given[i]);
    nn::Linear linear(4, 4);
    EXPECT_THROW(tensor_parallel(linear, mesh, {{"", SequenceParallel()}}), InvalidArgument);
    EXPECT_THROW(tensor_parallel(dropout, mesh, {{"", Colwise()}}), InvalidArgument);
  });
}

// One step of SGD, whole and split: gradients and parameters are equal.
template <class M>
void expect_one_step(const Mesh& mesh, const Plan& plan, const Tensor& input, const Tensor& whole_input) {
  M reference = filled(M()), model = filled(M());
  tensor_parallel(model, mesh, plan);
  const auto before = model.named_parameters(), expected = reference.named_parameters();
  ASSERT_EQ(before.size(), expected.size());
  ASSERT_GT(before.size(), 0u);
  const auto all_of = [](const Tensor& x) { return x.is_sharded() ? full_tensor(x) : x; };
  for (size_t i = 0; i < before.size(); ++i) expect_near(all_of(before[i].second), expected[i].second, 0);
  const Tensor y = model(input), z = reference(whole_input);
  if (!y.is_sharded() && y.sizes() == z.sizes()) expect_near(y, z, 1e-11);
  backward(sum(y));
  backward(sum(z));
  const NoGrad quiet;
  for (size_t i = 0; i < before.size(); ++i) {
    const Tensor &p = before[i].second, &q = expected[i].second;
    expect_near(all_of(gradient(p)), gradient(q), 1e-11, before[i].first);
    sub_(p, mul(gradient(p), 0.25));
    sub_(q, mul(gradient(q), 0.25));
    expect_near(all_of(p), q, 1e-11, before[i].first);
  }
}

// spec: test_parallelize_mlp_with_module_api{,_nested}
// spec: test_parallelize_module_with_{star,question,digit}, test_parallelize_module_multi_wildcard
TEST(TensorParallel, PatternsNameModules) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const Tensor x = op::sample({12, 10}, 30);
    const Colwise style = Colwise().with_output(replicate());
    expect_one_step<Mlp>(mesh, {{"net1", style}, {"net2", style}}, x, x);
    expect_one_step<Mlp>(mesh, {{"net*", style}}, x, x);
    expect_one_step<Mlp>(mesh, {{"net?", style}}, x, x);
    expect_one_step<Mlp>(mesh, {{"net[1-2]", style}}, x, x);
    expect_one_step<Stack>(mesh, {{"layers.0.net1", style}, {"layers.1.net2", style}}, x, x);
    expect_one_step<Stack>(mesh, {{"layers.*.net[1]", style}, {"layers.*.net2", style}}, x, x);
  });
}

// spec: test_linear_{row,col}_wise_parallel
TEST(TensorParallel, OneLinearLayer) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const Tensor wide = op::sample({9, 16}, 1), narrow_one = op::sample({8, 10}, 2);
    expect_one_step<Row>(mesh, {{"fc", Rowwise()}}, clone(chunk_of_rank(wide, 1, group.rank())), wide);
    expect_one_step<Col>(mesh, {{"fc", Colwise().with_output(replicate())}}, narrow_one, narrow_one);
  });
}

// spec: test_parallelize_module_with_root_module, test_parallelize_module_with_no_match
TEST(TensorParallel, TheRootIsAModuleToo) {
  testing::internal::CaptureStderr();
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    Mlp reference = filled(Mlp()), model = filled(Mlp());
    const Tensor x = op::sample({16, 10}, 3);
    distribute_module(model, mesh);
    tensor_parallel(
        model, mesh,
        {{"", PrepareInputOutput(PrepareInput({replicate()}, {shard(0)}), PrepareOutput({shard(0)}, {replicate()}))},
         {"net9", Colwise()},
         {"nothing.*", Rowwise()}});
    expect_near(model(x), reference(x), 1e-12);
  });
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("\"net9\""), std::string::npos) << said;
  EXPECT_NE(said.find("\"nothing.*\""), std::string::npos) << said;
}

// spec: test_empty_plan
TEST(TensorParallel, AnEmptyPlanDoesNothingAndSaysSo) {
  testing::internal::CaptureStderr();
  run_ranks(2, [](comm::Group& group) {
    Mlp model;
    tensor_parallel(model, Mesh(group, {2}), {});
    for (const Tensor& p : model.parameters()) EXPECT_FALSE(p.is_sharded());
  });
  EXPECT_NE(testing::internal::GetCapturedStderr().find("empty"), std::string::npos);
}

// spec: test_parallelize_module_src_data_rank
TEST(TensorParallel, ParametersAreThoseOfTheSource) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const auto of = [](int rank) {
      nn::Linear layer(8, 8);
      const NoGrad quiet;
      copy_(layer.weight, to(op::sample({8, 8}, 50 + rank), DType::kF32));
      return layer;
    };
    nn::Linear layer = of(group.rank());
    tensor_parallel(layer, mesh, {{"", Colwise()}}, 1);
    expect_near(full_tensor(layer.weight), of(1).weight, 0);
    nn::Linear own = of(group.rank());
    const CommCounter counter;
    tensor_parallel(own, mesh, {{"", Colwise()}}, std::nullopt);
    EXPECT_EQ(counter.total(), 0);
    expect_near(to_local(own.weight), chunk_of_rank(of(group.rank()).weight, 0, group.rank()), 0);
  });
}

// spec: test_distribute_module{,_meta,_casting,_input_fn_output_fn}
TEST(TensorParallel, DistributesAModule) {
  run_ranks(kWorld, [](comm::Group& group) {
    const Mesh mesh(group, {kWorld});
    const auto expect_sharded = [](nn::Module& module, const std::function<Placement(const std::string&)>& wanted) {
      const auto parameters = module.named_parameters();
      ASSERT_EQ(parameters.size(), 4u);
      for (const auto& [name, p] : parameters) EXPECT_EQ(placements_of(p), at({wanted(name)})) << name;
    };
    Mlp all, some, none;
    distribute_module(all, mesh, [](const std::string&, const Tensor&) { return Placements{shard(0)}; });
    expect_sharded(all, [](const std::string&) { return shard(0); });
    distribute_module(some, mesh, [](const std::string& name, const Tensor&) {
      return name.starts_with("net1") ? Placements{shard(0)} : Placements{};
    });
    expect_sharded(some, [](const std::string& name) { return name.starts_with("net1") ? shard(0) : replicate(); });
    distribute_module(none, mesh);
    expect_sharded(none, [](const std::string&) { return replicate(); });
    EXPECT_THROW(distribute_module(none, mesh), StateError) << "once";
    all.to(DType::kBF16);
    expect_sharded(all, [](const std::string&) { return shard(0); });
    for (const Tensor& p : all.parameters()) EXPECT_EQ(p.dtype(), DType::kBF16);
    // Functions around the call are hooks.
    none.before_forward([&](nn::Module&, std::vector<Tensor>& in) { in[0] = from_local(in[0], mesh, {shard(0)}); });
    none.after_forward(
        [](nn::Module&, const std::vector<Tensor>&, std::vector<Tensor>& out) { out[0] = to_local(out[0]); });
    EXPECT_EQ(none(zeros({3, 10})).sizes(), (Shape{3, 10}));
  });
}

}  // namespace
}  // namespace chorale::parallel
