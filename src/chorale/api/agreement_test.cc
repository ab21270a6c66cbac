// Ranks that compile together.
#include "chorale/api/agreement.h"

#include <gtest/gtest.h>

#include "chorale/api/api.h"
#include "chorale/api/compile.h"
#include "chorale/base/error.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/device/sim/sim_device.h"
#include "chorale/device/stream.h"
#include "chorale/eager/sim_kernels.h"
#include "chorale/op/collective.h"
#include "chorale/op/device_scope.h"

namespace chorale {
namespace {

using comm::run_ranks;

TEST(Agreement, NamesTheFirstNodeThatDiffers) {
  for (const bool whole : {true, false}) {
    run_ranks(3, [&](const comm::Group& ranks) {
      auto f = compile(
          [&](const Tensor& x) {
            const Tensor y = mul(x, 2);
            return add(ranks.rank() == 2 ? relu(y) : neg(y), 1);
          },
          {.whole_graph = whole, .agree = &ranks});
      try {
        f(ones({3}));
        FAIL() << "different graphs went unnoticed on rank " << ranks.rank();
      } catch (const StateError& error) {
        const std::string what = error.what();
        EXPECT_NE(what.find("neg(%1)` on rank 0"), std::string::npos) << what;
        EXPECT_NE(what.find("relu(%1)` on rank 2"), std::string::npos) << what;
      }
    });
  }
}

// Equal graphs agree, with collectives in them, which know their rank.
TEST(Agreement, LetsEqualGraphsRun) {
  run_ranks(2, [&](const comm::Group& ranks) {
    const Tensor group = group_tensor(ranks);
    auto f =
        compile([&](const Tensor& x) { return add(all_reduce(x, group), 1); }, {.whole_graph = true, .agree = &ranks});
    for (int call = 0; call < 2; ++call) {
      EXPECT_EQ(f(full({2}, ranks.rank() + 1)).to_vector<float>(), (std::vector<float>{4, 4}));
    }
  });
}

// A rank whose own graph fits compiles again where another rank's does not, so that all compile as often.
// spec: test_guard_collective
TEST(Agreement, OnGuardsIsAllOrNobody) {
  run_ranks(3, [&](const comm::Group& ranks) {
    auto f = compile([](const Tensor& x) { return sum(x); }, {.whole_graph = true, .agree_on_guards = &ranks});
    const auto call = [&](int64_t size) { EXPECT_EQ(f(ones({size})).item<float>(), static_cast<float>(size)); };
    const auto expect_compiles = [&](int count) { EXPECT_EQ(explain(f).compiles, count) << "rank " << ranks.rank(); };
    call(10);
    expect_compiles(1);
    call(10);
    expect_compiles(1);
    call(ranks.rank() == 0 ? 10 : 12);
    expect_compiles(2);
    call(ranks.rank() == 0 ? 10 : 12);
    expect_compiles(2);
  });
}

// Mistake 38 of part C: what ranks say to each other while they compile must not pair with calls of the model, nor lie
// in the queue of a device. Rank 1 compiles anew where rank 0 has a call of the model in flight.
TEST(Agreement, SaysNothingOnTheGroupOfTheModelNorOnADevice) {
  eager::add_sim_device({.devices = 1});
  run_ranks(2, [&](comm::Group& ranks) {
    const comm::Group own = ranks.duplicate();
    const Tensor group = group_tensor(ranks);
    const auto step = [&](const Tensor& x) { return add(all_reduce(x, group), 1); };
    auto f = compile(step, {.whole_graph = true, .agree = &own, .agree_on_guards = &own, .agree_on_sizes = &own});
    const DeviceScope elsewhere(Device{DeviceType::kSim, 0});
    const Stream stream = current_stream(elsewhere.device());
    sim::hold(stream);  // whatever was put there would never be done
    for (const int64_t size : {3, 3, 5, 7}) {
      const int64_t before = ranks.sequence_number(), before_own = own.sequence_number();
      EXPECT_EQ(f(Tensor::from(std::vector<float>(static_cast<size_t>(size), 2), {size})).to_vector<float>(),
                std::vector<float>(static_cast<size_t>(size), 5));
      EXPECT_EQ(ranks.sequence_number(), before + 1) << "the model's own call";
      EXPECT_GT(own.sequence_number(), before_own);
    }
    sim::go_on(stream);
  });
}

// Mistake 34, a preflight pass that is compiled or kept, has no place here: functions are traced once, sizes are told
// when something is compiled, and nothing of them is on disk.

}  // namespace
}  // namespace chorale
