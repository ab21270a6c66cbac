// Collectives whose bytes stay on devices (Note [Calls by devices]), on simulated ones: between ranks that each have
// their own, and among ranks that share one.
#include "chorale/comm/device_calls.h"

#include <gtest/gtest.h>

#include <csignal>
#include <functional>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/comm/coalescing.h"
#include "chorale/comm/comm_counter.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/comm/sim_collectives_test_util.h"
#include "chorale/comm/spec_test_util.h"
#include "chorale/comm/timeout_extension.h"
#include "chorale/device/sim/sim_device.h"
#include "chorale/device/stream.h"
#include "chorale/tensor/device_copy.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;

constexpr int kDevices = 4;
Device sim_device(int index) { return {DeviceType::kSim, static_cast<int16_t>(index)}; }

class DeviceCalls : public testing::Test {
 protected:
  void SetUp() override { sim::add_device({.devices = kDevices, .most_delay = 20us}); }
  void TearDown() override {
    set_collectives(DeviceType::kSim, nullptr);
    set_peer_memory(DeviceType::kSim, nullptr);
  }
  void use_library() { set_collectives(DeviceType::kSim, &library_); }
  void use_peers() { set_peer_memory(DeviceType::kSim, &peers_); }

  SimCollectives library_;
  SimPeers peers_;
};

Tensor on(Device device, const Tensor& x) {
  const Tensor there = Tensor::empty(x.sizes(), x.dtype(), device);
  copy_between_devices(x, there);
  return there;
}
// Element i of this rank's tensor, different for every rank and place.
Tensor own_numbers(Device device, int rank, int64_t n, int first = 0) {
  return on(device, numbered<float>({n}, [&](int64_t i) { return sent_by<float>(rank, first + i); }));
}
std::vector<float> numbers_of(int rank, int64_t n, int first = 0) {
  std::vector<float> all;
  for (int64_t i = 0; i < n; ++i) all.push_back(sent_by<float>(rank, static_cast<int>(i) + first));
  return all;
}
std::vector<float> sum_of(int ranks, int64_t n, int first = 0) {
  std::vector<float> all(static_cast<size_t>(n));
  for (int r = 0; r < ranks; ++r) {
    for (int64_t i = 0; i < n; ++i) all[static_cast<size_t>(i)] += sent_by<float>(r, static_cast<int>(i) + first);
  }
  return all;
}
std::vector<float> times(std::vector<float> values, float by) {
  for (float& value : values) value *= by;
  return values;
}
Tensor room(Device device, int64_t n) { return on(device, filled<float>({n}, -1)); }
// The first call of a group with such tensors asks which device the others have.
void ask(const Group& group, Device device) { group.all_reduce(own_numbers(device, 0, 1)).wait(); }

