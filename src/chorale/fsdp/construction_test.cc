// What fully_shard() makes of a module: section B1 of spec/sharded-training.md.
#include <gmock/gmock.h>

#include "chorale/fsdp/fsdp_test_util.h"
#include "chorale/testing/message_test_util.h"

namespace chorale::fsdp {
namespace {

using testing::HasSubstr;

struct WithShared : nn::Module {
  std::vector<Mlp> layers;
  nn::Linear first{3, 3}, second{3, 3};
  CHORALE_MODULE(WithShared, layers, first, second)
  WithShared() {
    for (int i = 0; i < 3; ++i) layers.emplace_back(3, 3);
    second.weight = first.weight;
    second.bias = first.bias;
  }
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (Mlp& layer : layers) y = layer(y);
    return second(first(y));
  }
};

// spec: test_shard_tensor_parameters
TEST(FullyShard, ParametersBecomeShardedByTheirFirstDimension) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const auto check = [&](auto model, size_t expected) {
      const NamedTensors before = clone(model).named_parameters();
      fully_shard(model, {.mesh = mesh});
      const NamedTensors after = model.named_parameters();
      ASSERT_EQ(after.size(), expected);  // a shared one once
      for (size_t i = 0; i < after.size(); ++i) {
        const auto& [name, p] = after[i];
        const Tensor& whole = before[i].second;
        EXPECT_EQ(name, before[i].first);
        ASSERT_TRUE(p.is_sharded());
        EXPECT_EQ(p.sizes(), whole.sizes());
        EXPECT_EQ(p.strides(), whole.strides());
        EXPECT_EQ(placements_of(p), Placements{shard(0)});
        EXPECT_TRUE(requires_grad(p));
        const op::Chunk own = op::chunk_of(whole.size(0), 2, group.rank());
        expect_close(to_local(detach(p)), narrow(detach(whole), 0, own.first, own.size), 0, name);
      }
    };
    check(seeded(MlpStack(3, 3, 3)), 12);
    check(seeded(WithShared()), 14);
  });
}

struct Odd : nn::Module {
  nn::Parameter p;
  CHORALE_MODULE(Odd, p)
  explicit Odd(const Tensor& value) : p(value) {}
  Tensor forward(const Tensor& x) { return mul(x, sum(p)); }
};

// spec: test_raise_{scalar,noncontiguous}_parameter, test_invalid_mesh_ndim, test_2d_mesh_without_mesh_dim_names
// spec: test_invalid_shard_dim, test_init_1d_uneven_shard_largest_dim
TEST(FullyShard, RefusesWhatItCannotCut) {
  run_ranks(4, [](comm::Group& group) {
    const Mesh mesh = line(group);
    Odd scalar(Tensor::scalar(1, DType::kF32)), turned(transpose(pattern({4, 6}, 1), 0, 1)), odd(pattern({3, 6}, 1));
    EXPECT_THAT(message_of([&] { fully_shard(scalar, {.mesh = mesh}); }), HasSubstr("parameter p has no dimension"));
    EXPECT_THAT(message_of([&] { fully_shard(turned, {.mesh = mesh}); }),
                HasSubstr("parameter p of shape [6, 4] is not"));
    EXPECT_FALSE(turned.p.is_sharded()) << "nothing was changed";
    const Mesh three(group, {2, 2, 1}, {"a", "b", "c"}), unnamed(group, {2, 2});
    EXPECT_THAT(message_of([&] { fully_shard(odd, {.mesh = three}); }), HasSubstr("one dimension (shards) or two"));
    EXPECT_THAT(message_of([&] { fully_shard(odd, {.mesh = unnamed}); }), HasSubstr("needs names"));
    const auto by = [](int64_t dim) { return [dim](const Tensor&) { return std::optional(dim); }; };
    EXPECT_THAT(message_of([&] { fully_shard(odd, {.mesh = mesh, .shard_dim = by(2)}); }),
                HasSubstr("has no dimension 2"));
    EXPECT_THAT(message_of([&] { fully_shard(odd, {.mesh = mesh, .shard_dim = by(1)}); }),
                HasSubstr("cannot be cut by dimension 1 over 4 ranks"));
    for (const int ways : {0, 1, 3, 4, -3}) {
      EXPECT_THAT(message_of([&] { fully_shard(odd, {.mesh = mesh, .reshard_after_forward = ways}); }),
                  HasSubstr("divides 4 and is neither 1 nor all of them"))
          << ways;
    }
    EXPECT_FALSE(is_fully_sharded(odd));
    const Odd taken = std::move(odd);
    EXPECT_THAT(message_of([&] { fully_shard(odd, {.mesh = mesh}); }),  // NOLINT(bugprone-use-after-move): on purpose
                HasSubstr("[Odd] the module was moved from"));
    EXPECT_THAT(message_of([&] { fully_shard(std::vector<nn::Module*>{nullptr}, {.mesh = mesh}); }),
                HasSubstr("a null pointer"));
  });
}

