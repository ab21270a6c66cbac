// Buffers, and what is left to each rank.
#include "chorale/base/error.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

BufNet seeded_buf_net(int seed) {
  BufNet net = seeded(BufNet(), seed);
  net.buffer = nn::Buffer(pattern({1, 2}, seed));
  return net;
}

// spec: test_ddp_broadcast_buffer
TEST(Buffers, ThoseOfRank0AreEverybodysEvenWhenAssignedAnew) {
  run_ranks(3, [](comm::Group& group) {
    BufNet net = seeded_buf_net(group.rank());
    net.adds = false;
    DistributedDataParallel ddp(net, group);
    Tensor expected = pattern({1, 2}, 0);
    for (int step = 0; step < 2; ++step) {
      if (group.rank() == 0) ddp.module().buffer = nn::Buffer(add(ddp.module().buffer, 1));
      expected = add(expected, 1);
      backward(sum(ddp(ones({2, 10}))));
      EXPECT_TRUE(equal_bits(ddp.module().buffer, expected));
    }
  });
}

TEST(Buffers, AForwardAfterOneThatWasNotReducedLeavesThemAlone) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded_buf_net(0), group);
    const auto scope = ddp.no_sync();
    ddp(ones({1, 10}));
    // From now on every rank may go its own way: the number of forwards differs.
    for (int i = 0; i < group.rank(); ++i) ddp(ones({1, 10}));
    expect_close(ddp.module().buffer, add(pattern({1, 2}, 0), 1 + group.rank()));
  });
}

struct Fc2 : nn::Module {
  Linear lin;
  nn::Buffer buffer;
  CHORALE_MODULE(Fc2, lin, buffer)
  Fc2(int64_t in, int64_t out, int64_t buffered) : lin(in, out), buffer(zeros({buffered})) {}
  Tensor forward(const Tensor& x) { return lin(x); }
};
struct PartlyIgnored : nn::Module {
  Linear fc1{1, 1};
  Fc2 fc2;
  CHORALE_MODULE(PartlyIgnored, fc1, fc2)
  explicit PartlyIgnored(int rank) : fc2(rank == 0 ? 1 : 10, 10, 5 + rank) {}
  Tensor forward(const Tensor& x) { return fc2(fc1(x)); }
};

// spec: test_ddp_ignore_params_arg
TEST(Buffers, IgnoredParametersAndBuffersStayTheRanksOwn) {
  for (FindUnused search : {FindUnused::kOff, FindUnused::kOn}) {
    for (bool broadcast : {false, true}) {
      for (bool declared : {false, true}) {
        run_ranks(2, [=](comm::Group& group) {
          PartlyIgnored net(group.rank());
          DistributedDataParallel ddp(net, group,
                                      {.find_unused_parameters = search,
                                       .static_graph = declared,
                                       .broadcast_buffers = broadcast,
                                       .ignore = {"fc2.lin.weight", "fc2.lin.bias", "fc2.buffer"}});
          const Tensor old_weight = ddp.module().fc2.lin.weight;
          ddp.module().fc2.lin = seeded(Linear(1, 1), 3);
          PartlyIgnored local = nn::clone(ddp.module());
          const Tensor x = full({1, 1}, group.rank() + 1);
          for (int step = 0; step < 6; ++step) {
            backward(sum(ddp(x)));
            backward(sum(local(x)));
            expect_close(gradient(ddp.module().fc2.lin.weight), gradient(local.fc2.lin.weight));
            EXPECT_FALSE(equal_bits(gradient(ddp.module().fc1.weight), gradient(local.fc1.weight)));
          }
          EXPECT_FALSE(gradient(old_weight).defined());
        });
      }
    }
  }
}

// A hook that sums the buffers over ranks.
std::vector<comm::Future> sum_buffers(const comm::Group& group, const NamedTensors& buffers, bool wait) {
  std::vector<comm::Future> futures;
  for (const auto& [name, buffer] : buffers) futures.push_back(group.all_reduce(buffer).future());
  if (!wait) return futures;
  for (const comm::Future& future : futures) future.wait();
  return {};
}

void compare_with_sums_by_hand(const comm::Group& group, BufferHook::Place place, bool wait) {
  DistributedDataParallel hooked(seeded_buf_net(group.rank()), group);
  DistributedDataParallel by_hand(seeded_buf_net(group.rank()), group, {.broadcast_buffers = false});
  // Without the broadcast at construction buffers would differ from the start.
  hooked.module().buffer = nn::Buffer(pattern({1, 2}, 50 + group.rank()));
  by_hand.module().buffer = nn::Buffer(pattern({1, 2}, 50 + group.rank()));
  hooked.register_buffer_hook(
      {[wait](const comm::Group& of, const NamedTensors& buffers) { return sum_buffers(of, buffers, wait); }, place});
  for (int step = 0; step < 2; ++step) {
    const Tensor x = ones({2, 10});
    if (place == BufferHook::Place::kBeforeForward) group.all_reduce(by_hand.module().buffer).wait();
    const Tensor y = hooked(x), z = by_hand(x);
    if (place == BufferHook::Place::kAfterForward) group.all_reduce(by_hand.module().buffer).wait();
    if (wait) {
      EXPECT_TRUE(equal_bits(hooked.module().buffer, by_hand.module().buffer));
    }
    backward(sum(y));
    backward(sum(z));
    if (wait || place == BufferHook::Place::kAfterForward) {
      EXPECT_TRUE(equal_bits(hooked.module().buffer, by_hand.module().buffer));
      if (place == BufferHook::Place::kAfterForward) expect_same_on_all_ranks(group, hooked.module().buffer);
    }
  }
}

// spec: test_ddp_buffer_hook_allreduce, test_ddp_buffer_hook_allreduce_return_future
TEST(Buffers, AHookTakesCareOfThemBeforeOrAfterForward) {
  for (auto place : {BufferHook::Place::kBeforeForward, BufferHook::Place::kAfterForward}) {
    for (bool wait : {true, false}) {
      run_ranks(3, [=](comm::Group& group) { compare_with_sums_by_hand(group, place, wait); });
    }
  }
}

// spec: test_ddp_broadcast_buffer_via_hook
TEST(Buffers, AHookThatBroadcastsEqualsTheDefault) {
  run_ranks(3, [](comm::Group& group) {
    DistributedDataParallel hooked(seeded_buf_net(group.rank()), group), plain(seeded_buf_net(group.rank()), group);
    hooked.register_buffer_hook({[](const comm::Group& of, const NamedTensors& buffers) {
      std::vector<comm::Future> futures;
      for (const auto& [name, buffer] : buffers) futures.push_back(of.broadcast(buffer, 0).future());
      return futures;
    }});
    for (int step = 0; step < 2; ++step) {
      backward(sum(hooked(ones({1, 10}))));
      backward(sum(plain(ones({1, 10}))));
      EXPECT_TRUE(equal_bits(hooked.module().buffer, plain.module().buffer));
      expect_same_on_all_ranks(group, hooked.module().buffer);
    }
  });
}

}  // namespace
}  // namespace chorale::parallel
