#include "chorale/comm/work.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "chorale/base/config.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/device/sim/sim_device.h"
#include "chorale/device/stream.h"
#include "chorale/tensor/device_copy.h"
#include "chorale/transport/store/file_store.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;

bool shares_process(const Group& group) { return group.engine()->shares_process(); }

TEST(Work, AGroupKnowsWhichOfItsRanksAreThreadsOfOneProcess) {
  run_ranks(1, [](Group& group) { EXPECT_FALSE(shares_process(group)); });
  run_ranks(3, [](Group& group) {
    EXPECT_TRUE(shares_process(group));
    const Group::Subgroups alone = group.new_subgroups(1);
    EXPECT_FALSE(shares_process(alone.groups[static_cast<size_t>(group.rank())]));
  });
  run_hosts({0, 1, 1}, [](Group& group) { EXPECT_TRUE(shares_process(group)); });
  const std::vector<int> ended = run_processes(2, [](Group& group) {
    EXPECT_FALSE(shares_process(group));
    // Ranks 0 and 1 are threads of the first process.
    const auto be = [&](int rank) {
      transport::FileStore store(*config::env("CHORALE_TEST_STORE"));
      const Group mixed = Group::connect(store, "mixed", rank, 3);
      EXPECT_EQ(shares_process(mixed), rank < 2);
      mixed.barrier().wait();
    };
    if (group.rank() == 1) return be(2);
    std::thread second([&] { be(1); });
    be(0);
    second.join();
  });
  EXPECT_EQ(ended, (std::vector<int>{0, 0}));
}

// Rank 1 comes to the call when rank 0 most likely waits for it: were the stream that both use held back, rank 1 could
// not copy its part to the host, and neither would ever go on.
TEST(Work, RanksOfOneProcessMayUseADevicesDefaultStream) {
  constexpr Device device{DeviceType::kSim, 0};
  sim::add_device({.devices = 4, .most_delay = 20us});
  for (const std::vector<int>& hosts : {std::vector<int>{0, 0}, std::vector<int>{0, 1}}) {
    run_hosts(hosts, [&](Group& group) {
      const Tensor x = Tensor::empty({3}, DType::kF32, device), word = Tensor::empty({1}, DType::kU8);
      const auto own = static_cast<float>(1 + group.rank());
      copy_between_devices(Tensor::from({own, 10 * own, 100 * own}, {3}), x);
      if (group.rank() == 1) {
        group.recv(word, 0);
        std::this_thread::sleep_for(20ms);
      }
      const comm::Work work = group.all_reduce(x, Reduce::kSum, {.timeout = 10s});
      if (group.rank() == 0) group.send(word, 1);
      Stream stream = current_stream(device);
      work.wait(stream);
      EXPECT_EQ(on_host(x).to_vector<float>(), (std::vector<float>{3, 30, 300}));
    });
  }
}

}  // namespace
}  // namespace chorale::comm
