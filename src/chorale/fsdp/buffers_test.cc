// What is gathered and reduced, byte for byte, on many ranks.
#include <chrono>
#include <thread>

#include "chorale/device/allocator.h"
#include "chorale/fsdp/fsdp_test_util.h"

namespace chorale::fsdp {
namespace {

struct EightParameters : nn::Module {
  nn::Parameter a, b, c, d, e, f, g, h;
  CHORALE_MODULE(EightParameters, a, b, c, d, e, f, g, h)
  EightParameters()
      : a(pattern({17, 257}, 1)),
        b(pattern({17}, 2)),
        c(pattern({64, 312}, 3)),
        d(pattern({64}, 4)),
        e(pattern({64, 64}, 5)),
        f(pattern({512, 64}, 6)),
        g(pattern({256}, 7)),
        h(pattern({64, 297}, 8)) {}
  // Every element of every parameter has the gradient x.
  Tensor forward(const Tensor& x) {
    Tensor y = mul(x, 0);
    for (const nn::Parameter* p : {&a, &b, &c, &d, &e, &f, &g, &h}) y = add(y, mul(sum(*p), x));
    return y;
  }
};

// spec: test_all_gather_fp32
TEST(FullyShardedBuffers, WhatIsGatheredIsWhatWasCutAlsoAmongFewerRanks) {
  run_ranks(16, [](comm::Group& group) {
    const EightParameters before;
    const std::vector<Tensor> originals = before.parameters();
    EightParameters model;
    fully_shard(model, {.mesh = line(group), .reshard_after_forward = 8});
    const auto expect_originals = [&](const std::string& what) {
      const std::vector<Tensor> whole = model.parameters();
      for (size_t i = 0; i < originals.size(); ++i) {
        ASSERT_FALSE(whole[i].is_sharded()) << what << " " << i;
        expect_close(detach(whole[i]), detach(originals[i]), 0, concat(what, " ", i));
      }
    };
    unshard(model);
    expect_originals("from sixteen parts");
    reshard(model);
    const Tensor loss = model(full({}, 1));
    EXPECT_EQ(mesh_of(model.a).size(), 8);
    EXPECT_EQ(to_local(detach(model.f)).sizes(), (Shape{64, 64}));
    unshard(model);
    expect_originals("from eight parts");
    backward(loss);
  });
}

// The powers of two by which values are divided before and after they are added in f16, so that sums are not too large.
double divisor_before(int ranks) {
  int factor = 1;
  while (ranks % factor == 0 && ranks / factor > factor) factor *= 2;
  return factor;
}

// spec: test_reduce_scatter_fp32, test_reduce_scatter_fp16
TEST(FullyShardedBuffers, GradientsAreAveragesInBothPrecisions) {
  for (const int ranks : {4, 6, 8}) {
    run_ranks(ranks, [&](comm::Group& group) {
      for (const DType reduce : {DType::kF32, DType::kF16}) {
        for (const double factor : {1.0, 8000.0}) {  // in f16 the sum of the latter would be infinite
          EightParameters model;
          fully_shard(model, {.mesh = line(group), .mixed_precision = {.reduce = reduce}});
          backward(model(full({}, factor * group.rank())));
          // The reference divides before and after.
          const double before = divisor_before(ranks), after = ranks / before;
          double expected = 0;
          for (int r = 0; r < ranks; ++r) expected += factor * r / before;
          expected /= after;
          for (const auto& [name, p] : model.named_parameters()) {
            const Tensor part = to_local(gradient(p));
            ASSERT_EQ(part.sizes(), to_local(detach(p)).sizes()) << name;
            ASSERT_EQ(part.dtype(), DType::kF32) << name;
            for (const double x : numbers(part)) ASSERT_NEAR(x, expected, 1e-6 * expected) << name << " in " << reduce;
          }
        }
      }
    });
  }
}

// The module computes until what was gathered ahead has come, which nothing that it does brings nearer.
TEST(FullyShardedBuffers, AThreadGathersWhileAModuleComputes) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh = line(group);
    MlpStack model = seeded(MlpStack(3, 16));
    shard_layers_and_root(model, model.layers, {.mesh = mesh, .helper_thread = true});
    set_modules_to_forward_prefetch(model.layers[0], {&model.layers[1]});
    const Tensor x = pattern({2, 16}, group.rank()), expected = model(x);
    std::vector<Event> seen;
    on_event(model, [&](const Event& event) { seen.push_back(event); });
    const auto is_pending = [&] {
      return mesh.group(size_t{0}).flight_record().find("\"state\": \"pending\"") != std::string::npos;
    };
    int computed = 0;
    model.layers[0].before_forward([&](nn::Module&, std::vector<Tensor>&) {
      EXPECT_EQ(seen.back(), (Event{Event::Kind::kUnshard, "layers.1"})) << "it is on its way";
      const auto start = std::chrono::steady_clock::now();
      while (is_pending() && std::chrono::steady_clock::now() - start < std::chrono::seconds(30))
        std::this_thread::yield();
      EXPECT_FALSE(is_pending());
      ++computed;
    });
    const NoGrad quiet;
    reshard(model.layers[0]);
    reshard(model.layers[1]);
    expect_close(model(x), detach(expected), 0, "computed meanwhile");
    EXPECT_EQ(computed, 1);
  });
}

// spec: test_fully_shard_del_memory
TEST(FullyShardedBuffers, NothingIsLeftOfAModelThatIsGone) {
  const auto ended = comm::run_processes(2, [](comm::Group& group) {  // memory is counted by process
    const auto now = [] { return cpu_allocator().stats().current_bytes; };
    const auto train = [&] {
      MlpStack model = seeded(MlpStack(3, 768, 1));
      shard_layers_and_root(model, model.layers, {.mesh = line(group)});
      optim::AdamW optimizer(model.named_parameters(), {.lr = 0.01});
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        backward(sum(square(model(pattern({2, 768}, group.rank())))));
        optimizer.step();
      }
      // Parts of parameters, of gradients, and two moments.
      EXPECT_GE(now(), size_t{4} * 3 * 2 * 768 * 769 * 4 / 2);
    };
    train();  // what is made once is there now
    const size_t before = now();
    train();
    EXPECT_EQ(now(), before);
  });
  EXPECT_EQ(ended, (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace chorale::fsdp
