// Where mixed precision casts, and groups of several modules: section B3 of spec/sharded-training.md.
#include <map>

#include "chorale/fsdp/fsdp_test_util.h"

namespace chorale::fsdp {
namespace {

// Says which dtypes came in.
struct Watched : nn::Module {
  nn::Linear lin{6, 6};
  std::shared_ptr<std::vector<DType>> seen = std::make_shared<std::vector<DType>>();
  CHORALE_MODULE(Watched, lin)
  Tensor forward(const Tensor& x) {
    seen->push_back(x.dtype());
    seen->push_back(lin.weight.dtype());
    return lin(x);
  }
};
using DTypes = std::vector<DType>;

struct Item {
  std::map<std::string, Tensor> tensors;
  Tensor ids;
  CHORALE_TENSORS(Item, tensors, ids)
};
struct WithItem : nn::Module {
  Watched inner;
  CHORALE_MODULE(WithItem, inner)
  Item forward(const Item& in) { return {{{"y", inner(in.tensors.at("x"))}}, in.ids}; }
};

struct TwoParts : nn::Module {
  Watched first, second;
  CHORALE_MODULE(TwoParts, first, second)
  Tensor forward(const Tensor& x) { return second(first(x)); }
};
struct External : nn::Module {
  Watched inner;
  DType other = DType::kF32;
  CHORALE_MODULE(External, inner)
  // The inner module is given something that the outer one made itself.
  Tensor forward(const Tensor& x) { return add(inner(pattern({2, 6}, 5)), to(x, DType::kF32)); }
};
struct NormNet : nn::Module {
  nn::LayerNorm norm{nn::LayerNorm(6)};
  nn::BatchNorm1d batch{6};
  nn::Linear lin{6, 6};
  CHORALE_MODULE(NormNet, norm, batch, lin)
  Tensor forward(const Tensor& x) { return lin(batch(norm(x))); }
};

// spec: test_structured_input_output, test_float16_on_one_submodule, test_submodules_with_external_inputs
// spec: test_norm_modules_{bf16,fp16}, test_clamp_reduce_dtype
// spec: test_checkpoint_recompute_casts_{forward_inputs,outputs}
TEST(FullyShardedPrecision, CastsWhereItIsAskedFor) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const Precision low{.parameters = DType::kBF16};
    const Tensor x = pattern({2, 6}, group.rank());
    {
      // Inside of structures, with numbers of tokens left alone.
      WithItem model = seeded(WithItem());
      fully_shard(model, {.mesh = mesh, .mixed_precision = {.parameters = DType::kBF16, .outputs = DType::kF32}});
      const Item y = model(Item{{{"x", x}}, Tensor::from<int64_t>({1, 2}, {2})});
      EXPECT_EQ(*model.inner.seen, (DTypes{DType::kBF16, DType::kBF16}));
      EXPECT_EQ(y.tensors.at("y").dtype(), DType::kF32);
      EXPECT_EQ(y.ids.dtype(), DType::kI64);
      backward(sum(y.tensors.at("y")));
      EXPECT_EQ(gradient(model.inner.lin.weight).dtype(), DType::kF32);
    }
    {
      // One part computes in f16, the others as ever.
      TwoParts model = seeded(TwoParts());
      fully_shard(model.second, {.mesh = mesh, .mixed_precision = {.parameters = DType::kF16}});
      fully_shard(model, {.mesh = mesh});
      const Tensor y = model(x);
      EXPECT_EQ(*model.first.seen, (DTypes{DType::kF32, DType::kF32}));
      EXPECT_EQ(*model.second.seen, (DTypes{DType::kF16, DType::kF16}));
      EXPECT_EQ(y.dtype(), DType::kF16);
      backward(sum(y));
      EXPECT_EQ(gradient(model.first.lin.weight).dtype(), DType::kF32);
    }
    for (const bool casts : {true, false}) {
      // What an inner module gets from elsewhere is cast by the inner module, if it casts.
      External model = seeded(External());
      fully_shard(model.inner, {.mesh = mesh, .mixed_precision = {.parameters = DType::kF32, .cast_inputs = casts}});
      fully_shard(model, {.mesh = mesh, .mixed_precision = low});
      model(x);
      EXPECT_EQ(*model.inner.seen, (DTypes{DType::kF32, DType::kF32}));
    }
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      NormNet model = seeded(NormNet());
      fully_shard(model.norm, {.mesh = mesh, .mixed_precision = {.parameters = dtype}});
      fully_shard(model, {.mesh = mesh, .mixed_precision = {.parameters = dtype}});
      const Tensor y = model(x);
      EXPECT_EQ(y.dtype(), dtype);
      backward(sum(y));
      for (const auto& [name, p] : model.named_parameters()) EXPECT_EQ(gradient(p).dtype(), DType::kF32) << name;
      EXPECT_EQ(model.batch.running_mean.dtype(), DType::kF32);
    }
    {
      // The dtype of reduction is that of the parameters: gradients are sent as they come.
      MlpStack model = seeded(MlpStack(1, 6)), same = clone(model);
      fully_shard(model, {.mesh = mesh, .mixed_precision = {.parameters = DType::kBF16, .reduce = DType::kBF16}});
      fully_shard(same, {.mesh = mesh, .mixed_precision = low});
      backward(sum(model(x)));
      backward(sum(same(x)));
      for (size_t i = 0; i < 4; ++i) {
        expect_close(to_local(gradient(model.parameters()[i])), to_local(gradient(same.parameters()[i])), 0, "clamped");
      }
    }
    {
      // What is recomputed is cast again, before and behind.
      TwoParts model = seeded(TwoParts()), plain = clone(model);
      plain.first.seen = std::make_shared<DTypes>();
      plain.second.seen = std::make_shared<DTypes>();
      const Precision both{.parameters = DType::kBF16, .outputs = DType::kF32};
      for (TwoParts* m : {&model, &plain}) {
        fully_shard(m->first, {.mesh = mesh, .mixed_precision = both});
        fully_shard(m->second, {.mesh = mesh, .mixed_precision = both});
        fully_shard(*m, {.mesh = mesh});
      }
      model.first.seen->clear();
      model(x);  // the root runs first
      model.first.seen->clear();
      const Tensor y = checkpoint([&](const std::vector<Tensor>& in) { return std::vector{model(in[0])}; }, {x})[0];
      EXPECT_EQ(y.dtype(), DType::kF32);
      backward(sum(y));
      EXPECT_EQ(*model.first.seen, DTypes(4, DType::kBF16));  // forward, and once more
      backward(sum(plain(x)));
      for (size_t i = 0; i < 4; ++i) {
        expect_close(to_local(gradient(model.parameters()[i])), to_local(gradient(plain.parameters()[i])), 0,
                     "recomputed");
      }
    }
  });
}

