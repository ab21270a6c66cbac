// Groups: the rows of section 1 of the contract.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <set>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/comm/coalescing.h"
#include "chorale/comm/leaving.h"
#include "chorale/comm/mesh.h"
#include "chorale/comm/objects.h"
#include "chorale/comm/spec_test_util.h"
#include "chorale/comm/world.h"
#include "chorale/testing/environment_test_util.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/transport/store/memory_store.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

// spec: test_get_rank
TEST(Groups, EveryRankIsThereOnce) {
  std::mutex mutex;
  std::set<int> ranks;
  run_ranks(4, [&](Group& world) {
    const std::lock_guard lock(mutex);
    ranks.insert(world.rank());
    EXPECT_EQ(world.size(), 4);
  });
  EXPECT_EQ(ranks, (std::set<int>{0, 1, 2, 3}));
}

// spec: test_get_backend, test_get_rank_size_group, test_get_rank_size_full_group
// spec: test_destroy_group, test_destroy_full_group
TEST(Groups, MembersAndOthersAskAGroup) {
  run_ranks(4, [](Group& world) {
    EXPECT_EQ(world.backend(), "shm");
    Group sub = world.new_group({2, 1});  // sorted
    if (world.rank() == 1 || world.rank() == 2) {
      EXPECT_EQ(sub.backend(), "shm");
      EXPECT_EQ(sub.size(), 2);
      EXPECT_EQ(sub.rank(), world.rank() - 1);
      EXPECT_EQ(sub.members(), (std::vector<int>{1, 2}));
    } else {
      EXPECT_EQ(sub.size(), -1);
      EXPECT_EQ(sub.rank(), -1);
      EXPECT_THAT(message_of<InvalidArgument>([&] { sub.backend(); }), HasSubstr("not valid for this rank"));
      // Calls do nothing, and do not throw.
      EXPECT_TRUE(sub.barrier().is_nothing());
      EXPECT_EQ(sub.recv(cube(1, 0), 1), -1);
    }
    Group full = world.duplicate();
    EXPECT_EQ(full.size(), 4);
    EXPECT_EQ(full.rank(), world.rank());
    EXPECT_NE(full.name(), world.name());
    world.barrier().wait();
    full.destroy();
    sub.destroy();
    sub.destroy();
    world.barrier().wait();
  });
}

// spec: test_Backend_enum_class
TEST(Groups, NamesOfBackendsAreParsedInAnyCase) {
  EXPECT_EQ(parse_backend("SHM"), "shm");
  EXPECT_EQ(parse_backend("Nccl"), "nccl");
  EXPECT_THROW(parse_backend(""), InvalidArgument);
  EXPECT_THROW(parse_backend("carrier pigeon"), InvalidArgument);
}

// spec: test_new_subgroups
TEST(Groups, ConsecutiveSubgroups) {
  run_ranks(4, [](Group& world) {
    auto made = world.new_subgroups(2);
    ASSERT_EQ(made.groups.size(), 2u);
    EXPECT_EQ(made.own, world.rank() / 2);
    Group& own = made.groups[static_cast<size_t>(made.own)];
    EXPECT_EQ(own.size(), 2);
    EXPECT_EQ(own.members(), (std::vector<int>{made.own * 2, made.own * 2 + 1}));
    const Tensor x = cube(2, world.rank());
    own.all_reduce(x).wait();
    EXPECT_TRUE(is_cube(x, 2, 4 * made.own + 1));
    for (Group& group : made.groups) group.destroy();
  });
}

// spec: test_new_subgroups_with_group_param
TEST(Groups, SubgroupsOfASubgroup) {
  run_ranks(4, [](Group& world) {
    auto pairs = world.new_subgroups({{0, 2}, {1, 3}});
    auto singles = pairs.groups[static_cast<size_t>(pairs.own)].new_subgroups(1);
    ASSERT_EQ(singles.groups.size(), 2u);
    EXPECT_EQ(singles.groups[static_cast<size_t>(singles.own)].members(), std::vector<int>{world.rank()});
  });
}

