#include "chorale/device/sim/sim_device.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <numeric>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/device/program.h"
#include "chorale/device/runtime.h"
#include "chorale/device/stream.h"
#include "chorale/device/stream_allocator.h"

namespace chorale::sim {
namespace {

using namespace std::chrono_literals;

constexpr Device kSim0{DeviceType::kSim, 0}, kSim1{DeviceType::kSim, 1};
constexpr int64_t kElems = 1000;

// Memory of a device, seen as int32 by tasks.
class Numbers {
 public:
  explicit Numbers(Device device, size_t bytes = kElems * 4)
      : device_(device), block_(allocator_of(device).allocate(bytes)) {}
  ~Numbers() { allocator_of(device_).deallocate(block_); }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;

  void* address() const { return block_.data; }
  int32_t* opened() const { return static_cast<int32_t*>(open(block_.data)); }
  // Tasks that write value + i, and that write the sum of all into *to.
  void write_later(Stream stream, int32_t value) const {
    put(stream, [to = opened(), value] { std::iota(to, to + kElems, value); });
  }
  void sum_later(Stream stream, std::atomic<int64_t>& to) const {
    put(stream, [from = opened(), &to] { to = std::accumulate(from, from + kElems, int64_t{0}); });
  }
  static int64_t sum_from(int64_t value) { return kElems * value + kElems * (kElems - 1) / 2; }

 private:
  Device device_;
  memory::Block block_;
};

class SimDevice : public testing::Test {
 protected:
  void SetUp() override { add_device({.most_delay = 300us}); }
};

TEST_F(SimDevice, TasksOfAStreamRunInTheirOrderAndLate) {
  const Stream stream = make_stream(kSim0);
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) put(stream, [&order, i] { order.push_back(i); });
  synchronize(stream);
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);

  hold(stream);
  std::atomic<bool> ran{false};
  put(stream, [&ran] { ran = true; });
  const Event behind(stream);
  EXPECT_FALSE(behind.done());
  EXPECT_FALSE(ran);
  EXPECT_THROW(behind.synchronize(within(20ms)), StateError);
  go_on(stream);
  behind.synchronize();
  EXPECT_TRUE(ran);
}

TEST_F(SimDevice, AnEventOrdersTwoStreamsAndItsAbsenceIsFound) {
  const Stream writer = make_stream(kSim0), reader = make_stream(kSim1);
  const Numbers numbers(kSim0);
  numbers.write_later(writer, 1);
  synchronize(writer);
  // The writer is late: a reader that was not told to wait reads what was there before.
  hold(writer);
  numbers.write_later(writer, 7);
  std::atomic<int64_t> found{0};
  numbers.sum_later(reader, found);
  synchronize(reader);
  EXPECT_EQ(found, Numbers::sum_from(1)) << "the missing event was not noticed";

  Event(writer).wait(reader);
  numbers.sum_later(reader, found);
  go_on(writer);
  synchronize(reader);
  EXPECT_EQ(found, Numbers::sum_from(7));
}

TEST_F(SimDevice, AnErrorSurfacesAtTheNextWaitOnceAndSkipsWhatWasBehindIt) {
  const Stream stream = make_stream(kSim0), other = make_stream(kSim0);
  std::atomic<bool> ran{false};
  put(stream, [] { throw InvalidArgument("planted"); });
  put(stream, [&ran] { ran = true; });
  EXPECT_THROW(synchronize(stream), InvalidArgument);
  EXPECT_FALSE(ran);
  synchronize(stream);
  put(stream, [&ran] { ran = true; });
  synchronize(stream);
  EXPECT_TRUE(ran);

  put(stream, [] { throw InvalidArgument("planted"); });
  Event(stream).wait(other);
  EXPECT_THROW(synchronize(other), InvalidArgument) << "what waits for a failed stream fails, too";
}

TEST_F(SimDevice, ABlockIsReusedAtOnceOnItsStreamAndElsewhereAfterAnEvent) {
  const Stream own = make_stream(kSim0), other = make_stream(kSim0);
  void* first = nullptr;
  hold(own);
  {
    const StreamScope scope(own);
    {
      const Numbers numbers(kSim0);
      first = numbers.address();
      numbers.write_later(own, 1);
    }
    const Numbers again(kSim0);
    EXPECT_EQ(again.address(), first) << "work on one stream is in order";
  }
  {
    const StreamScope scope(other);
    const Numbers elsewhere(kSim0);
    EXPECT_NE(elsewhere.address(), first) << "the write of its first owner has not run yet";
  }
  go_on(own);
  synchronize(own);
  const StreamScope scope(other);
  std::vector<std::unique_ptr<Numbers>> all;
  bool seen = false;
  for (int i = 0; i < 64 && !seen; ++i) {
    all.push_back(std::make_unique<Numbers>(kSim0));
    seen = all.back()->address() == first;
  }
  EXPECT_TRUE(seen) << "the block never came back";
}

