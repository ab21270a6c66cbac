// NCCL behind collectives (device/cuda/nccl.h, Note [Calls between devices]). In the rehearsal a stand-in takes its
// place, between devices that do not exist (nccl_stand_in_test_util.h). On a machine with one GPU, which NCCL refuses
// to two ranks, the tests have one rank, meetings to which nobody comes, and what the refusal looks like.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/comm/spec_test_util.h"
#include "chorale/device/collectives.h"
#include "chorale/device/cuda/gpu_test_util.h"
#include "chorale/device/cuda/nccl_stand_in_test_util.h"
#include "chorale/device/runtime.h"
#include "chorale/device/stream.h"
#include "chorale/tensor/device_copy.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;
using Clock = Deadline::Clock;

Device gpu(int index) { return {DeviceType::kCuda, static_cast<int16_t>(index)}; }
using cuda::rehearses;

Tensor on(Device device, const Tensor& x) {
  const Tensor there = Tensor::empty(x.sizes(), x.dtype(), device);
  copy_between_devices(x, there);
  return there;
}
template <class T>
Tensor numbers_on(Device device, std::vector<T> values) {
  const Tensor x = Tensor::empty({static_cast<int64_t>(values.size())}, dtype_of<T>);
  std::copy(values.begin(), values.end(), x.data<T>());
  return on(device, x);
}
Tensor own_numbers(Device device, int rank, int64_t n, int first = 0) {
  return on(device, numbered<float>({n}, [&](int64_t i) { return sent_by<float>(rank, first + i); }));
}
std::vector<float> numbers_of(int rank, int64_t n, int first = 0) {
  std::vector<float> all;
  for (int64_t i = 0; i < n; ++i) all.push_back(sent_by<float>(rank, first + i));
  return all;
}
std::vector<float> combined(int ranks, int64_t n, const std::function<float(float, float)>& two, int first = 0) {
  std::vector<float> all = numbers_of(0, n, first);
  for (int r = 1; r < ranks; ++r) {
    const auto theirs = numbers_of(r, n, first);
    for (size_t i = 0; i < all.size(); ++i) all[i] = two(all[i], theirs[i]);
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

class NcclStandInTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!rehearses()) GTEST_SKIP() << "the stand-in is for rehearsals";
    runtime_of(gpu(0));
    script_ = cuda::nccl_stand_in();
    if (!script_) GTEST_SKIP() << "the library that is found first is NVIDIA's, or there is none";
    script_->reset();
  }
  cuda::NcclStandIn* script_ = nullptr;
};

template <class T>
void expect_reduction(Group& group, Device device, std::vector<T> own, Reduction how, std::vector<T> expected) {
  const Tensor x = numbers_on(device, std::move(own));
  group.all_reduce(x, how).wait();
  EXPECT_EQ(x.to_vector<T>(), expected) << x.dtype();
}