// spec: test_fully_shard_is_root, test_fully_shard_double_lazy_init, test_fully_shard_multi_module_root
// spec: test_fully_shard_module_and_param_fqns
TEST(FullyShard, TheOutermostModuleRunsFirst) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const Tensor x = pattern({2, 4}, group.rank());
    MlpStack model = seeded(MlpStack(2, 4));
    shard_layers_and_root(model, model.layers, {.mesh = mesh});
    model(x);
    std::vector<Event> events;
    on_event(model, [&](const Event& event) { events.push_back(event); });
    model(x);
    on_event(model, {});
    // The root has no parameters of its own left, and the layers are found below it.
    const Event first{Event::Kind::kUnshard, "layers.0"};
    EXPECT_EQ(events[0], first);
    std::vector<std::string> names;
    for (Mlp& layer : model.layers) {
      for (const auto& [name, p] : own_parameters(layer)) names.push_back(name);
    }
    std::vector<std::string> expected;
    for (const auto& [name, p] : model.named_parameters()) expected.push_back(name);
    EXPECT_EQ(names, expected);
    EXPECT_TRUE(own_parameters(model).empty());

    MlpStack late = seeded(MlpStack(2, 4));
    shard_layers_and_root(late, late.layers, {.mesh = mesh});
    late.layers[0](x);
    EXPECT_THAT(message_of<StateError>([&] { late(x); }), HasSubstr("layers.0 was called before the MlpStack"));

    MlpStack list = seeded(MlpStack(2, 4));
    fully_shard(std::vector<nn::Module*>{&list.layers[0], &list.layers[1]}, {.mesh = mesh});
    EXPECT_THAT(message_of<StateError>([&] { list(x); }), HasSubstr("cannot be the outermost ones"));
  });
}

struct Tied : nn::Module {
  nn::Embedding table{17, 16};
  Mlp middle{16};
  nn::Linear head{16, 17, {.bias = false}};
  CHORALE_MODULE(Tied, table, middle, head)
  Tied() { head.weight = table.weight; }
  Tensor forward(const Tensor& in) { return head(middle(table(in))); }
};

// spec: test_shared_params_separate_fsdp_groups_error, test_layer_by_layer_shard_no_false_positive
TEST(FullyShard, TiedWeightsBelongToOneGroup) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const Tensor x = ids({2, 3}, group.rank(), 17);
    Tied apart = seeded(Tied());
    fully_shard(apart.table, {.mesh = mesh});
    fully_shard(apart.head, {.mesh = mesh});
    fully_shard(apart, {.mesh = mesh});
    EXPECT_THAT(message_of<StateError>([&] { apart(x); }),
                HasSubstr("head.weight belongs to the group of table and to head"));

    Tied layer_wise = seeded(Tied());
    fully_shard(layer_wise.middle, {.mesh = mesh});
    fully_shard(layer_wise, {.mesh = mesh});
    EXPECT_EQ(layer_wise(x).sizes(), (Shape{2, 3, 17}));
  });
}

struct Nested : nn::Module {
  Mlp left{4}, right{4};
  nn::Linear own{4, 4};
  nn::Buffer buffer{pattern({4}, 1)};
  CHORALE_MODULE(Nested, left, right, own, buffer)
  Tensor forward(const Tensor& x) { return own(right(left(x))); }
};

struct Duplicate : nn::Module {
  std::shared_ptr<Mlp> one = std::make_shared<Mlp>(4), other = one;
  CHORALE_MODULE(Duplicate, one, other)
  Tensor forward(const Tensor& x) { return (*other)((*one)(x)); }
};

