// Groups of ranks that share a GPU: collectives of tensors there, and data-parallel training. They stay on the
// GPU (Note [Calls on a shared device]).
#include <gtest/gtest.h>
#include <unistd.h>

#include <barrier>
#include <chrono>
#include <thread>

#include "chorale/api/api.h"
#include "chorale/base/comm_error.h"
#include "chorale/comm/spec_test_util.h"
#include "chorale/device/cuda/gpu_test_util.h"
#include "chorale/device/stream.h"
#include "chorale/models/mlp.h"
#include "chorale/nn/nn.h"
#include "chorale/op/samples.h"
#include "chorale/optim/grad_scaler.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/ddp.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/transport/store/prefix_store.h"
#include "chorale/transport/store/rendezvous.h"

namespace chorale::parallel {
namespace {

using comm::filled;
using comm::Group;
using comm::numbered;
using comm::sent_by;

using cuda::kGpu;
constexpr int kRanks = 4;
using Clock = std::chrono::steady_clock;

class CudaGroups : public cuda::GpuNumbersTest {};

// Each rank on a stream of its own, in the default group, [1, 2] and a new one of all.
void in_all_groups(const std::function<void(Group&)>& body) {
  comm::run_ranks(kRanks, [&](Group& world) {
    const StreamScope own(make_stream(kGpu));
    comm::in_every_group(world, body);
  });
}

Tensor there(const Tensor& x) { return to(x, kGpu); }
Tensor cube(int64_t k, double value) { return there(comm::cube(k, value)); }
bool is_cube(const Tensor& x, int64_t k, double value) {
  return x.device() == kGpu && comm::is_cube(to(x, kCpu), k, value);
}
int own_rank(const Group& group) { return group.global_rank(group.rank()); }

template <class T>
void broadcast_value(Group& group, double value) {
  for (int root : group.members()) {
    const Shape sizes{root + 1, root + 1, root + 1};
    const T sent = static_cast<T>(value);
    const Tensor x = there(filled<T>(sizes, own_rank(group) == root ? sent : T(1)));
    group.broadcast(x, root).wait();
    EXPECT_TRUE(comm::all_equal<T>(to(x, kCpu), sent)) << dtype_of<T>;
  }
}

// spec: test_broadcast_cuda
TEST_F(CudaGroups, Broadcast) {
  in_all_groups([](Group& group) {
    broadcast_value<float>(group, -1e-10);
    broadcast_value<double>(group, -1e-100);
    broadcast_value<int8_t>(group, -2);
    broadcast_value<uint8_t>(group, 129);
    broadcast_value<int32_t>(group, -100000);
    broadcast_value<int64_t>(group, -1e15);
    const Tensor half = full({3}, own_rank(group) == group.members()[0] ? -0.1 : 1.0, DType::kF16, kGpu);
    group.broadcast(half, group.members()[0]).wait();
    EXPECT_EQ(half.to_vector<float>(), std::vector<float>(3, -0.0999755859375f));
  });
}

// A group beside the default one, made by hand: at a store of the next port, below that port's number. Its works are
// waited for. Streams have no priorities to choose here, which is what the row asks for.
// spec: test_nccl_high_priority_stream
TEST_F(CudaGroups, AGroupThatIsMadeByHandBroadcasts) {
  const std::string port = std::to_string(20000 + getpid() % 10000 + 1);
  comm::run_ranks(kRanks, [&](Group& world) {
    const StreamScope own(make_stream(kGpu));
    const auto met =
        transport::rendezvous("tcp://127.0.0.1:" + port, {.rank = world.rank(), .world_size = world.size()});
    transport::PrefixStore store(port, met.store);
    Group by_hand = Group::connect(store, "by hand", met.rank, met.world_size);
    broadcast_value<float>(by_hand, -1e-10);
    broadcast_value<double>(by_hand, -1e-100);
    broadcast_value<int8_t>(by_hand, -2);
    broadcast_value<uint8_t>(by_hand, 129);
    broadcast_value<int32_t>(by_hand, -100000);
    broadcast_value<int64_t>(by_hand, -1e15);
    by_hand.destroy();
    world.barrier().wait();
  });
}

// spec: test_reduce_sum_cuda, test_all_reduce_sum_cuda, test_all_reduce_sum_cuda_async
TEST_F(CudaGroups, Sums) {
  in_all_groups([](Group& group) {
    const double expected = 2 + 10 * (group.size() - 1);
    for (int root : group.members()) {
      const bool is_root = own_rank(group) == root;
      const Tensor x = cube(root + 1, is_root ? 2 : 10), y = cube(root + 1, is_root ? 2 : 10);
      group.reduce(x, root).wait();
      if (is_root) {
        EXPECT_TRUE(is_cube(x, root + 1, expected));
      }
      const comm::Work work = group.all_reduce(y);
      work.wait();
      EXPECT_TRUE(is_cube(y, root + 1, expected));
    }
  });
}

// spec: test_reduce_sum_cuda_twice
TEST_F(CudaGroups, TwoReducesAreTwoEvents) {
  const auto events = comm::traced(kRanks, [](Group& group) {
    const StreamScope own(make_stream(kGpu));
    const bool is_root = group.rank() == 2;
    const Tensor x = cube(3, is_root ? 2 : 10), y = cube(4, is_root ? 2 : 10);
    const comm::Work first = group.reduce(x, 2), second = group.reduce(y, 2);
    first.wait();
    second.wait();
    if (is_root) {
      EXPECT_TRUE(is_cube(x, 3, 32));
      EXPECT_TRUE(is_cube(y, 4, 32));
    }
  });
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(comm::count_events(events, "shm:reduce", rank), 2);
}

// spec: test_all_reduce_sum_cuda_complex
TEST_F(CudaGroups, SumsOfComplexNumbers) {
  in_all_groups([](Group& group) {
    const bool first = group.rank() == 0;
    const Tensor x = there(filled<complex64>({2, 3}, first ? complex64(2, 3) : complex64(10, 11)));
    group.all_reduce(x).wait();
    const auto others = static_cast<float>(group.size() - 1);
    EXPECT_TRUE(comm::all_equal(to(x, kCpu), complex64(2 + 10 * others, 3 + 11 * others)));
  });
}

// spec: test_all_gather_cuda{,_complex}, test_gather_cuda, test_scatter_cuda{,_complex}
TEST_F(CudaGroups, GathersAndScatters) {
  in_all_groups([](Group& group) {
    const auto run = [&]<class T>(T) {
      for (int k : group.members()) {
        const Shape sizes{k + 1, k + 1, k + 1};
        const auto from = [&](int rank) { return numbered<T>(sizes, [&](int64_t i) { return sent_by<T>(rank, i); }); };
        const auto expect_from = [&](int rank, const Tensor& x) {
          EXPECT_EQ(x.device(), kGpu);
          EXPECT_EQ(x.to_vector<T>(), from(rank).template to_vector<T>()) << rank;
        };
        std::vector<Tensor> outputs, none;
        for (int i = 0; i < group.size(); ++i) outputs.push_back(there(filled<T>(sizes, T(-1))));
        group.all_gather(outputs, there(from(own_rank(group)))).wait();
        for (int i = 0; i < group.size(); ++i) expect_from(group.global_rank(i), outputs[static_cast<size_t>(i)]);

        const bool is_root = own_rank(group) == k;
        for (const Tensor& x : outputs) fill_(x, 0);
        group.gather(is_root ? outputs : none, there(from(own_rank(group))), k).wait();
        for (int i = 0; is_root && i < group.size(); ++i)
          expect_from(group.global_rank(i), outputs[static_cast<size_t>(i)]);

        std::vector<Tensor> inputs;
        for (int member : group.members()) inputs.push_back(there(from(member)));
        const Tensor mine = there(filled<T>(sizes, T(-1)));
        group.scatter(mine, is_root ? inputs : none, k).wait();
        expect_from(own_rank(group), mine);
      }
    };
    run(float{});
    run(complex64{});
  });
}

// spec: test_all_to_all_single_equal_split{_cuda,_cuda_complex,_group_cuda,_full_group_cuda}
// spec: test_all_to_all_single_unequal_split{_cuda,_cuda_complex,_group_cuda,_full_group_cuda}
// spec: test_all_to_all{_cuda,_cuda_complex,_group_cuda,_full_group_cuda}
TEST_F(CudaGroups, AllToAll) {
  in_all_groups([](Group& group) {
    const int64_t n = group.size();
    const int own = own_rank(group);
    const auto run = [&]<class T>(T) {
      const auto mine = [&](int64_t i) { return sent_by<T>(own, i); };
      const Tensor in = there(numbered<T>({n, n}, mine)), out = there(filled<T>({n, n}, T(-1)));
      group.all_to_all_single(out, in).wait();
      const auto found = out.to_vector<T>();
      for (int64_t i = 0; i < n * n; ++i)
        ASSERT_EQ(found[static_cast<size_t>(i)],
                  sent_by<T>(group.global_rank(static_cast<int>(i / n)), group.rank() * n + i % n));

      std::vector<int64_t> in_splits, out_splits(static_cast<size_t>(n), own + 1);
      std::vector<Tensor> inputs, outputs;
      int64_t rows = 0, rows_before = 0;
      for (int member : group.members()) {
        in_splits.push_back(member + 1);
        rows += member + 1;
        if (member < own) rows_before += member + 1;
        inputs.push_back(
            there(numbered<T>({member + 1, n}, [&](int64_t i) { return sent_by<T>(own, 100 * member + i); })));
        outputs.push_back(there(filled<T>({own + 1, n}, T(-1))));
      }
      const Tensor uneven = there(filled<T>({(own + 1) * n, n}, T(-1)));
      group.all_to_all_single(uneven, there(numbered<T>({rows, n}, mine)), out_splits, in_splits).wait();
      const auto parts = uneven.to_vector<T>();
      const int64_t block = (own + 1) * n;
      for (int64_t i = 0; i < uneven.elems(); ++i)
        ASSERT_EQ(parts[static_cast<size_t>(i)],
                  sent_by<T>(group.global_rank(static_cast<int>(i / block)), rows_before * n + i % block));

      group.all_to_all(outputs, inputs).wait();
      for (int r = 0; r < n; ++r) {
        const auto list = outputs[static_cast<size_t>(r)].to_vector<T>();
        for (size_t i = 0; i < list.size(); ++i)
          ASSERT_EQ(list[i], sent_by<T>(group.global_rank(r), 100 * own + static_cast<int64_t>(i)));
      }
    };
    run(float{});
    run(complex64{});
  });
}

// spec: test_send_recv_nccl, test_batch_isend_irecv_ring_exchange_nccl
TEST_F(CudaGroups, Messages) {
  comm::run_ranks(kRanks, [](Group& group) {
    const StreamScope scope(make_stream(kGpu));
    const int own = group.rank(), size = group.size();
    for (int src = 0; src < size; ++src) {
      const Tensor x = cube(src + 1, own == src ? src : -1);
      if (own != src) {
        group.recv(x, src);
      } else {
        for (int other = 0; other < size; ++other) {
          if (other != src) group.send(x, other);
        }
      }
      EXPECT_TRUE(is_cube(x, src + 1, src));
    }
    const Tensor mine = cube(size, own), got = cube(size, -1);
    const int next = (own + 1) % size, last = (own + size - 1) % size;
    for (const comm::Work& work : comm::batch_isend_irecv({comm::P2POp(comm::CallKind::kSend, group, mine, next),
                                                           comm::P2POp(comm::CallKind::kRecv, group, got, last)}))
      work.wait();
    EXPECT_TRUE(is_cube(got, size, last));
  });
}

// spec: test_send_recv_nccl_autograd_profiler, test_send_recv_nccl_torch_profiler
TEST_F(CudaGroups, MessagesAreEventsWithTheirShapes) {
  const auto events = comm::traced(kRanks, [](Group& group) {
    const StreamScope scope(make_stream(kGpu));
    for (int src = 0; src < group.size(); ++src) {
      const Tensor x = cube(src + 1, group.rank() == src ? src : -1);
      if (group.rank() != src) {
        EXPECT_EQ(group.recv(x, src), src);
        EXPECT_TRUE(is_cube(x, src + 1, src));
        continue;
      }
      for (int dst = 0; dst < group.size(); ++dst) {
        if (dst != src) group.send(x, dst);
      }
    }
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(comm::count_events(events, "shm:send", rank), kRanks - 1);
    EXPECT_EQ(comm::count_events(events, "shm:recv", rank), kRanks - 1);
  }
  for (const trace::Event& event : events) {
    if (event.kind != trace::Kind::kCall) continue;
    EXPECT_TRUE(event.async);
    ASSERT_EQ(event.shapes.size(), 1u) << event.name;
    EXPECT_EQ(event.shapes[0], std::vector<int64_t>(3, event.shapes[0].at(0))) << event.name;
  }
}

// spec: test_batch_isend_irecv_nccl, test_batch_isend_irecv_self_nccl, test_batch_isend_irecv_no_rank_zero_nccl
TEST_F(CudaGroups, BatchesOfMessages) {
  comm::run_ranks(kRanks, [](Group& group) {
    const StreamScope scope(make_stream(kGpu));
    const int own = group.rank();
    const auto exchange = [](const std::vector<comm::P2POp>& operations) {
      for (const comm::Work& work : comm::batch_isend_irecv(operations)) work.wait();
    };
    // Everybody with everybody, itself included; the second round sends what the first one did, once more.
    std::vector<comm::P2POp> operations;
    std::vector<std::pair<int, Tensor>> received;
    for (int round = 0; round < 2; ++round) {
      for (int peer = 0; peer < group.size(); ++peer) {
        received.emplace_back(peer, cube(peer + 1, -1));
        operations.push_back(comm::P2POp::recv(group, received.back().second, peer));
        operations.push_back(comm::P2POp::send(group, cube(own + 1, peer), peer));
      }
      exchange(operations);
      for (const auto& [peer, tensor] : received) EXPECT_TRUE(is_cube(tensor, peer + 1, own)) << round << ' ' << peer;
    }
    group.barrier().wait();
    if (own == 0) {
      const Tensor x = cube(2, -1);
      exchange({comm::P2POp::send(group, cube(2, 5), 0), comm::P2POp::recv(group, x, 0)});
      EXPECT_TRUE(is_cube(x, 2, 5));
    }
    group.barrier().wait();
    if (own == 1 || own == 2) {
      const Tensor x = cube(3, -1);
      exchange({comm::P2POp::send(group, cube(3, own), 3 - own), comm::P2POp::recv(group, x, 3 - own)});
      EXPECT_TRUE(is_cube(x, 3, 3 - own));
    }
  });
}

// spec: test_barrier{,_group,_full_group}_cuda
TEST_F(CudaGroups, NobodyLeavesABarrierBeforeTheLastHasCome) {
  const auto now_s = [] { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); };
  in_all_groups([&](Group& group) {
    for (const int late : group.members()) {
      const bool is_late = own_rank(group) == late;
      const Tensor time = full({1}, is_late ? now_s() + 0.03 : 0.0, DType::kF64, kGpu);
      group.broadcast(time, late).wait();
      if (is_late) std::this_thread::sleep_for(std::chrono::milliseconds(40));
      group.barrier().wait();
      if (!is_late) {
        EXPECT_GE(now_s(), time.item<double>());
      }
    }
  });
}

// spec: test_monitored_barrier_allreduce_hang{,_wait_all_ranks}
TEST_F(CudaGroups, AMonitoredBarrierNamesRanksThatHangInASum) {
  using namespace std::chrono_literals;
  for (const bool all : {false, true}) {
    std::barrier end(kRanks);
    comm::run_ranks(kRanks, [&](Group& world) {
      const StreamScope scope(make_stream(kGpu));
      Group device = world.duplicate({.timeout = 15s}), host = world.duplicate();
      const Tensor x = cube(3, world.rank());
      device.all_reduce(x).wait();
      if (world.rank() == 0) {
        const std::string text = message_of<CommError>([&] { host.monitored_barrier(100ms, all); });
        EXPECT_NE(text.find(all ? "ranks 1, 2, 3 did not reach it" : "rank 1 did not reach it"), std::string::npos)
            << text;
        EXPECT_EQ(text.find("rank 2"), std::string::npos) << text;
      } else {
        const std::string text =
            message_of<CommError>([&] { device.all_reduce(x, Reduce::kSum, {.tag = 0, .timeout = 100ms}).wait(); });
        EXPECT_NE(text.find("timed out"), std::string::npos) << text;
      }
      end.arrive_and_wait();
    });
  }
}

struct Replica {
  std::vector<double> losses;
  std::vector<std::vector<double>> parameters;
};

Replica train_replica(Group& group, Device device, const DdpOptions& options) {
  nn::Sequential model = models::mlp({12, 16, 4});
  {
    const NoGrad quiet;
    int number = 0;
    for (const auto& [name, parameter] : model.named_parameters())
      copy_(parameter, to(op::sample(parameter.sizes(), ++number, -0.3, 0.3), DType::kF32));
  }
  model.to(device);
  DistributedDataParallel ddp(std::move(model), group, options);
  optim::Sgd optimizer(ddp.named_parameters(), {.lr = 0.1, .momentum = 0.9});
  Replica result;
  for (int step = 0; step < 6; ++step) {
    const Tensor x = to(to(op::sample({6, 12}, 10 * group.rank() + step, -1, 1), DType::kF32), device);
    const Tensor target = to(Tensor::from(std::vector<int64_t>{0, 1, 2, 3, group.rank() % 4, step % 4}, {6}), device);
    optimizer.zero_grad();
    const Tensor loss = cross_entropy(ddp(x), target);
    backward(loss);
    optimizer.step();
    result.losses.push_back(loss.item<double>());
  }
  for (const auto& [name, parameter] : ddp.named_parameters()) {
    EXPECT_EQ(parameter.device(), device) << name;
    result.parameters.push_back(parameter.to_vector<double>());
  }
  return result;
}

TEST_F(CudaGroups, ReplicasGoAsOnTheCpu) {
  // Loading a kernel may wait for the whole device, and ranks of one process share it: a rank must not load one while
  // another's stream waits for that rank. One that trains alone loads them all.
  comm::run_ranks(1, [](Group& group) { train_replica(group, kGpu, {}); });
  for (const bool views : {true, false}) {
    comm::run_ranks(3, [&](Group& group) {
      const StreamScope own(make_stream(kGpu));
      const DdpOptions options{.gradient_as_bucket_view = views};
      const Replica expected = train_replica(group, kCpu, options), found = train_replica(group, kGpu, options);
      for (size_t i = 0; i < expected.losses.size(); ++i) EXPECT_NEAR(found.losses[i], expected.losses[i], 1e-5) << i;
      for (size_t p = 0; p < expected.parameters.size(); ++p) {
        for (size_t i = 0; i < expected.parameters[p].size(); ++i)
          ASSERT_NEAR(found.parameters[p][i], expected.parameters[p][i], 1e-5) << p << ' ' << i;
      }
      EXPECT_NE(found.losses.front(), found.losses.back());
    });
  }
}

// spec: test_DistributedDataParallel_non_default_stream
TEST_F(CudaGroups, GradientsAreSeenOnTheStreamOfTheUser) {
  comm::run_ranks(2, [](Group& group) {
    nn::Linear model(1, 1, {.bias = false});
    model.to(kGpu);
    DistributedDataParallel ddp(model, group);
    const StreamScope side(make_stream(kGpu));
    const Tensor x = full({1, 1}, group.rank(), DType::kF32, kGpu);
    for (int i = 0; i < 1000; ++i) {
      ddp.zero_grad(false);
      backward(sum(ddp(x)));
      const Tensor mean = clone(gradient(ddp.module().weight));
      group.all_reduce(mean).wait();
      ASSERT_EQ(mean.to_vector<float>()[0] / 2, 0.5f) << i;
    }
  });
}

struct Net : nn::Module {
  nn::Linear fc1{2, 10, {.bias = false}}, fc2{10, 50, {.bias = false}}, fc3{50, 4, {.bias = false}};
  CHORALE_MODULE(Net, fc1, fc2, fc3)
  Tensor forward(const Tensor& x) { return softmax(fc3(relu(fc2(relu(fc1(x))))), 1); }
  Tensor operator()(const Tensor& x) { return nn::call(*this, x); }
};

// spec: test_DistributedDataParallel_with_amp_and_grad_is_view
TEST_F(CudaGroups, MixedPrecisionAndScalingWithGradientsInBuckets) {
  comm::run_ranks(2, [](Group& group) {
    const StreamScope own(make_stream(kGpu));
    const auto train = [&](bool views) {
      Net net;
      {
        const NoGrad quiet;
        int number = 31415;
        for (const auto& [name, parameter] : net.named_parameters())
          copy_(parameter, to(op::sample(parameter.sizes(), ++number, -0.4, 0.4), DType::kF32));
      }
      net.to(kGpu);
      DistributedDataParallel ddp(net, group, {.gradient_as_bucket_view = views});
      optim::Sgd optimizer(ddp.named_parameters(), {.lr = 0.03});
      optim::GradScaler scaler({.enabled = true});
      const int64_t world = group.size();
      const Tensor inputs = to(op::sample({2 * world, 2}, 1, -1, 1), DType::kF32),
                   targets = to(op::sample({2 * world, 4}, 2, -1, 1), DType::kF32);
      for (const auto& [name, parameter] : ddp.named_parameters()) EXPECT_FALSE(gradient(parameter).defined()) << name;
      for (int step = 0; step < 20; ++step) {
        // Rows in another order each time; this rank takes its two.
        std::vector<int64_t> rows;
        for (int64_t i = 0; i < 2; ++i) rows.push_back((2 * group.rank() + i + 1337 + step) % (2 * world));
        const Tensor mine = Tensor::from(rows, {2});
        optimizer.zero_grad();
        const Tensor loss = [&] {
          const Autocast scope(DType::kF16);
          return mse_loss(to(ddp(there(index_select(inputs, 0, mine))), DType::kF32),
                          there(index_select(targets, 0, mine)));
        }();
        backward(scaler.scale(loss));
        for (const auto& [name, parameter] : ddp.named_parameters()) {
          EXPECT_TRUE(gradient(parameter).defined()) << name;
          EXPECT_TRUE(all(isfinite(gradient(parameter))).item<bool>()) << name << ' ' << step;
        }
        scaler.step(optimizer);
        scaler.update();
      }
      std::vector<std::vector<float>> result;
      for (const auto& [name, parameter] : ddp.named_parameters()) result.push_back(parameter.to_vector<float>());
      return result;
    };
    EXPECT_EQ(train(false), train(true));
  });
}

}  // namespace
}  // namespace chorale::parallel
