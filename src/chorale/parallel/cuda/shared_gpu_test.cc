// Sums of ranks that share a GPU (Note [Calls on a shared device]): their bits, a rank that dies, and how long they
// take.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <iostream>

#include "chorale/api/api.h"
#include "chorale/base/error.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/device/cuda/gpu_test_util.h"
#include "chorale/device/stream.h"
#include "chorale/models/gpt2.h"
#include "chorale/nn/linear.h"
#include "chorale/op/samples.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/ddp.h"

namespace chorale::parallel {
namespace {

using comm::Group;

using cuda::kGpu;

class SharedGpu : public cuda::GpuNumbersTest {};

Tensor there(const Tensor& x) { return to(x, kGpu); }

// Numbers whose sum depends on the order, and on place and rank.
Tensor uneven_numbers(int64_t n, int rank, DType dtype) {
  return to(op::sample({n}, 7 * rank + 1, -1, 1) * std::pow(10.0, rank), dtype);
}

// Ranks are threads, and processes that map each other's memory.
TEST_F(SharedGpu, SumsOnTheGpuHaveTheBitsOfTheHosts) {
  for (const int size : {2, 3}) {
    comm::run_threads_and_processes(size, [](Group& group) {
      const StreamScope own(make_stream(kGpu));
      group.all_reduce(ones({1}, DType::kF32, kGpu)).wait();  // asks which GPU the others have
      for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16, DType::kF16}) {
        for (const comm::Reduction how :
             {comm::Reduction(Reduce::kSum), comm::Reduction(Reduce::kAverage), comm::premultiplied_sum(0.3)}) {
          std::vector<Tensor> here, gpu;
          std::vector<comm::Work> works;
          works.reserve(5);
          for (const int64_t n : {int64_t{1}, int64_t{100003}, int64_t{100003}, int64_t{4096}}) {
            here.push_back(uneven_numbers(n, group.rank(), dtype));
            gpu.push_back(there(here.back()));
          }
          const Tensor turned = transpose(there(reshape(uneven_numbers(12, group.rank(), dtype), {3, 4})), 0, 1);
          gpu.push_back(turned);
          here.push_back(contiguous(to(turned, kCpu)));
          for (const Tensor& x : gpu) works.push_back(group.all_reduce(x, how));
          for (const comm::Work& work : works) work.wait();
          for (size_t i = 0; i < here.size(); ++i) {
            group.all_reduce(here[i], how).wait();
            EXPECT_EQ(gpu[i].to_vector<double>(), here[i].to_vector<double>()) << dtype << ' ' << i;
          }
        }
      }
    });
  }
}

// Ranks have different numbers of entries.
// spec: test_sparse_all_reduce_sum_cuda
TEST_F(SharedGpu, SparseTensorsAreSummed) {
  comm::run_threads_and_processes(3, [](Group& group) {
    const StreamScope own(make_stream(kGpu));
    const auto check = [&](int sparse_dims, int dense_dims) {
      const int64_t count = group.rank() + 1, size = group.size();
      Shape sizes(static_cast<size_t>(sparse_dims), size), entry{count};
      for (int d = 0; d < dense_dims; ++d) {
        sizes.push_back(2);
        entry.push_back(2);
      }
      std::vector<int64_t> places(static_cast<size_t>(sparse_dims * count));
      for (int64_t e = 0; e < count; ++e) places[static_cast<size_t>(e)] = e;
      const Tensor indices = there(Tensor::from(places, {sparse_dims, count}));
      const Tensor sum = group.sparse_all_reduce(Tensor::sparse_coo(indices, ones(entry, DType::kF32, kGpu), sizes));
      EXPECT_EQ(sum.sizes(), sizes);
      EXPECT_TRUE(sum.sparse().coalesced);
      EXPECT_EQ(sum.sparse().values.device(), kGpu);
      EXPECT_EQ(sum.sparse().indices.device(), kGpu);
      std::vector<int64_t> expected_places(static_cast<size_t>(sparse_dims * size));
      std::vector<float> expected;
      for (int64_t i = 0; i < size; ++i) {
        expected_places[static_cast<size_t>(i)] = i;
        expected.insert(expected.end(), size_t{1} << dense_dims, static_cast<float>(size - i));
      }
      EXPECT_EQ(sum.sparse().indices.to_vector<int64_t>(), expected_places);
      EXPECT_EQ(sum.sparse().values.to_vector<float>(), expected);
    };
    for (const int dims : {1, 2, 3}) check(dims, 0);
    for (const int dims : {1, 2, 3}) check(1, dims);
  });
}

