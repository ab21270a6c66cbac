// Parcels: messages whose receiver knows neither their size nor their sender (Note [Parcels] in comm/message_queue.h).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <fstream>
#include <latch>
#include <map>
#include <set>
#include <sstream>
#include <thread>
#include <tuple>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/comm/lent_parcels.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/comm/shared_copy.h"
#include "chorale/device/allocator.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;

// Depends on the place and on the rank that made it.
Tensor parcel_of(int64_t bytes, int seed) {
  const Tensor x = Tensor::empty({bytes}, DType::kU8);
  for (int64_t i = 0; i < bytes; ++i) x.data<uint8_t>()[i] = static_cast<uint8_t>((i * 7 + i / 251 + seed * 31) % 253);
  return x;
}
bool is_parcel_of(const Tensor& x, int64_t bytes, int seed) {
  return x.dtype() == DType::kU8 && x.elems() == bytes &&
         x.to_vector<uint8_t>() == parcel_of(bytes, seed).to_vector<uint8_t>();
}

struct Received {
  Tensor bytes;
  int source = -1;
};
Received receive(const Group& group, int source = kAnySource, uint64_t tag = 0, const ParcelOptions& options = {}) {
  const Work work = group.receive_parcel(source, tag, options);
  work.wait();
  return {work.result()[0], work.source_rank()};
}

// Over MPI there are none.
std::function<void(Group&)> unless_over_mpi(const std::function<void(Group&)>& body) {
  return [body](Group& group) {
    if (group.backend() != "mpi") return body(group);
    EXPECT_THROW(std::ignore = group.receive_parcel(), InvalidArgument);
  };
}
void run_with_parcels(int size, const std::function<void(Group&)>& body) {
  run_everywhere(size, unless_over_mpi(body));
}