// spec: test_managed_modules_{single,nested,nested_fully_shard_and_replicate,duplicate,list_of_mlps}
// spec: test_managed_states_{shared_params_and_buffers,nested_fully_shard,list_of_mlps}
TEST(FullyShard, EveryParameterBelongsToOneGroup) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const auto names = [](nn::Module& module) {
      std::vector<std::string> found;
      for (const auto& [name, p] : own_parameters(module)) found.push_back(name);
      return found;
    };
    using Names = std::vector<std::string>;
    const Names mlp = {"in_proj.weight", "in_proj.bias", "out_proj.weight", "out_proj.bias"};
    Mlp single(4);
    fully_shard(single, {.mesh = mesh});
    EXPECT_EQ(names(single), mlp);

    Nested nested;
    fully_shard(nested.left, {.mesh = mesh});
    fully_shard(nested, {.mesh = mesh});
    EXPECT_EQ(names(nested.left), mlp);
    EXPECT_EQ(names(nested), (Names{"right.in_proj.weight", "right.in_proj.bias", "right.out_proj.weight",
                                    "right.out_proj.bias", "own.weight", "own.bias"}));
    EXPECT_FALSE(nested.buffer.is_sharded());

    // Inside a fully sharded module, a part that is left to data-parallel training.
    Nested mixed;
    fully_shard(mixed, {.mesh = mesh, .ignored = mixed.left.parameters()});
    EXPECT_EQ(names(mixed).size(), 6u);
    EXPECT_FALSE(mixed.left.in_proj.weight.is_sharded());

    Duplicate duplicate;
    fully_shard(duplicate, {.mesh = mesh});
    EXPECT_EQ(names(duplicate).size(), 4u);
    EXPECT_TRUE(duplicate.other->in_proj.weight.is_sharded());

    MlpStack list(3, 4);
    fully_shard(std::vector<nn::Module*>{&list.layers[0], &list.layers[1]}, {.mesh = mesh});
    fully_shard(list, {.mesh = mesh});
    EXPECT_EQ(names(list.layers[0]).size(), 8u);
    EXPECT_EQ(names(list), (Names{"layers.2.in_proj.weight", "layers.2.in_proj.bias", "layers.2.out_proj.weight",
                                  "layers.2.out_proj.bias"}));

    WithShared shared;
    fully_shard(shared, {.mesh = mesh});
    EXPECT_EQ(names(shared).size(), 14u);
  });
}

template <class T>
concept CanBeSharded = requires(T& value, const Options& options) {
  fully_shard(value, options);
};

// spec: test_fully_shard_{state,reapply,deepcopy,unsupported_module_cls}
TEST(FullyShard, OnceAndWithoutCopies) {
  static_assert(CanBeSharded<Mlp>);
  // Containers have no forward: they are no modules.
  static_assert(!CanBeSharded<nn::ModuleList<Mlp>> && !CanBeSharded<nn::ModuleDict<Mlp>>);
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    Mlp model(4);
    EXPECT_FALSE(is_fully_sharded(model));
    EXPECT_THAT(message_of<StateError>([&] { unshard(model); }), HasSubstr("this Mlp is not fully sharded"));
    fully_shard(model, {.mesh = mesh});
    EXPECT_TRUE(is_fully_sharded(model));
    EXPECT_THAT(message_of<StateError>([&] { fully_shard(model, {.mesh = mesh}); }),
                HasSubstr("fully sharded already"));
    EXPECT_THAT(message_of<StateError>([&] { clone(model); }), HasSubstr("cannot be copied"));
    EXPECT_TRUE(model.in_proj.weight.is_sharded());
  });
}

struct Mixed : nn::Module {
  nn::Linear a{6, 6}, b{6, 6};
  nn::Parameter steps{Tensor::from<int64_t>({3, 1, 2}, {3}), false};
  nn::Parameter frozen{pattern({5}, 3, DType::kBF16), false};
  CHORALE_MODULE(Mixed, a, b, steps, frozen)
  Tensor forward(const Tensor& x) {
    return mul(b(a(x)), add(to(sum(steps), DType::kF32), to(sum(frozen), DType::kF32)));
  }
};

// spec: test_non_float_param, test_mixed_dtypes_no_grad_param
TEST(FullyShard, CarriesParametersThatAreNotTrained) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const Mixed whole = seeded(Mixed());
    DistributedDataParallel<Mixed> reference(clone(whole), group);
    Mixed model = clone(whole);
    fully_shard(model, {.mesh = mesh});
    const auto trained = [](NamedTensors all) {
      std::erase_if(all, [](const auto& entry) { return !requires_grad(entry.second); });
      return all;
    };
    optim::Sgd one(trained(reference.named_parameters()), {.lr = 0.1});
    optim::Sgd two(trained(model.named_parameters()), {.lr = 0.1});
    for (int step = 0; step < 3; ++step) {
      const Tensor x = pattern({2, 6}, group.rank() + 5 * step);
      const Tensor loss = sum(reference(x)), other = sum(model(x));
      expect_close(other, loss, 0, "loss");
      one.zero_grad();
      two.zero_grad();
      backward(loss);
      backward(other);
      one.step();
      two.step();
    }
    EXPECT_EQ(model.steps.dtype(), DType::kI64);
    EXPECT_EQ(full_tensor(detach(model.steps)).to_vector<int64_t>(), (std::vector<int64_t>{3, 1, 2}));
    EXPECT_FALSE(gradient(model.steps).defined());
    expect_sharded_parity(model.named_parameters(), reference.named_parameters(), 0, "at the end");
  });
}

}  // namespace
}  // namespace chorale::fsdp