// The gradient of a table has an entry per index: ranks have other rows, and some twice.
TEST_F(SharedGpu, SparseGradientsAreAveragedAsOnTheCpu) {
  comm::run_threads_and_processes(2, [](Group& group) {
    const StreamScope own(make_stream(kGpu));
    const auto trained = [&](Device device) {
      manual_seed(1);
      nn::Embedding table(20, 8, {.sparse = true});
      table.to(device);
      DistributedDataParallel ddp(std::move(table), group);
      optim::Sgd optimizer(ddp.named_parameters(), {.lr = 0.1});
      for (int step = 0; step < 3; ++step) {
        const Tensor ids = op::sample_ints({6 + 3 * group.rank()}, 0, 20, 10 * step + group.rank());
        backward(sum(square(ddp(to(ids, device)))));
        const Tensor g = gradient(ddp.module().weight);
        EXPECT_TRUE(g.is_sparse());
        EXPECT_EQ(g.sparse().values.device(), device);
        optimizer.step();
        optimizer.zero_grad();
      }
      return ddp.module().weight.to_vector<double>();
    };
    const auto found = trained(kGpu), expected = trained(kCpu);
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(found[i], expected[i], 1e-6) << i;
  });
}

TEST_F(SharedGpu, AProcessThatDiesBetweenSumsIsNamed) {
  const auto ended = comm::run_processes(2, [](Group& group) {
    const Tensor x = ones({1 << 20}, DType::kF32, kGpu);
    for (int i = 0; i < 3; ++i) group.all_reduce(x).wait();
    if (group.rank() == 1) ::raise(SIGKILL);
    const std::string message = comm::message_blaming(1, [&] { group.all_reduce(x).wait(); });
    EXPECT_NE(message.find("all_reduce"), std::string::npos) << message;
    EXPECT_EQ(sum(x).item<double>(), 8.0 * (1 << 20));  // what rank 0 has is as it was
  });
  EXPECT_EQ(ended, (std::vector<int>{0, -SIGKILL}));
}

// Microseconds of a call, the median of some.
template <class F>
double median_us(int times, F&& call) {
  std::vector<double> all;
  for (int i = 0; i < times; ++i) {
    const auto start = std::chrono::steady_clock::now();
    call();
    all.push_back(std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}
void measure_sums(Group& group, const char* how) {
  const StreamScope own(make_stream(kGpu));
  std::string text;
  for (const int64_t bytes : {int64_t{4} << 10, int64_t{1} << 20, int64_t{64} << 20}) {
    const Tensor x = ones({bytes / 4}, DType::kF32, kGpu), y = empty_like(x);
    for (int i = 0; i < 5; ++i) group.all_reduce(x, Reduce::kAverage).wait();
    const double sums = median_us(50, [&] { group.all_reduce(x, Reduce::kAverage).wait(); });
    group.barrier().wait();
    if (group.rank() == 0) {
      const double copy = median_us(50, [&] {
        copy_(y, x);
        synchronize(current_stream(kGpu));
      });
      text += concat(text.empty() ? "" : ", ", bytes >> 10, " KiB ", sums, " us (a copy ", copy, ")");
    }
    group.barrier().wait();
  }
  if (group.rank() == 0) std::cout << "figure: all_reduce of 2 ranks on one GPU, " << how << ": " << text << std::endl;
}
TEST_F(SharedGpu, DISABLED_HowLongSumsTake) {
  if (!comm::is_rank_process()) comm::run_ranks(2, [](Group& group) { measure_sums(group, "threads"); });
  setenv("GTEST_ALSO_RUN_DISABLED_TESTS", "1", 1);  // for the processes: this test is one
  EXPECT_EQ(comm::run_processes(2, [](Group& group) { measure_sums(group, "processes"); }), (std::vector<int>{0, 0}));
}

// A step of GPT-2 with gradients that are averaged, and one of two ranks that know nothing of each other.
void measure_replicas(Group& group, const char* how) {
  const StreamScope own(make_stream(kGpu));
  manual_seed(1);
  models::Gpt2 model({.vocab_size = 50304, .n_positions = 512, .embd_pdrop = 0, .resid_pdrop = 0, .attn_pdrop = 0});
  model.to(kGpu);
  DistributedDataParallel ddp(std::move(model), group);
  optim::AdamW optimizer(ddp.named_parameters(), {.lr = 1e-4});
  const Tensor tokens = randint(0, 50304, {8, 512}, DType::kI64, default_generator(), kGpu);
  const auto step = [&] {
    optimizer.zero_grad();
    Tensor loss;
    {
      const Autocast scope(DType::kBF16);
      loss = cross_entropy(flatten(ddp(tokens), 0, -2), flatten(tokens));
    }
    backward(loss);
    optimizer.step();
    synchronize(current_stream(kGpu));
  };
  for (int i = 0; i < 3; ++i) step();
  group.barrier().wait();
  const double together = median_us(10, step);
  group.barrier().wait();
  const auto quiet = ddp.no_sync();
  step();
  group.barrier().wait();
  const double apart = median_us(10, step);
  group.barrier().wait();
  if (group.rank() == 0) {
    std::cout << "figure: GPT-2 124M, 2 ranks of 8 x 512 tokens on one GPU, " << how << ": " << together / 1e3
              << " ms a step, without communication " << apart / 1e3 << std::endl;
  }
}
TEST_F(SharedGpu, DISABLED_HowMuchReplicasLose) {
  setenv("GTEST_ALSO_RUN_DISABLED_TESTS", "1", 1);
  EXPECT_EQ(comm::run_processes(2, [](Group& group) { measure_replicas(group, "processes"); }),
            (std::vector<int>{0, 0}));
}

}  // namespace
}  // namespace chorale::parallel