// spec: test_new_subgroups_group_size_exceeds_world_size, test_new_subgroups_world_size_not_divisible_by_group_size
// spec: test_new_subgroups_by_enumeration_input_rank_exceeds_world_size
// spec: test_new_subgroups_by_enumeration_negative_input_rank, test_new_subgroups_overlap_not_allowed
TEST(Groups, ListsThatMakeNoSenseAreRefusedBeforeAnythingIsSent) {
  run_ranks(4, [](Group& world) {
    const auto size = message_of<InvalidArgument>([&] { world.new_subgroups(100); });
    EXPECT_THAT(size, HasSubstr("100"));
    EXPECT_THAT(size, HasSubstr("world size is 4"));
    EXPECT_THAT(message_of<InvalidArgument>([&] { world.new_subgroups(3); }), HasSubstr("not divisible"));
    EXPECT_THAT(message_of<InvalidArgument>([&] { world.new_subgroups({{0, 1}, {4, 2}}); }), HasSubstr("rank 4"));
    EXPECT_THAT(message_of<InvalidArgument>([&] { world.new_subgroups({{-1, -2}, {-3, -4}}); }), HasSubstr("rank -2"));
    const auto overlap = message_of<InvalidArgument>([&] { world.new_subgroups({{0}, {1, 2}, {1, 3}}); });
    EXPECT_THAT(overlap, HasSubstr("rank 1 is in two lists, number 1 and number 2"));
    world.barrier().wait();
  });
}

// spec: test_new_subgroups_by_enumeration
TEST(Groups, SubgroupsByList) {
  run_ranks(5, [](Group& world) {
    auto made = world.new_subgroups({{0, 2}, {1, 3}});
    ASSERT_EQ(made.groups.size(), 2u);
    EXPECT_EQ(made.own, world.rank() == 4 ? -1 : world.rank() % 2);
    if (made.own >= 0) {
      EXPECT_EQ(made.groups[static_cast<size_t>(made.own)].size(), 2);
    }
  });
}

TEST(Groups, SplitByColor) {
  run_ranks(5, [](Group& world) {
    Group own = world.split(world.rank() % 2 == 0 ? -7 : 3);
    EXPECT_EQ(own.members(), world.rank() % 2 == 0 ? (std::vector<int>{0, 2, 4}) : (std::vector<int>{1, 3}));
    const Tensor x = cube(1, 1);
    own.all_reduce(x).wait();
    EXPECT_TRUE(is_cube(x, 1, own.size()));
  });
}

TEST(Groups, WaitsOfTwoGroupsInDifferentOrders) {
  run_ranks(2, [](Group& world) {
    Group other = world.duplicate();
    const Tensor x = cube(50, 1), y = cube(50, 2);
    const Work first = world.all_reduce(x), second = other.all_reduce(y);
    if (world.rank() == 0) {
      first.wait();
      second.wait();
    } else {
      second.wait();
      first.wait();
    }
    EXPECT_TRUE(is_cube(x, 50, 2));
    EXPECT_TRUE(is_cube(y, 50, 4));
  });
}

// One rank's threads share its groups: some wait while others make and destroy some.
TEST(Groups, ThreadsOfOneRank) {
  run_ranks(2, [](Group& world) {
    Group other = world.duplicate();
    std::thread second([&] {
      for (int i = 0; i < 20; ++i) {
        Group brief = other.duplicate();
        brief.barrier().wait();
      }
    });
    std::vector<float> x(1);
    for (int i = 0; i < 200; ++i) {
      x[0] = 1;
      world.all_reduce(std::span(x)).wait();
      EXPECT_EQ(x[0], 2);
    }
    second.join();
  });
}

TEST(Groups, ABrokenGroupLeavesItsParentAlone) {
  run_ranks(2, [](Group& world) {
    Group other = world.duplicate({.timeout = 5s});
    EXPECT_THROW(other.all_reduce(cube(1 + world.rank(), 1)).wait(), CommError);
    EXPECT_TRUE(other.is_broken());
    EXPECT_FALSE(world.is_broken());
    const Tensor x = cube(3, 1);
    world.all_reduce(x).wait();
    EXPECT_TRUE(is_cube(x, 3, 2));
  });
}

TEST(Groups, ManyRanksAndManyGroups) {
  run_ranks(128, [](Group& world) {
    std::vector<int64_t> x{world.rank()};
    world.all_reduce(std::span(x)).wait();
    EXPECT_EQ(x[0], 128 * 127 / 2);
  });
  run_ranks(4, [](Group& world) {
    std::vector<Group> groups(64);
    for (Group& group : groups) group = world.duplicate();
    for (Group& group : groups) group.barrier().wait();
    // Destroyed in another order on each rank.
    while (!groups.empty()) groups.erase(groups.begin() + (world.rank() * 7) % static_cast<int>(groups.size()));
  });
}