TEST_F(NcclStandInTest, EveryReduction) {
  run_ranks(3, [](Group& group) {
    const Device device = gpu(group.rank());
    const StreamScope own(make_stream(device));
    ask(group, device);
    const int rank = group.rank();
    const auto mine = static_cast<float>(rank + 1);  // 1, 2, 3
    expect_reduction<float>(group, device, {mine, -mine}, Reduce::kSum, {6, -6});
    expect_reduction<float>(group, device, {mine, -mine}, Reduce::kAverage, {2, -2});
    expect_reduction<float>(group, device, {mine, -mine}, Reduce::kProduct, {6, -6});
    expect_reduction<float>(group, device, {mine, -mine}, Reduce::kMax, {3, -1});
    expect_reduction<float>(group, device, {mine, -mine}, Reduce::kMin, {1, -3});
    expect_reduction<float>(group, device, {mine, -mine}, premultiplied_sum(0.5), {3, -3});
    expect_reduction<double>(group, device, {mine, 8}, premultiplied_sum(0.25), {1.5, 6});
    expect_reduction<float16>(group, device, {float16(mine)}, premultiplied_sum(0.5), {float16(3)});
    expect_reduction<bfloat16>(group, device, {bfloat16(mine)}, premultiplied_sum(0.5), {bfloat16(3)});
    expect_reduction<bfloat16>(group, device, {bfloat16(mine)}, Reduce::kAverage, {bfloat16(2)});
    expect_reduction<int8_t>(group, device, {static_cast<int8_t>(rank - 1), -5}, Reduce::kMin, {-1, -5});
    expect_reduction<uint8_t>(group, device, {static_cast<uint8_t>(100 + rank)}, Reduce::kMax, {102});
    expect_reduction<int32_t>(group, device, {rank, -100000}, Reduce::kSum, {3, -300000});
    expect_reduction<int64_t>(group, device, {rank - 1, int64_t{1} << 40}, Reduce::kSum, {0, int64_t{3} << 40});
    expect_reduction<complex64>(group, device, {complex64(mine, -1)}, Reduce::kSum, {complex64(6, -3)});
    expect_reduction<complex128>(group, device, {complex128(mine, -1)}, premultiplied_sum(0.5), {complex128(3, -1.5)});
    // A truth value stays one: rank 0 alone says yes in the first place, all but rank 0 in the second, all in the
    // third.
    const std::vector<uint8_t> truths{rank == 0, rank != 0, true};
    for (const auto& [how, expected] :
         std::vector<std::pair<Reduce, std::vector<uint8_t>>>{{Reduce::kSum, {1, 1, 1}},
                                                              {Reduce::kMax, {1, 1, 1}},
                                                              {Reduce::kProduct, {0, 0, 1}},
                                                              {Reduce::kMin, {0, 0, 1}}}) {
      const Tensor x = Tensor::empty({3}, DType::kBool);
      std::copy(truths.begin(), truths.end(), static_cast<uint8_t*>(x.raw()));
      const Tensor there = on(device, x);
      group.all_reduce(there, how).wait();
      copy_between_devices(there, x);
      EXPECT_EQ(std::vector<uint8_t>(static_cast<uint8_t*>(x.raw()), static_cast<uint8_t*>(x.raw()) + 3), expected);
    }
    // What NCCL cannot combine goes through the host.
    expect_reduction<int16_t>(group, device, {static_cast<int16_t>(rank)}, Reduce::kSum, {3});
    expect_reduction<int32_t>(group, device, {rank}, Reduce::kBitOr, {3});
  });
  EXPECT_EQ(script_->calls, 3 * 20);
  EXPECT_EQ(script_->made_ids, 1);
  EXPECT_EQ(script_->scaled, 0);  // the call behind one has ended its reduction
  EXPECT_EQ(script_->destroyed, 3);
  EXPECT_EQ(script_->aborted, 0);
}

