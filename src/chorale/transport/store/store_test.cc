// What every store promises (transport/store/store.h).
#include "chorale/transport/store/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/transport/store/store_kinds_test_util.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

Deadline soon() { return within(20s); }

class StoreTest : public testing::TestWithParam<StoreKind> {
 protected:
  std::shared_ptr<Store> client() { return fixture_->client(); }

 private:
  const std::unique_ptr<StoreFixture> fixture_ = GetParam().make();
};

TEST_P(StoreTest, AnotherClientGetsTheBytesThatWereSet) {
  const auto writer = client(), reader = client();
  std::string every_byte;
  for (int i = 0; i < 256; ++i) every_byte.push_back(static_cast<char>(i));
  writer->set("a", every_byte, soon());
  writer->set("empty", "", soon());
  EXPECT_EQ(reader->get("a", soon()), every_byte);
  EXPECT_EQ(reader->get("empty", soon()), "");
  writer->set("a", "new", soon());
  EXPECT_EQ(reader->get("a", soon()), "new");
}

TEST_P(StoreTest, GetAndWaitReturnOnceTheKeysAreThere) {
  const auto reader = client(), writer = client();
  std::thread late([&] {
    std::this_thread::sleep_for(30ms);
    writer->set("a", "1", soon());
    std::this_thread::sleep_for(30ms);
    writer->add("b", 2, soon());
    writer->compare_set("c", "", "3", soon());
  });
  EXPECT_EQ(reader->get("a", soon()), "1");
  reader->wait(std::vector<std::string>{"a", "b", "c"}, soon());
  EXPECT_TRUE(reader->contains("b", soon()) && reader->contains("c", soon()));
  late.join();
}

TEST_P(StoreTest, AWaitingThreadDoesNotHoldUpAnotherOfTheSameClient) {
  const auto store = client();
  std::thread waiting([&] { EXPECT_EQ(store->get("late", soon()), "x"); });
  std::this_thread::sleep_for(20ms);
  store->set("late", "x", soon());
  waiting.join();
}

TEST_P(StoreTest, ADeadlineEndsAWaitWithTheNamesOfTheMissingKeys) {
  const auto store = client();
  store->set("there", "x", soon());
  const auto start = Deadline::Clock::now();
  EXPECT_THAT(message_of<CommError>([&] { store->get("alpha", within(50ms)); }),
              AllOf(HasSubstr("get"), HasSubstr("alpha'")));
  EXPECT_THAT(message_of<CommError>([&] {
                store->wait(std::vector<std::string>{"alpha", "there", "beta"}, within(50ms));
              }),
              AllOf(HasSubstr("alpha'"), HasSubstr("beta'"), testing::Not(HasSubstr("there'"))));
  EXPECT_GE(Deadline::Clock::now() - start, 100ms);
  store->set("alpha", "y", soon());  // the client is still good
  EXPECT_EQ(store->get("alpha", within(0ms + 5s)), "y");
}

TEST_P(StoreTest, AnyNumberOfMissingKeysGivesAShortMessage) {
  std::vector<std::string> keys(100);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = "k" + std::to_string(i);
  EXPECT_THAT(message_of<CommError>([&] { client()->wait(keys, within(10ms)); }), HasSubstr("k7' and 92 more"));
}

TEST_P(StoreTest, AddCountsFromZeroAndRefusesWhatIsNoNumber) {
  const auto store = client();
  EXPECT_EQ(store->add("n", 5, soon()), 5);
  EXPECT_EQ(store->add("n", -7, soon()), -2);
  EXPECT_EQ(store->get("n", soon()), "-2");
  for (const char* text : {"", "x", "1 ", "12x", "99999999999999999999"}) {
    store->set("text", text, soon());
    EXPECT_THROW(store->add("text", 1, soon()), InvalidArgument) << text;
    EXPECT_EQ(store->get("text", soon()), text);
  }
  store->set("n", "9223372036854775807", soon());
  EXPECT_THROW(store->add("n", 1, soon()), InvalidArgument);
  EXPECT_EQ(store->add("n", 0, soon()), INT64_MAX);
}

