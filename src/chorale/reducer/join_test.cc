// Joining ranks with different numbers of inputs, whatever takes part: section B6 of spec/sharded-training.md.
#include "chorale/reducer/join.h"

#include <gtest/gtest.h>

#include <stdexcept>

#include "chorale/base/error.h"
#include "chorale/comm/comm_counter.h"
#include "chorale/comm/run_ranks_test_util.h"

namespace chorale::reducer {
namespace {

// Adds up, over all ranks, a number per step.
class Counting final : public Joinable {
 public:
  Counting(const comm::Group& group, int64_t per_step) : group_(group), per_step_(per_step) {}
  void step() {
    if (Join* join = current_join()) join->notify(*this);
    add(per_step_);
  }
  const comm::Group& join_group() const override { return group_; }
  void shadow_step(Join&) override {
    ++shadowed;
    add(0);
  }
  void after_join(int rank) override { authorities.push_back(rank); }

  std::vector<int64_t> totals;
  std::vector<int> authorities;
  int shadowed = 0;

 private:
  void add(int64_t value) {
    group_.all_reduce(std::span(&value, 1)).wait();
    totals.push_back(value);
  }
  const comm::Group& group_;
  int64_t per_step_;
};

constexpr int kWorld = 4, kFewest = 5;

// spec: x_join_single, x_join_multiple
TEST(JoinOfAnything, EveryRankSeesTheSameCollectives) {
  for (const int count : {1, 3}) {
    comm::run_ranks(kWorld, [&](comm::Group& group) {
      std::vector<Counting> counting;
      std::vector<Joinable*> joinables;
      counting.reserve(static_cast<size_t>(count));
      joinables.reserve(static_cast<size_t>(count));
      for (int i = 0; i < count; ++i) joinables.push_back(&counting.emplace_back(group, 10 * i + 1));
      const int own = kFewest + group.rank();  // rank r has r inputs more
      join(joinables, {}, [&] {
        for (int step = 0; step < own; ++step) {
          for (Counting& each : counting) each.step();
        }
      });
      for (int i = 0; i < count; ++i) {
        const Counting& each = counting[static_cast<size_t>(i)];
        ASSERT_EQ(each.totals.size(), static_cast<size_t>(kFewest + kWorld - 1));
        for (int step = 0; step < kFewest + kWorld - 1; ++step) {
          const int alive = step < kFewest ? kWorld : kWorld - 1 - (step - kFewest);
          EXPECT_EQ(each.totals[static_cast<size_t>(step)], alive * (10 * i + 1)) << step;
        }
        EXPECT_EQ(each.shadowed, kWorld - 1 - group.rank());
        // Only the rank with the most inputs is among the last.
        EXPECT_EQ(each.authorities, std::vector<int>{kWorld - 1});
        EXPECT_EQ(each.current_join(), nullptr);
      }
    });
  }
}

TEST(JoinOfAnything, OnlyTheFirstSaysThatItsRankIsAlive) {
  comm::run_ranks(2, [](comm::Group& group) {
    Counting one(group, 1), two(group, 1);
    join({&one, &two}, {}, [&] {
      one.step();
      const comm::CommCounter counter;
      two.step();
      EXPECT_EQ(counter.all_reduces(), 1);  // its own
    });
  });
}

// spec: x_join_throw
TEST(JoinOfAnything, AllEndInTheSameStepWhereThatIsAskedFor) {
  comm::run_ranks(kWorld, [](comm::Group& group) {
    Counting counting(group, 1);
    int steps = 0;
    std::string message;
    try {
      join({&counting}, {.throw_when_one_ends = true}, [&] {
        for (int step = 0; step < kFewest + group.rank(); ++step) {
          counting.step();
          ++steps;
        }
      });
    } catch (const StateError& error) {
      message = error.what();
    }
    EXPECT_EQ(steps, kFewest);
    EXPECT_NE(message.find("run out of inputs"), std::string::npos) << message;
    EXPECT_EQ(counting.totals, std::vector<int64_t>(kFewest, kWorld));
  });
}

// spec: x_join_disabled, x_join_exception
TEST(JoinOfAnything, SwitchedOffItSendsNothingAndAnExceptionGoesThrough) {
  comm::run_ranks(2, [](comm::Group& group) {
    Counting counting(group, 1);
    const comm::CommCounter counter;
    join({&counting}, {.enabled = false}, [&] {
      for (int step = 0; step < 3; ++step) counting.step();
    });
    EXPECT_EQ(counter.total(), 3);
    EXPECT_TRUE(counting.authorities.empty());

    Counting left(group, 1);
    std::string message;
    try {
      join({&left}, {}, [&] {
        left.step();
        throw std::out_of_range("on purpose");
      });
    } catch (const std::out_of_range& error) {
      message = error.what();
    }
    EXPECT_EQ(message, "on purpose");
    EXPECT_EQ(left.shadowed, 0);
    EXPECT_TRUE(left.authorities.empty());
    EXPECT_EQ(left.current_join(), nullptr);
  });
}

}  // namespace
}  // namespace chorale::reducer