TEST_F(NcclStandInTest, EveryOtherCollective) {
  run_ranks(3, [](Group& group) {
    const Device device = gpu(group.rank());
    const StreamScope own(make_stream(device));
    const int rank = group.rank(), size = group.size();
    ask(group, device);
    for (int root = 0; root < size; ++root) {
      Tensor x = own_numbers(device, rank, 7);
      group.broadcast(x, root).wait();
      EXPECT_EQ(x.to_vector<float>(), numbers_of(root, 7));
      x = own_numbers(device, rank, 7);
      group.reduce(x, root).wait();
      if (rank == root) {
        EXPECT_EQ(x.to_vector<float>(), combined(size, 7, std::plus<>()));
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
    std::vector<Tensor> outputs, inputs;
    for (int r = 0; r < size; ++r) outputs.push_back(room(device, r + 1));
    group.all_gather(outputs, own_numbers(device, rank, rank + 1)).wait();
    for (int r = 0; r < size; ++r) EXPECT_EQ(outputs[static_cast<size_t>(r)].to_vector<float>(), numbers_of(r, r + 1));
    for (int r = 0; r < size; ++r) inputs.push_back(own_numbers(device, rank, r + 2, 100 * r));
    const Tensor part = room(device, rank + 2);
    group.reduce_scatter(part, inputs, Reduce::kMax).wait();
    EXPECT_EQ(part.to_vector<float>(),
              combined(
                  size, rank + 2, [](float a, float b) { return std::max(a, b); }, 100 * rank));
    group.reduce_scatter(part, inputs, premultiplied_sum(0.5)).wait();
    EXPECT_EQ(part.to_vector<float>(), times(combined(size, rank + 2, std::plus<>(), 100 * rank), 0.5f));
    inputs.clear();
    outputs.clear();
    for (int r = 0; r < size; ++r) {
      inputs.push_back(own_numbers(device, rank, rank + 2 * r + 1, 10 * r));
      outputs.push_back(room(device, r + 2 * rank + 1));
    }
    group.all_to_all(outputs, inputs).wait();
    for (int r = 0; r < size; ++r)
      EXPECT_EQ(outputs[static_cast<size_t>(r)].to_vector<float>(), numbers_of(r, r + 2 * rank + 1, 10 * rank)) << r;
    // Several in flight, and a group in the group.
    const Tensor a = own_numbers(device, rank, 4), b = own_numbers(device, rank, 5);
    const Work first = group.all_reduce(a), second = group.all_reduce(b);
    second.wait();
    first.wait();
    EXPECT_EQ(a.to_vector<float>(), combined(size, 4, std::plus<>()));
    EXPECT_EQ(b.to_vector<float>(), combined(size, 5, std::plus<>()));
    const Group pair = group.new_group({0, 2});
    if (pair.is_member()) {
      ask(pair, device);
      const Tensor x = own_numbers(device, rank, 3);
      pair.broadcast(x, 2).wait();
      EXPECT_EQ(x.to_vector<float>(), numbers_of(2, 3));
    }
  });
  EXPECT_EQ(script_->made_ids, 2);
  EXPECT_EQ(script_->begun, 5);
  EXPECT_EQ(script_->destroyed, 5);
  EXPECT_EQ(script_->aborted, 0);
}

void expect_failure(const Group& group, const char* words, std::chrono::milliseconds timeout) {
  const Tensor x = own_numbers(gpu(group.rank()), group.rank(), 10);
  const auto begun = Clock::now();
  try {
    group.all_reduce(x, Reduce::kSum, {.timeout = timeout}).wait();
    ADD_FAILURE() << "rank " << group.rank() << " noticed nothing";
  } catch (const CommError& error) {
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
  EXPECT_LT(Clock::now() - begun, 10s);
  EXPECT_TRUE(group.is_broken());
}

// The stand-in plays a rank that never meets the others, one whose device stops, and one whose library reports an error
// behind a call.
TEST_F(NcclStandInTest, WhatFailsIsAborted) {
  struct Case {
    bool no_init;
    int hangs_at, fails_at;
    const char* words;
  };
  for (const Case& one : {Case{true, 0, 0, "have not ended the call"}, Case{false, 2, 0, "have not ended"},
                          Case{false, 2, 2, "NCCL says: a call, or meeting the other ranks"}}) {
    script_->reset();
    script_->no_init = one.no_init;
    script_->hangs_at = one.hangs_at;
    script_->fails_at = one.fails_at;
    run_ranks(2, [&](Group& world) {
      const Device device = gpu(world.rank());
      const StreamScope own(make_stream(device));
      Group group = world.duplicate();
      ask(group, device);
      if (!one.no_init) ask(group, device);
      expect_failure(group, one.words, one.fails_at > 0 ? 30000ms : 300ms);
      world.barrier().wait();
      Group again = world.duplicate();  // the ranks go on without it
      again.all_reduce(filled<float>({1}, 1)).wait();
    });
    EXPECT_EQ(script_->begun, 2) << one.words;
    EXPECT_EQ(script_->aborted, 2) << one.words;
    EXPECT_EQ(script_->destroyed, 0) << one.words;
  }
}

// ---- NVIDIA's own

// The library with what one GPU lacks: ranks seem to have a GPU each, and one of them may never come.
class Apart final : public DeviceCollectives {
 public:
  explicit Apart(int absent) : absent_(absent), real_(*find_collectives(DeviceType::kCuda)) {
    set_collectives(DeviceType::kCuda, this);
  }
  ~Apart() override { set_collectives(DeviceType::kCuda, &real_); }
  Apart(const Apart&) = delete;
  Apart& operator=(const Apart&) = delete;

  static thread_local int rank;

  std::string why_not() override { return real_.why_not(); }
  std::array<std::byte, 16> identity(Device) override { return {static_cast<std::byte>(rank), std::byte{77}}; }
  bool can(const DeviceReduction& how) override { return real_.can(how); }
  Id make_id() override { return real_.make_id(); }
  std::unique_ptr<DeviceComm> begin(const Id& id, Device device, int own, int size) override {
    if (own == absent_) return std::make_unique<Nobody>();
    return real_.begin(id, device, own, size);
  }

 private:
  struct Nobody final : DeviceComm {
    bool settled() override { return false; }
    void abort() noexcept override {}
    void all_reduce(DeviceChunk, DeviceChunk, const DeviceReduction&, Stream) override {}
    void reduce(DeviceChunk, DeviceChunk, int, const DeviceReduction&, Stream) override {}
    void reduce_scatter(std::span<const DeviceChunk>, DeviceChunk, const DeviceReduction&, Stream) override {}
    void broadcast(DeviceChunk, int, Stream) override {}
    void all_gather(DeviceChunk, std::span<const DeviceChunk>, Stream) override {}
    void exchange(std::span<const DeviceChunk>, std::span<const DeviceChunk>, Stream) override {}
  };
  const int absent_;
  DeviceCollectives& real_;
};
thread_local int Apart::rank = 0;

class Nccl : public testing::Test {
 protected:
  void SetUp() override {
    if (rehearses()) GTEST_SKIP() << "a rehearsal has no GPU for NCCL";
    if (const std::string no_gpu = cuda::why_no_gpu(); !no_gpu.empty()) GTEST_SKIP() << no_gpu;
    const std::string why = find_collectives(DeviceType::kCuda)->why_not();
    ASSERT_EQ(why, "");
  }
};

void settle(DeviceComm& comm) {
  const auto until = Clock::now() + 60s;
  while (!comm.settled()) {
    ASSERT_LT(Clock::now(), until);
    std::this_thread::yield();
  }
}

void calls_of_one_rank() {
  DeviceCollectives& library = *find_collectives(DeviceType::kCuda);
  const StreamScope own(make_stream(gpu(0)));
  const Stream stream = current_stream(gpu(0));
  const auto comm = library.begin(library.make_id(), gpu(0), 0, 1);
  settle(*comm);
  const auto chunk = [](const Tensor& x) {
    return DeviceChunk{static_cast<std::byte*>(x.raw()), static_cast<size_t>(x.elems()) * x.elem_bytes()};
  };
  const auto numbers = numbers_of(3, 1000);
  const Tensor in = numbers_on(gpu(0), numbers);
  const auto expect = [&](const std::function<void(DeviceChunk)>& call, const std::vector<float>& expected) {
    const Tensor out = room(gpu(0), in.elems());
    call(chunk(out));
    settle(*comm);
    EXPECT_EQ(out.to_vector<float>(), expected);
  };
  const DeviceChunk from = chunk(in);
  const std::vector<DeviceChunk> list{from};
  expect([&](DeviceChunk to) { comm->all_reduce(from, to, {DType::kF32, Reduce::kSum, 1}, stream); }, numbers);
  expect(
      [&](DeviceChunk to) {
        comm->all_reduce(from, to, {DType::kF32, Reduce::kSum, 0.5}, stream);
      },
      times(numbers, 0.5f));
  expect([&](DeviceChunk to) { comm->all_reduce(from, to, {DType::kF32, Reduce::kAverage, 1}, stream); }, numbers);
  expect([&](DeviceChunk to) { comm->reduce(from, to, 0, {DType::kF32, Reduce::kMax, 1}, stream); }, numbers);
  expect(
      [&](DeviceChunk to) {
        comm->reduce_scatter(list, to, {DType::kF32, Reduce::kSum, 0.25}, stream);
      },
      times(numbers, 0.25f));
  expect([&](DeviceChunk to) { comm->all_gather(from, std::span(&to, 1), stream); }, numbers);
  expect([&](DeviceChunk to) { comm->exchange(list, std::span(&to, 1), stream); }, numbers);
  comm->broadcast(from, 0, stream);
  settle(*comm);
  EXPECT_EQ(in.to_vector<float>(), numbers);
  const Tensor half = numbers_on(gpu(0), std::vector<bfloat16>(9, bfloat16(3)));
  comm->all_reduce(chunk(half), chunk(half), {DType::kBF16, Reduce::kSum, 0.5}, stream);
  settle(*comm);
  EXPECT_EQ(half.to_vector<float>(), std::vector<float>(9, 1.5f));
}

TEST_F(Nccl, OneRank) {
  for (int i = 0; i < 2; ++i) calls_of_one_rank();  // the second after the first has ended in peace
}

// spec: test_nccl_init_abort
TEST_F(Nccl, AMeetingToWhichARankNeverComesIsAborted) {
  // This is the row's own case: a second thread ends what the first waits for.
  DeviceCollectives& library = *find_collectives(DeviceType::kCuda);
  for (int round = 0; round < 2; ++round) {
    const auto comm = library.begin(library.make_id(), gpu(0), 0, 2);
    std::thread other([&] {
      std::this_thread::sleep_for(300ms);
      comm->abort();
    });
    const auto begun = Clock::now();
    EXPECT_THROW(
        while (Clock::now() - begun < 30s) {
          EXPECT_FALSE(comm->settled());
          std::this_thread::yield();
        },
        StateError);
    EXPECT_LT(Clock::now() - begun, 20s);
    other.join();
  }
  // Rank 1 of a group never joins, the others' barrier throws when their second is over, and they go on.
  {
    Apart apart(1);
    run_ranks(2, [](Group& world) {
      Apart::rank = world.rank();
      const StreamScope own(make_stream(gpu(0)));
      for (int round = 0; round < 2; ++round) {
        Group group = world.duplicate({.timeout = 1s});
        const Tensor x = own_numbers(gpu(0), world.rank(), 1);
        group.all_reduce(x).wait();
        const auto begun = Clock::now();
        EXPECT_THROW(group.all_reduce(x).wait(), CommError);
        EXPECT_LT(Clock::now() - begun, 20s);
        EXPECT_TRUE(group.is_broken());
        group.destroy();
        synchronize(gpu(0));
        world.barrier().wait();
      }
    });
  }
  calls_of_one_rank();
}

// NCCL refuses a GPU to two ranks: an error that it reports while they meet.
TEST_F(Nccl, ItsErrorsBreakTheGroup) {
  {
    Apart apart(-1);
    run_ranks(2, [](Group& world) {
      Apart::rank = world.rank();
      const StreamScope own(make_stream(gpu(0)));
      Group group = world.duplicate();
      const Tensor x = own_numbers(gpu(0), world.rank(), 1);
      group.all_reduce(x).wait();
      const auto begun = Clock::now();
      try {
        group.all_reduce(x, Reduce::kSum, {.timeout = 60s}).wait();
        ADD_FAILURE() << "NCCL took two ranks on one GPU";
      } catch (const CommError& error) {
        EXPECT_NE(std::string(error.what()).find("NCCL says"), std::string::npos) << error.what();
      }
      EXPECT_LT(Clock::now() - begun, 40s);
      world.barrier().wait();
    });
  }
  calls_of_one_rank();
}

}  // namespace
}  // namespace chorale::comm