// As a group of no rank it would leave sums out, and its rank would find a size of -1.
TEST(Groups, ThatWereMovedFromAreErrors) {
  run_ranks(2, [](Group& world) {
    Group group = world.duplicate();
    Group taken = std::move(group);
    std::vector<float> x{static_cast<float>(world.rank() + 1)};
    const Tensor tensor = cube(1, 0);
    // NOLINTBEGIN(bugprone-use-after-move)
    const std::vector<std::function<void()>> uses = {
        [&] { group.is_member(); },
        [&] { group.rank(); },
        [&] { group.size(); },
        [&] { group.name(); },
        [&] { group.is_broken(); },
        [&] { (void)group.all_reduce(std::span(x)); },
        [&] { (void)group.all_reduce(tensor); },
        [&] { (void)group.barrier(); },
        [&] { group.monitored_barrier(1s); },
        [&] { group.send(tensor, 1); },
        [&] { group.recv(tensor, 1); },
        [&] { group.duplicate(); },
        [&] { group.new_group({0}); },
        [&] { const Coalescing scope(group); },
        [&] { all_gather_object(group, Value(1)); },
        [&] { leave(group); },
        [&] { Mesh(group, {2}); },
    };
    for (size_t i = 0; i < uses.size(); ++i)
      EXPECT_THAT(message_of<InvalidArgument>(uses[i]), HasSubstr("[group] the group was moved from")) << i;
    group.destroy();  // nothing, as for a group of no rank
    // NOLINTEND(bugprone-use-after-move)
    taken.all_reduce(std::span(x)).wait();
    EXPECT_EQ(x[0], 3);
    group = std::move(taken);  // is a group again
    group.all_reduce(std::span(x)).wait();
    EXPECT_EQ(x[0], 6);
    World moved;
    moved.init(std::make_shared<transport::MemoryStore>(), 0, 1);
    const World other = std::move(moved);
    EXPECT_TRUE(other.is_initialized());
    EXPECT_FALSE(moved.is_initialized());  // NOLINT(bugprone-use-after-move)
  });
}

// spec: test_dump_DDP_relevant_env_vars
TEST(World, PrintsTheVariablesThatMatter) {
  const EnvironmentVariable port("MASTER_PORT", "12345"), topology("NCCL_TOPO_DUMP_FILE", nullptr);
  const std::string text = relevant_environment();
  EXPECT_THAT(text, HasSubstr("env:MASTER_PORT=12345\n"));
  EXPECT_THAT(text, HasSubstr("env:NCCL_TOPO_DUMP_FILE=N/A\n"));
  for (const char* name : {"MASTER_ADDR", "WORLD_SIZE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"})
    EXPECT_THAT(text, HasSubstr(std::string("env:") + name + "="));
  EXPECT_EQ(text.find("env:HOME"), std::string::npos);
}

TEST(World, HasOneDefaultGroupAtATime) {
  const auto store = std::make_shared<transport::MemoryStore>();
  World world;
  EXPECT_THROW(world.group(), StateError);
  world.init(store, 0, 1);
  EXPECT_THROW(world.init(store, 0, 1), StateError);
  EXPECT_EQ(world.group().size(), 1);
  world.destroy();
  EXPECT_FALSE(world.is_initialized());
  world.init(store, 0, 1);
  world.group().barrier().wait();
}

// A part of a job that is not ours: its members are known by the numbers that they have there.
TEST(Groups, RanksOfAConnectedGroupMayHaveOtherNumbers) {
  auto store = std::make_shared<transport::MemoryStore>();
  const std::vector<int> members{2, 5};
  std::vector<std::thread> threads;
  for (int rank : {0, 1}) {
    threads.emplace_back([&, rank] {
      Group group = Group::connect(*store, "part", rank, 2, {.timeout = 5s, .members = members});
      EXPECT_EQ(group.members(), members);
      std::vector<float> x{static_cast<float>(rank)};
      group.broadcast(std::span(x), 5).wait();
      EXPECT_EQ(x[0], 1);
      x.resize(1 + static_cast<size_t>(rank));
      const auto text = message_of<CommError>([&] { group.all_reduce(std::span(x)).wait(); });
      EXPECT_THAT(text, testing::AllOf(HasSubstr("rank 2"), HasSubstr("rank 5")));
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_THAT(message_of<InvalidArgument>([&] {
                Group::connect(*store, "odd", 0, 2, {.members = {5, 2}});
              }),
              HasSubstr("2 ascending ranks"));
}

}  // namespace
}  // namespace chorale::comm