// Every collective, with data that depend on place and sender; sizes of all_to_all, all_gather and reduce_scatter
// differ.
void every_collective(Group& group, Device device) {
  const int rank = group.rank(), size = group.size();
  constexpr int64_t kElems = 1003;

  Tensor x = own_numbers(device, rank, kElems);
  group.all_reduce(x).wait();
  EXPECT_EQ(x.to_vector<float>(), sum_of(size, kElems));
  x = own_numbers(device, rank, kElems);
  group.all_reduce(x, premultiplied_sum(0.5)).wait();
  EXPECT_EQ(x.to_vector<float>(), times(sum_of(size, kElems), 0.5f));
  x = own_numbers(device, rank, kElems);
  group.all_reduce(x, Reduce::kMax).wait();
  EXPECT_EQ(x.to_vector<float>(), numbers_of(size - 1, kElems));
  x = on(device, filled<float>({7}, static_cast<float>(rank)));
  group.all_reduce(x, Reduce::kAverage).wait();
  EXPECT_EQ(x.to_vector<float>(), std::vector<float>(7, static_cast<float>(size - 1) / 2));
  // Across its memory.
  const Tensor wide = own_numbers(device, rank, 12);
  const Tensor turned = wide.view_as({4, 3}, {1, 4}, 0);
  group.all_reduce(turned).wait();
  EXPECT_EQ(wide.to_vector<float>(), sum_of(size, 12));

  for (int root = 0; root < size; ++root) {
    x = own_numbers(device, rank, kElems);
    group.broadcast(x, root).wait();
    EXPECT_EQ(x.to_vector<float>(), numbers_of(root, kElems));
    x = own_numbers(device, rank, kElems);
    group.reduce(x, root).wait();
    if (rank == root) {
      EXPECT_EQ(x.to_vector<float>(), sum_of(size, kElems));
    }
    std::vector<Tensor> gathered, scattered;
    for (int r = 0; r < size && rank == root; ++r) {
      gathered.push_back(room(device, 5));
      scattered.push_back(own_numbers(device, root, 6, 10 * r));
    }
    group.gather(gathered, own_numbers(device, rank, 5), root).wait();
    for (size_t r = 0; r < gathered.size(); ++r)
      EXPECT_EQ(gathered[r].to_vector<float>(), numbers_of(static_cast<int>(r), 5));
    x = room(device, 6);
    group.scatter(x, scattered, root).wait();
    EXPECT_EQ(x.to_vector<float>(), numbers_of(root, 6, 10 * rank));
  }

  x = room(device, 9 * size);
  group.all_gather_into(x, own_numbers(device, rank, 9)).wait();
  std::vector<float> expected;
  for (int r = 0; r < size; ++r) {
    const auto part = numbers_of(r, 9);
    expected.insert(expected.end(), part.begin(), part.end());
  }
  EXPECT_EQ(x.to_vector<float>(), expected);
  std::vector<Tensor> outputs, inputs;
  for (int r = 0; r < size; ++r) outputs.push_back(room(device, r + 1));
  group.all_gather(outputs, own_numbers(device, rank, rank + 1)).wait();
  for (int r = 0; r < size; ++r) EXPECT_EQ(outputs[static_cast<size_t>(r)].to_vector<float>(), numbers_of(r, r + 1));

  x = room(device, 4);
  group.reduce_scatter_from(x, own_numbers(device, rank, 4 * size)).wait();
  EXPECT_EQ(x.to_vector<float>(), sum_of(size, 4, 4 * rank));
  x = room(device, rank + 2);
  for (int r = 0; r < size; ++r) inputs.push_back(own_numbers(device, rank, r + 2, 100 * r));
  group.reduce_scatter(x, inputs).wait();
  EXPECT_EQ(x.to_vector<float>(), sum_of(size, rank + 2, 100 * rank));

  inputs.clear();
  outputs.clear();
  for (int r = 0; r < size; ++r) {
    inputs.push_back(own_numbers(device, rank, rank + 2 * r, 10 * r));  // rank 0 gives itself nothing
    outputs.push_back(room(device, r + 2 * rank));
  }
  group.all_to_all(outputs, inputs).wait();
  for (int r = 0; r < size; ++r)
    EXPECT_EQ(outputs[static_cast<size_t>(r)].to_vector<float>(), numbers_of(r, r + 2 * rank, 10 * rank)) << r;

  // Several in flight, and several in one.
  const Tensor a = own_numbers(device, rank, 40), b = own_numbers(device, rank, 50, 7),
               c = own_numbers(device, rank, 3);
  const Work first = group.all_reduce(a), second = group.all_reduce(b);
  const Tensor flag = filled<float>({1}, 1);
  group.all_reduce(flag).wait();  // of the host, behind both
  EXPECT_EQ(flag.to_vector<float>(), std::vector<float>{static_cast<float>(size)});
  second.wait();
  first.wait();
  EXPECT_EQ(a.to_vector<float>(), sum_of(size, 40));
  EXPECT_EQ(b.to_vector<float>(), sum_of(size, 50, 7));
  {
    Coalescing together(group);
    static_cast<void>(group.all_reduce(c));
    static_cast<void>(group.all_reduce(wide));
    together.end().wait();
  }
  EXPECT_EQ(c.to_vector<float>(), sum_of(size, 3));
  EXPECT_EQ(wide.to_vector<float>(), times(sum_of(size, 12), static_cast<float>(size)));

  // Bytes of any type move; this one cannot be combined there and goes through the host.
  const Tensor shorts = on(device, filled<int16_t>({3}, static_cast<int16_t>(rank + 1)));
  group.all_reduce(shorts).wait();
  EXPECT_EQ(shorts.to_vector<int16_t>(), std::vector<int16_t>(3, static_cast<int16_t>(size * (size + 1) / 2)));
  group.broadcast(shorts, 0).wait();
}