TEST_P(StoreTest, AddsOfManyThreadsAreNotLost) {
  constexpr int kThreads = 4, kAdds = 50;
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  std::vector<std::vector<int64_t>> seen(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const auto store = client();
      for (int i = 0; i < kAdds; ++i) seen[static_cast<size_t>(t)].push_back(store->add("n", 1, soon()));
    });
  }
  for (auto& thread : threads) thread.join();
  std::set<int64_t> all;
  for (const auto& sums : seen) {
    EXPECT_TRUE(std::is_sorted(sums.begin(), sums.end()));
    all.insert(sums.begin(), sums.end());
  }
  EXPECT_EQ(all.size(), size_t{kThreads * kAdds});  // every sum was handed out once
  EXPECT_EQ(*all.rbegin(), kThreads * kAdds);
}

TEST_P(StoreTest, CompareSetChangesOnlyWhatWasExpected) {
  const auto store = client();
  EXPECT_EQ(store->compare_set("a", "old", "new", soon()), "old");
  EXPECT_FALSE(store->contains("a", soon()));
  EXPECT_EQ(store->compare_set("a", "", "one", soon()), "one");
  EXPECT_EQ(store->compare_set("a", "", "two", soon()), "one");
  EXPECT_EQ(store->compare_set("a", "wrong", "two", soon()), "one");
  EXPECT_EQ(store->compare_set("a", "one", "two", soon()), "two");
  EXPECT_EQ(store->get("a", soon()), "two");
}

TEST_P(StoreTest, ARemovedKeyIsGoneForEverybody) {
  const auto store = client(), other = client();
  store->set("a", "x", soon());
  EXPECT_TRUE(other->remove("a", soon()));
  EXPECT_FALSE(store->remove("a", soon()));
  EXPECT_FALSE(store->contains("a", soon()));
  EXPECT_EQ(store->count(soon()), 0);
}

TEST_P(StoreTest, KeysAreListedByPrefixInOrder) {
  const auto store = client();
  for (const char* key : {"b/2", "a", "b/10", "b", "c", "b/1"}) store->set(key, "", soon());
  EXPECT_THAT(store->keys("b/", soon()), ElementsAre("b/1", "b/10", "b/2"));
  EXPECT_THAT(store->keys("", soon()), ElementsAre("a", "b", "b/1", "b/10", "b/2", "c"));
  EXPECT_THAT(store->keys("d", soon()), ElementsAre());
  EXPECT_EQ(store->count(soon()), 6);
}

TEST_P(StoreTest, KeysAndValuesBeyondTheBoundsAreRefused) {
  const auto store = client();
  const std::string long_key(kMaxStoreKeyBytes + 1, 'k');
  const std::string large(kMaxStoreValueBytes + 1, 'v');
  EXPECT_THROW(store->set(long_key, "", soon()), InvalidArgument);
  EXPECT_THROW(store->set("", "", soon()), InvalidArgument);
  EXPECT_THROW(store->get("", soon()), InvalidArgument);
  EXPECT_THROW(store->wait(std::vector<std::string>{"a", ""}, soon()), InvalidArgument);
  EXPECT_THROW(store->add(long_key, 1, soon()), InvalidArgument);
  EXPECT_THROW(store->remove(long_key, soon()), InvalidArgument);
  EXPECT_THROW(store->set("a", large, soon()), InvalidArgument);
  EXPECT_THROW(store->compare_set("a", "", large, soon()), InvalidArgument);
  EXPECT_EQ(store->count(soon()), 0);
}

TEST_P(StoreTest, TheLargestValueArrivesWhole) {
  std::string largest(kMaxStoreValueBytes, 'v');
  for (size_t i = 0; i < largest.size(); i += 4093) largest[i] = static_cast<char>(i);
  client()->set("a", largest, soon());
  EXPECT_TRUE(client()->get("a", soon()) == largest);
  EXPECT_TRUE(client()->compare_set("a", largest, largest, soon()) == largest);
}

INSTANTIATE_TEST_SUITE_P(Kinds, StoreTest, testing::ValuesIn(store_kinds()),
                         [](const auto& row) { return row.param.name; });

}  // namespace
}  // namespace chorale::transport