TEST_F(SimDevice, ABlockReusedTooEarlyIsFound) {
  constexpr size_t kBytes = 40960;  // no other test frees a block of this size, so the one just freed fits best
  const auto sum_beside_a_late_write = [&] {
    const Stream own = make_stream(kSim0), other = make_stream(kSim0);
    hold(own);
    {
      const StreamScope scope(own);
      const Numbers freed(kSim0, kBytes);
      freed.write_later(own, 1);
    }
    std::atomic<int64_t> found{0};
    {
      const StreamScope scope(other);
      const Numbers numbers(kSim0, kBytes);
      numbers.write_later(other, 50);
      synchronize(other);
      go_on(own);
      synchronize(own);
      numbers.sum_later(other, found);
      synchronize(other);
    }
    return found.load();
  };
  EXPECT_EQ(sum_beside_a_late_write(), Numbers::sum_from(50));
  plant_early_reuse(kSim0, true);
  EXPECT_EQ(sum_beside_a_late_write(), Numbers::sum_from(1)) << "the planted error went unnoticed";
  plant_early_reuse(kSim0, false);
}

TEST_F(SimDevice, ARecordedStreamKeepsItsMemoryFromOthers) {
  const Stream own = make_stream(kSim0), user = make_stream(kSim0);
  const StreamScope scope(own);
  const auto address_after_free = [&](bool recorded) {
    hold(user);
    void* address = nullptr;
    {
      const Numbers numbers(kSim0);
      address = numbers.address();
      numbers.write_later(user, 3);
      if (recorded) record_stream(kSim0, address, user);
    }
    const Numbers next(kSim0);
    const bool same = next.address() == address;
    go_on(user);
    synchronize(user);
    return same;
  };
  EXPECT_TRUE(address_after_free(false));
  EXPECT_FALSE(address_after_free(true));
}

TEST_F(SimDevice, CopiesFollowStridesAndThePinnedSideIsAsynchronous) {
  const Stream stream = make_stream(kSim0);
  const StreamScope scope(stream);
  Runtime& runtime = runtime_of(kSim0);
  const Numbers numbers(kSim0);
  std::vector<int32_t> host(6), back(6);
  std::iota(host.begin(), host.end(), 10);
  const std::vector<int64_t> sizes = {2, 3}, rows = {3, 1}, columns = {1, 2};
  runtime.copy({host.data(), DType::kI32, sizes, rows}, kCpu, {numbers.address(), DType::kI32, sizes, columns}, kSim0,
               stream);
  runtime.copy({numbers.address(), DType::kI32, {sizes}, columns}, kSim0, {back.data(), DType::kI32, sizes, rows}, kCpu,
               stream);
  EXPECT_EQ(back, host);

  Allocator& pinned = *runtime.pinned();
  const memory::Block block = pinned.allocate(24);
  std::memcpy(block.data, host.data(), 24);
  hold(stream);
  runtime.copy({block.data, DType::kI32, sizes, rows}, kCpu, {numbers.address(), DType::kI32, sizes, rows}, kSim0,
               stream);
  EXPECT_FALSE(Event(stream).done()) << "the host was kept waiting";
  pinned.deallocate(block);
  const memory::Block next = pinned.allocate(24);
  EXPECT_NE(next.data, block.data) << "a copy still reads it";
  go_on(stream);
  synchronize(stream);
  pinned.deallocate(next);
  const int32_t nine = 9;
  runtime.fill(&nine, {numbers.address(), DType::kI32, sizes, rows}, stream);
  runtime.copy({numbers.address(), DType::kI32, sizes, rows}, kSim0, {back.data(), DType::kI32, sizes, rows}, kCpu,
               stream);
  EXPECT_EQ(back, std::vector<int32_t>(6, 9));
}