TEST_F(DeviceCalls, EveryCollectiveBetweenDevices) {
  use_library();
  for (const int size : {2, 3, 4}) {
    library_.calls = 0;
    run_ranks(size, [&](Group& group) {
      const Device device = sim_device(group.rank());
      const StreamScope own(make_stream(device));
      ask(group, device);
      every_collective(group, device);
    });
    // One for each of the calls above but three: one asks, one is of the host, one cannot be combined there.
    EXPECT_EQ(library_.calls, size * (15 + 4 * size)) << size;
    EXPECT_EQ(library_.aborted, 0);
  }
  EXPECT_EQ(library_.ended, library_.begun);
}

// A call with an extended timeout is done when the device is, and takes the extension with it.
TEST_F(DeviceCalls, MayHaveAnExtendedTimeout) {
  for (const bool between : {true, false}) {
    if (between) use_library();
    run_ranks(2, [&](Group& group) {
      const Device device = between ? sim_device(group.rank()) : sim_device(0);
      const StreamScope own(make_stream(device));
      ask(group, device);
      const Tensor x = own_numbers(device, group.rank(), 1003);
      extend_timeouts(10s);
      group.all_reduce(x).wait();
      EXPECT_EQ(x.to_vector<float>(), sum_of(2, 1003)) << between;
      EXPECT_EQ(timeout_extension(), 0s);
    });
  }
}

TEST_F(DeviceCalls, BetweenHosts) {
  use_library();
  run_hosts({0, 0, 1}, [&](Group& group) {
    const Device device = sim_device(group.rank());
    const StreamScope own(make_stream(device));
    ask(group, device);
    every_collective(group, device);
  });
  EXPECT_GT(library_.calls, 0);
  EXPECT_EQ(library_.aborted, 0);
}

TEST_F(DeviceCalls, EveryCollectiveOnASharedDevice) {
  use_peers();
  use_library();  // which is for ranks with devices of their own
  for (const int size : {2, 3}) {
    peers_.opened = 0;
    run_ranks(size, [&](Group& group) {
      const Device device = sim_device(0);
      const StreamScope own(make_stream(device));
      ask(group, device);
      every_collective(group, device);
    });
    EXPECT_GT(peers_.opened, 0);
  }
  EXPECT_EQ(library_.begun, 0);
}

TEST_F(DeviceCalls, SubgroupsHaveCommunicatorsOfTheirOwn) {
  use_library();
  run_ranks(4, [&](Group& world) {
    const Device device = sim_device(world.rank());
    const StreamScope own(make_stream(device));
    const Group half = world.split(world.rank() % 2), all = world.duplicate();
    for (const Group* group : {&half, &all}) ask(*group, device);
    Tensor x = own_numbers(device, world.rank(), 11), y = own_numbers(device, world.rank(), 12);
    const Work first = half.all_reduce(x), second = all.all_reduce(y);
    if (world.rank() < 2) {
      first.wait();
      second.wait();
    } else {
      second.wait();
      first.wait();
    }
    std::vector<float> expected = numbers_of(half.global_rank(0), 11);
    const auto other = numbers_of(half.global_rank(1), 11);
    for (size_t i = 0; i < expected.size(); ++i) expected[i] += other[i];
    EXPECT_EQ(x.to_vector<float>(), expected);
    EXPECT_EQ(y.to_vector<float>(), sum_of(4, 12));
    x = own_numbers(device, world.rank(), 3);
    half.broadcast(x, half.global_rank(1)).wait();
    EXPECT_EQ(x.to_vector<float>(), numbers_of(half.global_rank(1), 3));
  });
  EXPECT_EQ(library_.begun, 8);
}

TEST_F(DeviceCalls, BytesAreCountedAsTheCallersAre) {
  use_library();
  run_ranks(2, [&](Group& group) {
    const Device device = sim_device(group.rank());
    const StreamScope own(make_stream(device));
    ask(group, device);
    const Tensor x = own_numbers(device, group.rank(), 100);
    CommCounter counter;
    group.broadcast(x, 0).wait();
    EXPECT_EQ(counter.count(CallKind::kBroadcast), 1);
    EXPECT_EQ(counter.total(), 1);
    EXPECT_EQ(counter.bytes(), group.rank() == 0 ? 400 : 0);
  });
}