struct Groups : nn::Module {
  std::vector<Mlp> layers;
  nn::Linear head{8, 8};
  bool uses_first = true;
  CHORALE_MODULE(Groups, layers, head)
  Groups() {
    for (int i = 0; i < 4; ++i) layers.emplace_back(8);
  }
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (size_t i = uses_first ? 0 : 2; i < 4; ++i) y = layers[i](y);
    return head(y);
  }
};

// spec: test_fully_shard_multi_module_{backward_prefetch,unused_module}
TEST(FullyShardedCommunication, SeveralModulesMayBeOneGroup) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    const Groups whole = seeded(Groups());
    DistributedDataParallel<Groups> reference(clone(whole), group);
    Groups model = clone(whole);
    const Options options{.mesh = mesh, .reshard_after_forward = true};
    fully_shard(std::vector<nn::Module*>{&model.layers[0], &model.layers[1]}, options);
    fully_shard(std::vector<nn::Module*>{&model.layers[2], &model.layers[3]}, options);
    fully_shard(model, options);
    optim::Sgd one(reference.named_parameters(), {.lr = 0.1}), two(model.named_parameters(), {.lr = 0.1});
    const auto input = [&](int step) { return pattern({2, 8}, group.rank() + 10 * step); };
    for (int step = 0; step < 3; ++step) {
      one.zero_grad();
      two.zero_grad();
      backward(sum(reference(input(step))));
      CommCounter counter;
      backward(sum(model(input(step))));
      EXPECT_EQ(counter.all_gathers(), 6);
      EXPECT_EQ(counter.reduce_scatters(), 3);
      one.step();
      two.step();
      expect_sharded_parity(model.named_parameters(), reference.named_parameters(), 0, concat("step ", step));
    }
    std::vector<Event> events;
    on_event(model, [&](const Event& event) {
      if (event.kind != Event::Kind::kReshard) events.push_back(event);
    });
    const auto take = [&] {
      std::ostringstream text;
      for (const Event& event : std::exchange(events, {})) text << event << " ";
      return text.str();
    };
    const Tensor loss = sum(model(input(0)));
    EXPECT_EQ(take(), "U() U(layers.0) U(layers.2) ");
    backward(loss);
    EXPECT_EQ(take(), "U() U(layers.2) U(layers.0) PB(layers.2) PB(layers.0) PB() ");
    // A group that is not used: nothing is gathered or reduced for it.
    model.uses_first = false;
    two.zero_grad();
    CommCounter counter;
    backward(sum(model(input(0))));
    EXPECT_EQ(counter.reduce_scatters(), 2);
    EXPECT_EQ(take(), "U() U(layers.2) U() U(layers.2) PB(layers.2) PB() ");
    EXPECT_FALSE(gradient(model.layers[0].in_proj.weight).defined());
    on_event(model, {});
  });
}

