#include "chorale/parallel/ddp_log.h"

#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "chorale/base/debug_level.h"
#include "chorale/eager/sim_kernels.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/zoo_test_util.h"
#include "chorale/testing/environment_test_util.h"

namespace chorale::parallel {
namespace {

struct LargeNet : nn::Module {
  Linear fc1{1000, 2000, {.bias = false}}, fc2{2000, 500, {.bias = false}};
  CHORALE_MODULE(LargeNet, fc1, fc2)
  LargeNet() { fc1.to(DType::kF64); }
  Tensor forward(const Tensor& x) { return fc2(to(fc1(to(x, DType::kF64)), DType::kF32)); }
};

// Each new time may be rounded down once.
void expect_mean(int64_t found, const std::vector<int64_t>& times) {
  const double mean =
      static_cast<double>(std::accumulate(times.begin(), times.end(), int64_t{0})) / static_cast<double>(times.size());
  EXPECT_NEAR(static_cast<double>(found), mean, static_cast<double>(times.size()));
  EXPECT_GE(found, 1);
}

// Checks the log of a model that is on a device of the rank's own, or on the CPU.
void expect_log(const std::function<Device(int rank)>& device_of) {
  const EnvironmentVariable address("MASTER_ADDR", "10.1.2.3"), port("MASTER_PORT", nullptr),
      threads("OMP_NUM_THREADS", "2");
  set_debug_level(DebugLevel::kInfo);
  run_ranks(2, [&](comm::Group& group) {
    const Device device = device_of(group.rank());
    Net net = seeded(Net(), 1);
    net.to(device);
    DistributedDataParallel ddp(std::move(net), group,
                                {.find_unused_parameters = FindUnused::kOff, .gradient_as_bucket_view = false});
    ddp.set_sample_rate(2);
    std::vector<int64_t> forwards, backwards, reductions;
    for (int i = 0; i < 20; ++i) {
      backward(sum(ddp(to(pattern({2, 2}, i), device))));
      const DdpLog log = ddp.log();
      if (i > 0 && (i < 10 || i % 2 == 0)) {
        EXPECT_EQ(log.iteration, i);
        EXPECT_GE(log.forward_compute_time, 1);
        EXPECT_GE(log.backward_compute_time, 1);
        EXPECT_GE(log.backward_comm_time, 1);
        EXPECT_LE(log.backward_compute_comm_overlap_time, log.backward_compute_time);
        EXPECT_LE(log.backward_compute_comm_overlap_time, log.backward_comm_time);
        EXPECT_GE(log.backward_compute_comm_overlap_time, 0);
        forwards.push_back(log.forward_compute_time);
        backwards.push_back(log.backward_compute_time);
        reductions.push_back(log.backward_comm_time);
      } else if (i > 10) {
        EXPECT_NE(log.iteration, i);
      }
    }
    const DdpLog log = ddp.log();
    EXPECT_EQ(log.iteration, 18);
    EXPECT_EQ(log.world_size, 2);
    EXPECT_EQ(log.rank, group.rank());
    EXPECT_EQ(log.module_name, "Net");
    EXPECT_EQ(log.device_ids, device == kCpu ? "" : std::to_string(group.rank()));
    EXPECT_EQ(log.output_device, device == kCpu ? -1 : group.rank());
    EXPECT_TRUE(log.broadcast_buffers);
    EXPECT_EQ(log.bucket_cap_bytes, 26214400);
    EXPECT_FALSE(log.find_unused_parameters);
    EXPECT_FALSE(log.gradient_as_bucket_view);
    EXPECT_EQ(log.backend_name, group.backend());
    // Where gloo has a number of threads, our log says which thread moves reductions (the row's margin).
    EXPECT_TRUE(has(log.progress, "thread")) << log.progress;
    EXPECT_EQ(log.dtypes, "float");
    EXPECT_EQ(log.num_parameter_tensors, 3);
    EXPECT_EQ(log.total_parameter_size_bytes, 2880);
    EXPECT_EQ(log.bucket_sizes, "2880");
    EXPECT_TRUE(log.has_rebuilt_buckets);
    EXPECT_EQ(log.rebuilt_bucket_sizes, "2880");
    EXPECT_EQ(log.prev_iteration_grad_ready_order_indices, "2, 1, 0");
    EXPECT_EQ(log.rebuilt_per_bucket_param_indices, "2 1 0");
    EXPECT_EQ(log.unused_parameter_size, 0);
    EXPECT_EQ(log.comm_hook, "");
    EXPECT_FALSE(log.is_multi_device_module || log.has_sync_bn || log.static_graph || log.has_error);
    EXPECT_FALSE(log.join_uneven_inputs);
    EXPECT_EQ(log.error, "");
    EXPECT_EQ(log.environment.at("MASTER_ADDR"), "10.1.2.3");
    EXPECT_EQ(log.environment.at("MASTER_PORT"), "N/A");
    EXPECT_EQ(log.environment.at("OMP_NUM_THREADS"), "2");
    EXPECT_EQ(log.environment.at("CHORALE_DEBUG"), "INFO");
    for (const auto& [name, value] : log.environment) EXPECT_TRUE(has_not(name, "NCCL"));
    EXPECT_LE(log.forward_compute_time_start, log.backward_compute_time_start);
    EXPECT_LE(log.backward_compute_time_start, log.backward_comm_time_start);
    EXPECT_LE(log.backward_comm_time_start, log.backward_comm_time_end);
    EXPECT_LE(log.backward_compute_time_start, log.backward_compute_time_end);
    expect_mean(log.avg_forward_compute_time, forwards);
    expect_mean(log.avg_backward_compute_time, backwards);
    expect_mean(log.avg_backward_comm_time, reductions);

    DistributedDataParallel large(LargeNet(), group, {.bucket_cap_mb = 1.5});
    EXPECT_EQ(large.log().bucket_cap_bytes, 1572864);
    EXPECT_EQ(large.log().bucket_sizes, "4000000, 16000000");
    EXPECT_EQ(large.log().dtypes, "double, float");
    EXPECT_EQ(large.log().num_parameter_tensors, 2);
    EXPECT_EQ(large.log().total_parameter_size_bytes, 20000000);
  });
  set_debug_level(DebugLevel::kOff);
}

// spec: test_ddp_logging_data_cpu
TEST(DdpLog, SaysHowItIsSetUpAndHowLongStepsTake) {
  expect_log([](int) { return kCpu; });
}

// Needs a device for each rank: simulated ones.
// spec: test_ddp_logging_data_gpu
TEST(DdpLog, SaysOnWhichDeviceItIs) {
  eager::add_sim_device({.devices = 2});
  expect_log([](int rank) { return Device{DeviceType::kSim, static_cast<int16_t>(rank)}; });
}

TEST(DdpLog, SaysWhichThreadMovesReductions) {
  run_ranks(2, [](comm::Group& group) {
    EXPECT_TRUE(has(DistributedDataParallel(Net(), group, {.progress = Progress::kHelper}).log().progress, "helper"));
    EXPECT_TRUE(has(DistributedDataParallel(Net(), group, {.progress = Progress::kCaller}).log().progress, "own"));
    EXPECT_TRUE(has(DistributedDataParallel(Net(), group).log().progress, "2 ranks"));
  });
}

// Registered in the reverse of the order in which it is called.
struct LastFirst : nn::Module {
  Linear last{20, 5, {.bias = false}}, first{10, 20, {.bias = false}};
  CHORALE_MODULE(LastFirst, last, first)
  Tensor forward(const Tensor& x) { return last(first(x)); }
};

TEST(DdpLog, SaysInWhichOrderBucketsWereMadeAnew) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(LastFirst(), group, {.bucket_cap_mb = 1e-4});
    for (int step = 0; step < 3; ++step) backward(sum(ddp(pattern({1, 10}, step))));
    const DdpLog log = ddp.log();
    EXPECT_EQ(log.bucket_sizes, "1200");  // one for all while their order is not known
    EXPECT_TRUE(log.has_rebuilt_buckets);
    EXPECT_EQ(log.rebuilt_bucket_sizes, "400, 800");
    EXPECT_EQ(log.prev_iteration_grad_ready_order_indices, "0, 1");
    EXPECT_EQ(log.rebuilt_per_bucket_param_indices, "0, 1");
  });
}

TEST(DdpLog, CountsWhatWasNotUsed) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(UnusedTwoLin(), group);
    for (int step = 0; step < 2; ++step) {
      const auto [a, b] = ddp(ones({1, 10}));
      backward(add(sum(a), sum(b)));
    }
    EXPECT_EQ(ddp.log().unused_parameter_size, 100);
  });
}

}  // namespace
}  // namespace chorale::parallel