TEST_F(DeviceCalls, WithoutALibraryTheHostMovesThem) {
  use_library();
  library_.script.why_not = "libsim.so not found; install it";
  run_ranks(2, [&](Group& group) {
    const Device device = sim_device(group.rank());
    const StreamScope own(make_stream(device));
    ask(group, device);
    every_collective(group, device);
  });
  EXPECT_EQ(library_.begun, 0);
}

// ---- what goes wrong. Each rank gets an error that says so, in time; the communicator is aborted on all of them.

void expect_failure(const Group& group, Device device, std::initializer_list<const char*> words,
                    const std::function<void()>& call) {
  static_cast<void>(device);
  try {
    call();
    ADD_FAILURE() << "rank " << group.rank() << " noticed nothing";
  } catch (const CommError& error) {
    for (const char* word : words) EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
  EXPECT_TRUE(group.is_broken());
}

TEST_F(DeviceCalls, DifferentCallsAreNamed) {
  use_library();
  run_ranks(2, [&](Group& group) {
    const Device device = sim_device(group.rank());
    const StreamScope own(make_stream(device));
    Group other = group.duplicate();
    ask(other, device);
    const Tensor x = own_numbers(device, group.rank(), 10);
    expect_failure(other, device, {"different calls", "broadcast", "all_reduce", "by devices"}, [&] {
      if (group.rank() == 0) {
        other.all_reduce(x).wait();
      } else {
        other.broadcast(x, 0).wait();
      }
    });
    group.barrier().wait();
  });
  EXPECT_EQ(library_.begun, 0);  // the ranks differed before they met
  EXPECT_EQ(library_.calls, 0);
}

TEST_F(DeviceCalls, SizesThatDoNotFitAreNamed) {
  use_library();
  run_ranks(2, [&](Group& group) {
    const Device device = sim_device(group.rank());
    const StreamScope own(make_stream(device));
    Group other = group.duplicate();
    ask(other, device);
    const std::vector<Tensor> give{own_numbers(device, 0, 3), own_numbers(device, 0, group.rank() == 0 ? 5 : 3)};
    const std::vector<Tensor> take{room(device, 3), room(device, 3)};
    expect_failure(other, device, {"rank 0 gives 20 bytes where rank 1 takes 12"},
                   [&] { other.all_to_all(take, give).wait(); });
    group.barrier().wait();
  });
  EXPECT_EQ(library_.aborted, 2);
}

TEST_F(DeviceCalls, ARankThatStaysAwayIsNamed) {
  use_library();
  run_ranks(2, [&](Group& group) {
    const Device device = sim_device(group.rank());
    const StreamScope own(make_stream(device));
    Group other = group.duplicate();
    const Tensor x = own_numbers(device, group.rank(), 10);
    for (int i = 0; i < 3; ++i) other.all_reduce(x).wait();
    if (group.rank() == 0) {
      expect_failure(other, device, {"all_reduce", "rank 1"},
                     [&] { other.all_reduce(x, Reduce::kSum, {.timeout = 200ms}).wait(); });
    }
    group.barrier().wait();
  });
  EXPECT_EQ(library_.aborted, 2);  // rank 1's when it leaves the broken group
}

// All have come, and one device hangs in the middle.
TEST_F(DeviceCalls, ADeviceThatHangsIsAborted) {
  use_library();
  library_.script.hangs_at = 2;
  run_ranks(3, [&](Group& group) {
    const Device device = sim_device(group.rank());
    const StreamScope own(make_stream(device));
    Group other = group.duplicate();
    ask(other, device);
    const Tensor x = own_numbers(device, group.rank(), 10);
    other.all_reduce(x).wait();
    expect_failure(other, device, {"all_reduce", "timed out", "devices have not ended"},
                   [&] { other.all_reduce(x, Reduce::kSum, {.timeout = 300ms}).wait(); });
    synchronize(device);  // nothing hangs there
    group.barrier().wait();
  });
  EXPECT_EQ(library_.aborted, 3);
}

TEST_F(DeviceCalls, AnAsynchronousErrorBreaksTheGroupForAll) {
  use_library();
  library_.script.hangs_at = 2;
  library_.script.fails_at = 2;
  run_ranks(3, [&](Group& group) {
    const Device device = sim_device(group.rank());
    const StreamScope own(make_stream(device));
    Group other = group.duplicate();
    ask(other, device);
    const Tensor x = own_numbers(device, group.rank(), 10);
    other.all_reduce(x).wait();
    const auto begun = Deadline::Clock::now();
    expect_failure(other, device, {"an asynchronous error of the simulated library"},
                   [&] { other.all_reduce(x, Reduce::kSum, {.timeout = 30s}).wait(); });
    EXPECT_LT(Deadline::Clock::now() - begun, 10s);
    synchronize(device);
    group.barrier().wait();
  });
  EXPECT_EQ(library_.aborted, 3);
}

// One rank's library does not begin, or never comes to where the others meet.
TEST_F(DeviceCalls, AnInitialisationThatFailsOrHangsIsAborted) {
  use_library();
  for (const bool refuses : {true, false}) {
    library_.begun = library_.aborted = 0;
    library_.script.refuses = refuses;
    library_.script.no_init = !refuses;
    run_ranks(2, [&](Group& group) {
      const Device device = sim_device(group.rank());
      const StreamScope own(make_stream(device));
      Group other = group.duplicate();
      ask(other, device);
      const Tensor x = own_numbers(device, group.rank(), 10);
      expect_failure(other, device, {refuses ? "the simulated library does not begin" : "have not ended the call"},
                     [&] { other.all_reduce(x, Reduce::kSum, {.timeout = refuses ? 30000ms : 300ms}).wait(); });
      synchronize(device);
      group.barrier().wait();
    });
    EXPECT_EQ(library_.aborted, library_.begun);
    if (!refuses) {
      EXPECT_EQ(library_.begun, 2);
    }
  }
}

// A rank that leaves by an exception while the others' devices wait for its own.
TEST_F(DeviceCalls, ARankThatThrowsInTheMiddleIsNamed) {
  use_library();
  library_.script.hangs_at = 1;
  run_ranks(2, [&](Group& group) {
    const Device device = sim_device(group.rank());
    const StreamScope own(make_stream(device));
    Group other = group.duplicate();
    ask(other, device);
    const Tensor x = own_numbers(device, group.rank(), 10);
    if (group.rank() == 1) {
      try {
        const Group mine = std::move(other);
        static_cast<void>(mine.all_reduce(x));
        throw std::runtime_error("out of luck");
      } catch (const std::runtime_error&) {  // NOLINT(bugprone-empty-catch): what the others see of it is the test
      }
    } else {
      const auto begun = Deadline::Clock::now();
      EXPECT_NE(message_blaming(1, [&] { other.all_reduce(x, Reduce::kSum, {.timeout = 30s}).wait(); }), "");
      EXPECT_LT(Deadline::Clock::now() - begun, 10s);
    }
    synchronize(device);
    group.barrier().wait();
  });
  EXPECT_EQ(library_.aborted, library_.begun);
}

// A process that is killed while its peer's device waits for its own. (Here each has its own stand-in library, in which
// nobody meets the other: initialisation hangs.)
TEST_F(DeviceCalls, AProcessThatIsKilledIsNamedAndTheCommunicatorAborted) {
  use_library();
  const auto ended = run_processes(2, [&](Group& group) {
    const Device device = sim_device(group.rank());
    const StreamScope own(make_stream(device));
    ask(group, device);
    const Tensor x = own_numbers(device, group.rank(), 10);
    const Work work = group.all_reduce(x, Reduce::kSum, {.timeout = 30s});
    if (group.rank() == 1) {
      const auto until = Deadline::Clock::now() + 300ms;  // until both have come
      while (Deadline::Clock::now() < until) EXPECT_FALSE(work.is_completed());
      ::raise(SIGKILL);
    }
    EXPECT_NE(message_blaming(1, [&] { work.wait(); }).find("all_reduce"), std::string::npos);
    EXPECT_EQ(library_.aborted, 1);
  });
  EXPECT_EQ(ended, (std::vector<int>{0, -SIGKILL}));
}

}  // namespace
}  // namespace chorale::comm