struct NormAndHead : nn::Module {
  Mlp body{6};
  nn::LayerNorm norm{nn::LayerNorm(6)};
  nn::Linear head{6, 6};
  CHORALE_MODULE(NormAndHead, body, norm, head)
  Tensor forward(const Tensor& x) { return head(norm(body(x))); }
};

// spec: test_partial_group_forward_{then_standalone,grad_accum_chunked}, test_double_partial_forward_then_backward
TEST(FullyShardedLifeCycle, PartsOfAGroupMayRunAlone) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    NormAndHead plain = seeded(NormAndHead()), model = clone(plain);
    fully_shard(std::vector<nn::Module*>{&model.norm, &model.head}, {.mesh = mesh});
    fully_shard(model.body, {.mesh = mesh});
    fully_shard(model, {.mesh = mesh});
    const Tensor x = pattern({4, 6}, group.rank());
    const auto average = [&] {
      for (const Tensor& p : plain.parameters()) {
        if (gradient(p).defined()) group.all_reduce(gradient(p), comm::premultiplied_sum(0.5)).wait();
      }
    };
    // The whole first, then the head alone: one reduction for each.
    backward(sum(square(plain(x))));
    backward(sum(square(plain.head(x))));
    average();
    CommCounter counter;
    backward(sum(square(model(x))));
    EXPECT_EQ(counter.reduce_scatters(), 2);
    counter.reset();
    backward(sum(square(model.head(x))));
    EXPECT_EQ(counter.reduce_scatters(), 1);
    expect_sharded_parity(model.named_parameters(), plain.named_parameters(), 1e-5, "alone");
    // The head runs in chunks, each with its own backward up to what the body gave.
    plain.zero_grad();
    model.zero_grad();
    const auto chunked = [&](NormAndHead& m) {
      const Tensor y = detach(m.body(x));
      for (int64_t i = 0; i < 2; ++i) backward(sum(square(m.head(narrow(y, 0, 2 * i, 2)))));
    };
    chunked(plain);
    average();
    counter.reset();
    chunked(model);
    EXPECT_EQ(counter.reduce_scatters(), 2);
    expect_sharded_parity(model.named_parameters(), plain.named_parameters(), 1e-5, "chunks");
    // Two partial forwards, then backward through both.
    plain.zero_grad();
    model.zero_grad();
    const auto twice = [&](NormAndHead& m) { backward(add(sum(square(m.head(x))), sum(square(m.head(mul(x, 2)))))); };
    twice(plain);
    average();
    twice(model);
    expect_sharded_parity(model.named_parameters(), plain.named_parameters(), 1e-5, "twice");
  });
}

// spec: test_1f1b_microbatching
TEST(FullyShardedLifeCycle, MicroBatchesMayOverlap) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    for (const bool by_hand : {true, false}) {
      const Transformer whole = seeded(Transformer(2));
      DistributedDataParallel<Transformer> reference(clone(whole), group);
      Transformer model = clone(whole);
      shard_layers_and_root(model, model.layers, {.mesh = mesh, .reshard_after_forward = false});
      optim::Sgd one(reference.named_parameters(), {.lr = 0.1}), two(model.named_parameters(), {.lr = 0.1});
      const auto input = [&](int micro) { return ids({2, 6}, group.rank() + 10 * micro, 8); };
      for (int micro = 0; micro < 3; ++micro) {
        const auto run = [&] { backward(mean(reference(input(micro)))); };
        if (micro == 2) {
          run();
        } else {
          const auto quiet = reference.no_sync();
          run();
        }
      }
      if (by_hand) {
        for (Block& layer : model.layers) unshard(layer);
        unshard(model);
      }
      // The next forward comes before the backward of the last one.
      std::vector<Tensor> losses{mean(model(input(0)))};
      set_requires_gradient_sync(model, false);
      set_reshard_after_backward(model, false);
      set_is_last_backward(model, false);
      for (int micro = 1; micro <= 3; ++micro) {
        if (micro < 3) losses.push_back(mean(model(input(micro))));
        if (micro == 3) {
          set_requires_gradient_sync(model, true);
          set_reshard_after_backward(model, true);
          set_is_last_backward(model, true);
        }
        backward(losses[static_cast<size_t>(micro) - 1]);
      }
      one.step();
      two.step();
      expect_sharded_parity(model.named_parameters(), reference.named_parameters(), 0, "after one step");
    }
  });
}

}  // namespace
}  // namespace chorale::fsdp