constexpr int64_t kSizes[] = {0, 1, 4096, 4097, 70'000, 3'000'001};

TEST(Parcels, OfEverySizeComeFromAnybodyInTheOrderOfEachSender) {
  run_with_parcels(4, [](Group& group) {
    if (group.rank() > 0) {
      for (int64_t bytes : kSizes) group.send_parcel(parcel_of(bytes + group.rank(), group.rank()), 0).wait();
    } else {
      std::map<int, size_t> received;  // by sender
      for (size_t i = 0; i < 3 * std::size(kSizes); ++i) {
        const Received parcel = receive(group);
        const size_t nth = received[parcel.source]++;
        ASSERT_LT(nth, std::size(kSizes));
        EXPECT_TRUE(is_parcel_of(parcel.bytes, kSizes[nth] + parcel.source, parcel.source)) << nth;
      }
      EXPECT_EQ(received, (std::map<int, size_t>{{1, 6}, {2, 6}, {3, 6}}));
    }
    group.barrier().wait();
  });
}

// Mailboxes are filled several times over, and answers to large parcels come to lie where bytes of small ones were.
TEST(Parcels, OfAllSizesThatAreSentAheadKeepTheirOrder) {
  constexpr int kParcels = 400;
  const auto nth = [](int i) { return parcel_of(i % 9 == 8 ? 20'000 + i : i * 7919 % 12'500, i); };
  const auto body = [&](Group& group) {
    const int other = 1 - group.rank();
    for (int i = 0; i < kParcels; ++i) std::ignore = group.send_parcel(nth(i), other, static_cast<uint64_t>(i % 3));
    for (int tag = 2; tag >= 0; --tag) {
      for (int i = tag; i < kParcels; i += 3) {
        const Received one = receive(group, other, static_cast<uint64_t>(tag));
        ASSERT_EQ(one.bytes.to_vector<uint8_t>(), nth(i).to_vector<uint8_t>()) << i;
      }
    }
    group.barrier().wait();
  };
  run_threads_and_processes(2, unless_over_mpi(body));
}

TEST(Parcels, FromOneSourceWithOneTagDoNotTakeOthers) {
  run_with_parcels(4, [](Group& group) {
    const int next = (group.rank() + 1) % 4, before = (group.rank() + 3) % 4;
    for (uint64_t tag : {7u, 8u}) group.send_parcel(parcel_of(5000, static_cast<int>(tag)), next, tag).wait();
    for (int other = 0; other < 4; ++other) group.send_parcel(parcel_of(9, group.rank()), other, 9).wait();
    EXPECT_TRUE(is_parcel_of(receive(group, before, 8).bytes, 5000, 8));
    EXPECT_TRUE(is_parcel_of(receive(group, kAnySource, 7).bytes, 5000, 7));
    for (int other = 3; other >= 0; --other) EXPECT_TRUE(is_parcel_of(receive(group, other, 9).bytes, 9, other));
    group.barrier().wait();
  });
}

TEST(Parcels, AndPlainMessagesWithTheSameTagDoNotMeet) {
  run_with_parcels(2, [](Group& group) {
    const int peer = 1 - group.rank();
    const Tensor plain = parcel_of(100, 3);
    const Work sent = group.isend(plain, peer, 5);
    group.send_parcel(parcel_of(100, 4), peer, 5).wait();
    EXPECT_TRUE(is_parcel_of(receive(group, peer, 5).bytes, 100, 4));
    const Tensor x = parcel_of(100, 0);
    group.recv(x, peer, 5);
    EXPECT_TRUE(is_parcel_of(x, 100, 3));
    sent.wait();
  });
}

TEST(Parcels, ThatAreTooLargeAreDroppedAndTheNextOnesCome) {
  run_with_parcels(2, [](Group& group) {
    if (group.rank() == 1) {
      for (int64_t bytes : {1001, 100'001, 10, 200'000, 20}) group.send_parcel(parcel_of(bytes, 1), 0).wait();
    } else {
      const ParcelOptions few{.timeout = 20s, .most_bytes = 1000};
      for (const char* size : {"1001", "100001"}) {
        const std::string text = message_blaming(1, [&] { receive(group, kAnySource, 0, few); });
        EXPECT_THAT(text, AllOf(HasSubstr(concat("a parcel of ", size, " bytes")), HasSubstr("at most 1000")));
      }
      EXPECT_TRUE(is_parcel_of(receive(group, 1, 0, few).bytes, 10, 1));
      message_blaming(1, [&] { receive(group, 1, 0, few); });
      EXPECT_TRUE(is_parcel_of(receive(group).bytes, 20, 1));
    }
    EXPECT_FALSE(group.is_broken());
    group.barrier().wait();
    EXPECT_THROW(std::ignore = group.send_parcel(parcel_of(11, 0), 0, 0, {.timeout = {}, .most_bytes = 10}),
                 InvalidArgument);
  });
}

TEST(Parcels, ThatDoNotComeInTimeFailAlone) {
  run_with_parcels(2, [](Group& group) {
    if (group.rank() == 0) {
      for (int source : {1, kAnySource}) {
        const auto start = std::chrono::steady_clock::now();
        const Work work = group.receive_parcel(source, 3, {.timeout = 50ms});
        EXPECT_THROW(work.wait(), CommError);
        EXPECT_GE(std::chrono::steady_clock::now() - start, 50ms);
      }
      // A rank that only polls hears of it, too.
      const Work polled = group.receive_parcel(1, 3, {.timeout = 50ms});
      while (!polled.is_completed()) std::this_thread::sleep_for(1ms);
      EXPECT_THROW(polled.wait(), CommError);
    }
    EXPECT_FALSE(group.is_broken());
    group.barrier().wait();
    if (group.rank() == 1) group.send_parcel(parcel_of(50'000, 5), 0, 3).wait();
    EXPECT_TRUE(group.rank() != 0 || is_parcel_of(receive(group, kAnySource, 3).bytes, 50'000, 5));
    group.barrier().wait();
  });
}

// Nobody takes them: on one host a mailbox is full some time, between hosts the credit is used up.
TEST(Parcels, ThatNobodyTakesInTimeFailAloneAndAreNeverSeen) {
  const auto body = [](Group& group) {
    constexpr int64_t kBytes = 4000;
    if (group.rank() == 1) {
      int64_t sent = 0;
      for (;; ++sent) {
        const Work work = group.send_parcel(parcel_of(kBytes, static_cast<int>(sent)), 0, 1, {.timeout = 100ms});
        try {
          work.wait();
        } catch (const CommError& error) {
          EXPECT_EQ(error.failure().peer, 0);
          EXPECT_THAT(error.what(), AllOf(HasSubstr("could not be handed over within"), HasSubstr("; rank 0 (")));
          break;
        }
      }
      EXPECT_GE(sent, 8);
      const Work count = group.send_parcel(parcel_of(sent, 77), 0, 2);
      const Tensor go = Tensor::empty({1}, DType::kU8);
      group.broadcast(go, 1).wait();  // from here on the other one takes them
      count.wait();
    } else {
      const Tensor go = Tensor::empty({1}, DType::kU8);
      group.broadcast(go, 1).wait();
      const int64_t sent = receive(group, 1, 2).bytes.elems();
      for (int64_t i = 0; i < sent; ++i)
        EXPECT_TRUE(is_parcel_of(receive(group, kAnySource, 1).bytes, kBytes, static_cast<int>(i)));
      EXPECT_THROW(receive(group, 1, 1, {.timeout = 50ms}), CommError);
    }
    EXPECT_FALSE(group.is_broken());
    group.barrier().wait();
  };
  run_threads_and_processes(2, unless_over_mpi(body));
  run_hosts({0, 1}, body);
}

TEST(Parcels, OfAKilledRankAreReceivedAndThenItsEndIsHeardOfOnce) {
  const auto body = [](Group& group) {
    if (group.rank() == 1) {
      for (int64_t bytes : {10, 20}) group.send_parcel(parcel_of(bytes, 1), 0).wait();
      raise(SIGKILL);
    }
    if (group.rank() == 2) {
      receive(group, 0, 4);  // it has heard of the end
      for (int64_t bytes : {30, 30'000}) group.send_parcel(parcel_of(bytes, 2), 0).wait();
      receive(group, 0, 4);
      return;
    }
    EXPECT_TRUE(is_parcel_of(receive(group).bytes, 10, 1));
    EXPECT_TRUE(is_parcel_of(receive(group).bytes, 20, 1));
    EXPECT_THAT(message_blaming(1, [&] { receive(group); }), HasSubstr("has ended: killed, crashed or exited"));
    group.send_parcel(parcel_of(1, 0), 2, 4).wait();
    for (int64_t bytes : {30, 30'000}) EXPECT_TRUE(is_parcel_of(receive(group).bytes, bytes, 2));
    message_blaming(1, [&] { group.send_parcel(parcel_of(1, 0), 1).wait(); });
    for (int i = 0; i < 2; ++i) message_blaming(1, [&] { receive(group, 1); });
    EXPECT_FALSE(group.is_broken());
    group.send_parcel(parcel_of(1, 0), 2, 4).wait();
    message_blaming(2, [&] { receive(group); });  // it has left
    EXPECT_THROW(receive(group), CommError);      // nobody is left
  };
  EXPECT_EQ(run_processes(3, body, {.timeout = 20s}), (std::vector<int>{0, -SIGKILL, 0}));
}

// Killed in the middle of whatever it does: what has come until then is whole and in order, and nothing else comes.
TEST(Parcels, OfARankThatIsKilledWhileItSendsAreWhole) {
  const auto bytes_of = [](int i) { return i % 40 == 39 ? 30'000 + i % 1000 : i * 7919 % 12'500; };
  const auto body = [&](Group& group) {
    if (group.rank() == 1) {
      const Tensor own = Tensor::empty({8}, DType::kU8);
      const int64_t pid = getpid();
      std::memcpy(own.raw(), &pid, sizeof pid);
      group.send_parcel(own, 0).wait();
      for (int i = 0;; ++i) group.send_parcel(parcel_of(bytes_of(i), i), 0, 1).wait();
    }
    int64_t victim = 0;
    std::memcpy(&victim, receive(group, 1).bytes.raw(), sizeof victim);
    for (int i = 0;; ++i) {
      Received one;
      try {
        one = receive(group, 1, 1);
      } catch (const CommError& error) {
        EXPECT_THAT(error.what(), HasSubstr("has ended: killed, crashed or exited"));
        EXPECT_GT(i, 50);
        return;
      }
      ASSERT_TRUE(is_parcel_of(one.bytes, bytes_of(i), i)) << i;
      // The first ones have gone, so that it is killed while it sends.
      if (i == 51) kill(static_cast<pid_t>(victim), SIGKILL);
    }
  };
  EXPECT_EQ(run_processes(2, body, {.timeout = 20s}), (std::vector<int>{0, -SIGKILL}));
}

TEST(Parcels, OfARankOfAnotherHostThatLeavesAreReceivedAndThenThatIsHeardOfOnce) {
  run_hosts({0, 0, 1, 1},
            [](Group& group) {
              if (group.rank() > 0) {
                for (int64_t bytes : {10, 20'000}) group.send_parcel(parcel_of(bytes, group.rank()), 0).wait();
                return;
              }
              std::set<int> left;
              int parcels = 0;
              while (left.size() < 3) {
                const Work work = group.receive_parcel();
                try {
                  work.wait();
                  EXPECT_TRUE(is_parcel_of(work.result()[0], work.result()[0].elems(), work.source_rank()));
                  ++parcels;
                } catch (const CommError& error) {
                  EXPECT_TRUE(left.insert(error.failure().peer).second) << error.what();
                }
              }
              EXPECT_EQ(parcels, 6);
              EXPECT_EQ(left, (std::set<int>{1, 2, 3}));
              EXPECT_FALSE(group.is_broken());
            },
            {.timeout = 20s});
}

// Rank 2 reads nothing: the mailbox to it is full, so rank 0 cannot tell it that its own large parcel was taken. Rank 1
// hears nevertheless that its message was.
TEST(Parcels, ForARankThatReadsNothingHoldUpNoAnswerToOthers) {
  std::latch heard(1);
  run_ranks(3, [&](Group& group) {
    const Tensor large = parcel_of(100'000, group.rank());
    if (group.rank() == 2) {
      group.send_parcel(large, 0).wait();
      heard.wait();
      for (int i = 0; i < 100; ++i) EXPECT_TRUE(is_parcel_of(receive(group, 0, 3).bytes, 12'000, i));
    } else if (group.rank() == 1) {
      group.send(large, 0, 1);
      heard.count_down();
    } else {
      std::vector<Work> ahead;
      for (int i = 0; i < 100; ++i) ahead.push_back(group.send_parcel(parcel_of(12'000, i), 2, 3));
      EXPECT_TRUE(is_parcel_of(receive(group, 2).bytes, 100'000, 2));
      const Tensor x = parcel_of(100'000, 0);
      group.recv(x, 1, 1);
      EXPECT_TRUE(is_parcel_of(x, 100'000, 1));
      for (const Work& work : ahead) work.wait();
    }
    group.barrier().wait();
  });
}

// Rank 0 serves: it sends every parcel back to its sender, with the tag that its first two bytes name.
TEST(Parcels, AnswerManyThreadsOfManyRanks) {
  const auto body = [](Group& group) {
    constexpr int kThreads = 3, kRequests = 20;
    if (group.rank() == 0) {
      for (int i = 0; i < (group.size() - 1) * kThreads * kRequests; ++i) {
        const Received request = receive(group);
        group.send_parcel(request.bytes, request.source, 100 + request.bytes.data<uint8_t>()[0]).wait();
      }
    } else {
      std::vector<std::jthread> threads;
      threads.reserve(kThreads);
      for (int t = 0; t < kThreads; ++t) {
        threads.emplace_back([&group, t] {
          for (int i = 0; i < kRequests; ++i) {
            const int64_t bytes = 1 + i * i * 37;
            const Tensor request = parcel_of(bytes, group.rank() * 10 + t + i);
            request.data<uint8_t>()[0] = static_cast<uint8_t>(t);
            group.send_parcel(request, 0).wait();
            const Received answer = receive(group, 0, 100 + static_cast<uint64_t>(t));
            EXPECT_EQ(answer.bytes.to_vector<uint8_t>(), request.to_vector<uint8_t>());
          }
        });
      }
    }
    group.barrier().wait();
  };
  run_threads_and_processes(3, unless_over_mpi(body));
  run_hosts({0, 0, 1}, body);
}

TEST(Parcels, AreCopiedAlikeInEveryWay) {
  constexpr size_t kCopySizes[] = {0,      1, 63, 64, 65, 200, kTriedBytes, (64 << 10) - 1, 64 << 10, (64 << 10) + 77,
                                   300'001};
  std::vector<std::byte> from(400'000), to(from.size());
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 31 + i / 251 + 1);
  for (const auto copy : {copy_shared, copy_for_others, copy_past_caches}) {
    for (const size_t bytes : kCopySizes) {
      for (const size_t offset : {size_t{0}, size_t{1}, size_t{16}, size_t{63}}) {
        std::fill(to.begin(), to.end(), std::byte{0});
        copy(to.data() + offset, from.data() + 5, bytes);
        ASSERT_TRUE(std::equal(from.begin() + 5, from.begin() + 5 + static_cast<ptrdiff_t>(bytes),
                               to.begin() + static_cast<ptrdiff_t>(offset)))
            << bytes << " bytes at " << offset;
        ASSERT_TRUE(std::all_of(to.begin(), to.begin() + static_cast<ptrdiff_t>(offset),
                                [](std::byte b) { return b == std::byte{0}; }));
        ASSERT_EQ(to[offset + bytes], std::byte{0}) << bytes << " bytes at " << offset;
      }
    }
  }
}

TEST(Parcels, ThatAreLentArriveAsTheyWereThoughTheirSenderWritesFreshPages) {
  const std::vector<int> ends = run_processes(2, [](Group& group) {
    constexpr int64_t kBytes = 3'000'000;
    constexpr uint64_t kTag = kLentTag | 7;
    if (group.rank() == 0) {
      const Tensor x = parcel_of(kBytes, 5);
      group.send_parcel(x, 1, kTag).wait();
      EXPECT_EQ(x.storage()->use_count(), 2);  // it is lent
      take_back(*x.storage());
      EXPECT_TRUE(is_parcel_of(x, kBytes, 5));
      std::fill_n(x.data<uint8_t>(), kBytes, uint8_t{0});
      group.send_parcel(parcel_of(1, 1), 1).wait();
      receive(group, 1);  // it has come, and so has the memory
      EXPECT_EQ(x.storage()->use_count(), 1);
    } else {
      receive(group, 0);
      EXPECT_TRUE(is_parcel_of(receive(group, 0, kTag).bytes, kBytes, 5));
      group.send_parcel(parcel_of(1, 1), 0).wait();
    }
  });
  EXPECT_EQ(ends, (std::vector<int>{0, 0}));
}

// How this process has mapped arenas of others: "r--s", "rw-s".
std::set<std::string> ways_of_mapping_peers() {
  struct stat own {};
  EXPECT_EQ(fstat(cpu_allocator().source().shared_descriptor(), &own), 0);
  std::set<std::string> ways;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    std::istringstream words(line);
    std::string addresses, way, offset, device, path;
    uint64_t inode = 0;
    words >> addresses >> way >> offset >> device >> inode >> path;
    if (path.starts_with("/memfd:chorale-arenas") && inode != own.st_ino) ways.insert(way);
  }
  return ways;
}

TEST(Parcels, CannotMakeTheirReceiverWriteTheSendersMemory) {
  const std::vector<int> ends = run_processes(2, [](Group& group) {
    constexpr int64_t kBytes = 3'000'000;
    const int other = 1 - group.rank();
    const Tensor x = parcel_of(kBytes, group.rank());
    group.send_parcel(x, other, kLentTag).wait();
    EXPECT_TRUE(is_parcel_of(receive(group, other, kLentTag).bytes, kBytes, other));
    EXPECT_EQ(ways_of_mapping_peers(), std::set<std::string>{"r--s"});
    // A sum in place writes the peer's memory, and has a mapping of its own for that.
    const Tensor sum = Tensor::empty({1 << 20}, DType::kF32);
    std::fill_n(sum.data<float>(), 1 << 20, 1.0F);
    group.all_reduce(sum).wait();
    EXPECT_EQ(sum.data<float>()[7], 2);
    EXPECT_EQ(ways_of_mapping_peers(), (std::set<std::string>{"r--s", "rw-s"}));
  });
  EXPECT_EQ(ends, (std::vector<int>{0, 0}));
}

TEST(Parcels, ThatAreLentAreKeptUntilTheirReceiverIsGone) {
  const std::vector<int> ends = run_processes(2, [](Group& group) {
    if (group.rank() == 1) {
      receive(group, 0);
      raise(SIGKILL);
    }
    const Tensor x = parcel_of(3'000'000, 5);
    group.send_parcel(x, 1, kLentTag).wait();
    EXPECT_EQ(x.storage()->use_count(), 2);
    group.send_parcel(parcel_of(1, 1), 1).wait();
    EXPECT_THROW(receive(group, 1), CommError);
    EXPECT_EQ(x.storage()->use_count(), 1);
  });
  EXPECT_EQ(ends, (std::vector<int>{0, -SIGKILL}));
}

}  // namespace
}  // namespace chorale::comm