TEST_F(SimDevice, AProgramRunsWhatWasRecordedAsOftenAsAsked) {
  const Stream stream = make_stream(kSim0);
  const Numbers numbers(kSim0);
  numbers.write_later(stream, 0);
  Recording recording(stream);
  put(stream, [at = numbers.opened()] { ++at[5]; });
  const Program program = recording.finish();
  std::atomic<int64_t> found{0};
  numbers.sum_later(stream, found);
  synchronize(stream);
  EXPECT_EQ(found, Numbers::sum_from(0)) << "recording runs nothing";
  for (int i = 0; i < 3; ++i) program.run(stream);
  numbers.sum_later(stream, found);
  synchronize(stream);
  EXPECT_EQ(found, Numbers::sum_from(0) + 3);
  EXPECT_THROW(Recording(Stream{kCpu}), InvalidArgument);
}

TEST_F(SimDevice, DevicesThatAreNotThereAreNamed) {
  EXPECT_THROW(current_stream({DeviceType::kSim, 7}), InvalidArgument);
  EXPECT_THROW(current_stream({DeviceType::kCuda, 0}), StateError);
}

using SimDeviceDeathTest = SimDevice;

TEST_F(SimDeviceDeathTest, TheHostsTouchIsAFaultThatSaysWhoseMemoryItWas) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        add_device();
        const Numbers numbers(kSim0);
        set_label(kSim0, numbers.address(), "the result of planting");
        *static_cast<volatile int*>(numbers.address()) = 1;
      },
      "the host touched memory of sim:0: a block of 4096 bytes, the result of planting");
}

TEST_F(SimDeviceDeathTest, PinnedMemoryIsClosedWhileACopyRuns) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(
      {
        add_device();
        const Numbers numbers(kSim0);
        const Stream stream = make_stream(kSim0);
        const memory::Block block = runtime_of(kSim0).pinned()->allocate(4);
        *reinterpret_cast<volatile int*>(block.data) = 1;
        hold(stream);
        runtime_of(kSim0).copy({block.data, DType::kI32}, kCpu, {numbers.address(), DType::kI32}, kSim0, stream);
        *reinterpret_cast<volatile int*>(block.data) = 2;
      },
      "the host touched pinned memory while a copy");
}

// Note [Memory of programs].
TEST_F(SimDevice, MemoryOfAProgramIsNobodyElsesBeforeItIsGone) {
  auto& allocator = dynamic_cast<StreamAllocator&>(runtime_of(kSim0).allocator(kSim0));
  constexpr size_t kBytes = size_t{3} << 20;
  const Stream stream = make_stream(kSim0);
  const StreamScope scope(stream);
  const auto take = [&] { return allocator.allocate(kBytes); };
  const uint64_t keeper = allocator.begin_keeping(stream);
  const memory::Block kept = take();
  allocator.deallocate(kept);
  const memory::Block again = take();
  EXPECT_EQ(again.data, kept.data) << "within the recording it is handed out again";
  allocator.deallocate(again);
  allocator.end_keeping(stream);
  const memory::Block other = take();
  EXPECT_NE(other.data, kept.data);
  allocator.release_kept(keeper);
  const memory::Block freed = take();
  EXPECT_EQ(freed.data, kept.data);
  allocator.deallocate(freed);
  allocator.deallocate(other);
}

// Note [Memory of programs].
TEST_F(SimDevice, MemoryThatWasThereBeforeMayBeGivenToAProgram) {
  auto& allocator = dynamic_cast<StreamAllocator&>(runtime_of(kSim0).allocator(kSim0));
  constexpr size_t kBytes = size_t{5} << 20;
  const Stream stream = make_stream(kSim0), another = make_stream(kSim0);
  const StreamScope scope(stream);
  const auto take = [&] { return allocator.allocate(kBytes); };
  const memory::Block given = take();
  EXPECT_FALSE(allocator.hand_over(given.data, stream)) << "nothing is recorded";
  const uint64_t keeper = allocator.begin_keeping(stream);
  EXPECT_FALSE(allocator.hand_over(given.data, another));
  EXPECT_TRUE(allocator.hand_over(given.data, stream));
  allocator.end_keeping(stream);
  allocator.deallocate(given);
  const memory::Block other = take();
  EXPECT_NE(other.data, given.data) << "the program still uses it";
  allocator.release_kept(keeper);
  const memory::Block freed = take();
  EXPECT_EQ(freed.data, given.data);
  allocator.deallocate(freed);
  allocator.deallocate(other);
}

}  // namespace
}  // namespace chorale::sim
