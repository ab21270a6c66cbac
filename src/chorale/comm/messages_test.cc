// Point-to-point: the rows of section 2 of the contract.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/comm/spec_test_util.h"

namespace chorale::comm {
namespace {

bool is_cube_shape(const std::vector<int64_t>& shape, int64_t most) {
  return shape.size() == 3 && shape[0] >= 1 && shape[0] <= most && shape[1] == shape[0] && shape[2] == shape[0];
}

// spec: test_send_recv, test_send_recv_{autograd,torch}_profiler
TEST(Messages, EveryRankSendsToEveryOther) {
  constexpr int kRanks = 4;
  const auto events = traced(kRanks, [](Group& group) {
    for (int src = 0; src < group.size(); ++src) {
      if (group.rank() == src) {
        for (int dst = 0; dst < group.size(); ++dst) {
          if (dst != src) group.send(cube(src + 1, src + 1), dst);
        }
      } else {
        const Tensor x = cube(src + 1, -1);
        EXPECT_EQ(group.recv(x, src), src);
        EXPECT_TRUE(is_cube(x, src + 1, src + 1));
      }
    }
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(count_events(events, "shm:send", rank), kRanks - 1);
    EXPECT_EQ(count_events(events, "shm:recv", rank), kRanks - 1);
  }
  for (const trace::Event& event : events) {
    if (event.kind != trace::Kind::kCall) continue;
    EXPECT_TRUE(event.async);
    ASSERT_EQ(event.shapes.size(), 1u) << event.name;
    EXPECT_TRUE(is_cube_shape(event.shapes[0], kRanks));
  }
}

// spec: test_send_recv_any_source, test_send_recv_any_source_{autograd,torch}_profiler
TEST(Messages, FromAnySource) {
  constexpr int kRanks = 4;
  const auto events = traced(kRanks, [](Group& group) {
    std::vector<int64_t> senders;
    for (int dst = 0; dst < group.size(); ++dst) {
      if (group.rank() == dst) {
        for (int i = 0; i < 2 * (group.size() - 1); ++i) {
          const Tensor x = cube(10, -1);
          int sender;
          if (i % 2 == 0) {
            sender = group.recv(x);
          } else {
            const Work work = group.irecv(x);
            work.wait();
            sender = work.source_rank();
          }
          EXPECT_TRUE(is_cube(x, 10, sender));
          senders.push_back(sender);
        }
      } else {
        group.send(cube(10, group.rank()), dst);
        group.send(cube(10, group.rank()), dst);
      }
    }
    std::vector<int64_t> all(senders.size() * static_cast<size_t>(group.size()));
    group.all_gather_into(std::span(all), std::span<const int64_t>(senders)).wait();
    std::map<int64_t, int> counts;
    for (int64_t sender : all) ++counts[sender];
    for (int rank = 0; rank < group.size(); ++rank) EXPECT_EQ(counts[rank], 2 * (group.size() - 1));
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(count_events(events, "shm:send", rank), 2 * (kRanks - 1));
    EXPECT_EQ(count_events(events, "shm:recvAnySource", rank), 2 * (kRanks - 1));
  }
  for (const trace::Event& event : events) {
    if (event.name == "shm:recvAnySource") {
      EXPECT_EQ(event.shapes, (std::vector<std::vector<int64_t>>{{10, 10, 10}}));
    }
  }
}

// spec: test_send_recv_with_tag{,_autograd_profiler,_torch_profiler}
TEST(Messages, WithTags) {
  constexpr int kRanks = 4;
  const auto events = traced(kRanks, [](Group& group) {
    for (int dst = 0; dst < group.size(); ++dst) {
      if (group.rank() == dst) {
        for (int src = 0; src < group.size(); ++src) {
          if (src == dst) continue;
          const Tensor x = cube(10, -1);
          group.recv(x, src, static_cast<uint64_t>(src));
          EXPECT_TRUE(is_cube(x, 10, src));
        }
      } else {
        group.send(cube(10, group.rank()), dst, static_cast<uint64_t>(group.rank()));
      }
    }
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_EQ(count_events(events, "shm:send", rank), kRanks - 1);
    EXPECT_EQ(count_events(events, "shm:recv", rank), kRanks - 1);
  }
  for (const trace::Event& event : events) {
    if (event.kind != trace::Kind::kCall) continue;
    EXPECT_TRUE(event.name == "shm:send" || event.name == "shm:recv") << event.name;
    EXPECT_EQ(event.shapes, (std::vector<std::vector<int64_t>>{{10, 10, 10}}));
  }
  // Each sends something else with another tag first: without tags that would be taken instead.
  run_ranks(kRanks, [](Group& group) {
    constexpr uint64_t kOther = 100;
    std::vector<Work> sent;
    for (int dst = 0; dst < group.size(); ++dst) {
      if (dst == group.rank()) continue;
      sent.push_back(group.isend(cube(10, -5 - group.rank()), dst, kOther));
      sent.push_back(group.isend(cube(10, group.rank()), dst, static_cast<uint64_t>(group.rank())));
    }
    for (int src = 0; src < group.size(); ++src) {
      if (src == group.rank()) continue;
      const Tensor x = cube(10, -1), other = cube(10, -1);
      group.recv(x, src, static_cast<uint64_t>(src));
      EXPECT_TRUE(is_cube(x, 10, src));
      group.recv(other, src, kOther);
      EXPECT_TRUE(is_cube(other, 10, -5 - src));
    }
    for (const Work& work : sent) work.wait();
  });
}

// spec: test_isend{,_autograd_profiler,_torch_profiler}
TEST(Messages, SendsInFlight) {
  constexpr int kRanks = 4;
  const auto events = traced(kRanks, [](Group& group) {
    if (group.rank() == 0) {
      std::vector<Work> works;
      for (int dst = 1; dst < group.size(); ++dst) works.push_back(group.isend(cube(dst, 10), dst));
      for (const Work& work : works) {
        work.wait();
        EXPECT_TRUE(work.is_completed());
      }
    } else {
      const Tensor x = cube(group.rank(), -1);
      group.recv(x, 0);
      EXPECT_TRUE(is_cube(x, group.rank(), 10));
    }
  });
  EXPECT_EQ(count_events(events, "shm:send", 0), kRanks - 1);
  for (int rank = 1; rank < kRanks; ++rank) EXPECT_EQ(count_events(events, "shm:recv", rank), 1);
  for (const trace::Event& event : events) {
    if (event.name == "shm:recv") {
      EXPECT_EQ(event.shapes, (std::vector<std::vector<int64_t>>{{event.rank, event.rank, event.rank}}));
    }
  }
}

// spec: test_irecv
TEST(Messages, ReceivesInFlight) {
  run_ranks(4, [](Group& group) {
    if (group.rank() > 0) return group.send(cube(group.rank(), 10), 0);
    std::vector<Tensor> tensors;
    std::vector<Work> works;
    for (int src = 1; src < group.size(); ++src) {
      tensors.push_back(cube(src, -1));
      works.push_back(group.irecv(tensors.back(), src));
    }
    for (int src = 1; src < group.size(); ++src) {
      works[static_cast<size_t>(src - 1)].wait();
      EXPECT_TRUE(works[static_cast<size_t>(src - 1)].is_completed());
      EXPECT_TRUE(is_cube(tensors[static_cast<size_t>(src - 1)], src, 10));
    }
  });
}

// spec: test_batch_isend_irecv_gloo, test_batch_isend_irecv_gloo_tags
TEST(Messages, BatchesOfBothDirections) {
  for (bool tags : {false, true}) {
    run_ranks(4, [&](Group& group) {
      const auto tag = [&](int rank) { return tags ? static_cast<uint64_t>(rank) : 0; };
      // Large ones too, of which only the place travels.
      for (int64_t scale : {1, 20}) {
        std::vector<P2POp> operations;
        std::vector<std::pair<int, Tensor>> received;
        for (int peer = 0; peer < group.size(); ++peer) {
          if (peer == group.rank()) continue;
          received.emplace_back(peer, cube(scale * (peer + 1), -1));
          operations.push_back(P2POp::recv(group, received.back().second, peer, tag(peer)));
          operations.push_back(
              P2POp::send(group, cube(scale * (group.rank() + 1), group.rank() + 1), peer, tag(group.rank())));
        }
        for (const Work& work : batch_isend_irecv(operations)) work.wait();
        for (const auto& [peer, tensor] : received) EXPECT_TRUE(is_cube(tensor, scale * (peer + 1), peer + 1));
      }
    });
  }
}

// spec: test_batch_isend_irecv_op_err, test_batch_isend_irecv_op_list_err, test_batch_isend_irecv_mixed_backend_err
TEST(Messages, BatchesThatMakeNoSenseAreRefused) {
  run_ranks(2, [](Group& group) {
    Group other = group.duplicate();
    EXPECT_THROW(P2POp(CallKind::kBroadcast, group, cube(1, 0), 0), InvalidArgument);
    EXPECT_THROW(batch_isend_irecv({}), InvalidArgument);
    const int peer = 1 - group.rank();
    EXPECT_THROW(batch_isend_irecv({P2POp::send(group, cube(1, 0), peer), P2POp::recv(other, cube(1, 0), peer)}),
                 InvalidArgument);
    EXPECT_THROW(group.send(cube(1, 0), group.rank()), InvalidArgument);
    EXPECT_THROW(group.send(cube(1, 0), 7), InvalidArgument);
  });
}

TEST(Messages, ToOneself) {
  run_ranks(2, [](Group& group) {
    for (int64_t k : {2, 30}) {
      const Tensor x = cube(k, -1);
      for (const Work& work :
           batch_isend_irecv({P2POp::send(group, cube(k, 5), group.rank()), P2POp::recv(group, x, group.rank())}))
        work.wait();
      EXPECT_TRUE(is_cube(x, k, 5));
    }
  });
}

TEST(Messages, AreReceivedInAnyOrderOfTags) {
  run_ranks(2, [](Group& group) {
    constexpr int kMessages = 50;  // more than a mailbox holds
    for (int64_t k : {2, 20}) {
      std::vector<Work> works;
      for (int i = 0; i < kMessages; ++i) {
        if (group.rank() == 0) works.push_back(group.isend(cube(k, i), 1, static_cast<uint64_t>(i)));
      }
      for (int i = kMessages - 1; i >= 0 && group.rank() == 1; --i) {
        const Tensor x = cube(k, -1);
        group.recv(x, 0, static_cast<uint64_t>(i));
        EXPECT_TRUE(is_cube(x, k, i));
      }
      for (const Work& work : works) work.wait();
    }
  });
}

TEST(Messages, GoOnBesideCollectives) {
  run_ranks(2, [](Group& group) {
    const Tensor x = cube(40, -1), sum = cube(40, 1);
    if (group.rank() == 0) {
      // The barrier comes before the message is received: it must not wait for it.
      const Work sent = group.isend(cube(40, 3), 1);
      group.all_reduce(sum).wait();
      sent.wait();
    } else {
      group.all_reduce(sum).wait();
      group.recv(x, 0);
      EXPECT_TRUE(is_cube(x, 40, 3));
    }
    EXPECT_TRUE(is_cube(sum, 40, 2));
  });
}

}  // namespace
}  // namespace chorale::comm
