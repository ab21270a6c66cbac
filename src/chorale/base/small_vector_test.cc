#include "chorale/base/small_vector.h"

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace chorale {
namespace {

// Counts what is alive, and throws from the copy that `copies_left` forbids.
struct Counted {
  static inline int alive = 0;
  static inline int copies_left = 1000;
  int value = 0;

  explicit Counted(int v = 0) : value(v) { ++alive; }
  Counted(const Counted& other) : value(other.value) {
    if (copies_left-- == 0) throw std::runtime_error("no more copies");
    ++alive;
  }
  Counted(Counted&& other) noexcept : value(std::exchange(other.value, -1)) { ++alive; }
  Counted& operator=(const Counted&) = default;
  Counted& operator=(Counted&& other) noexcept {
    value = std::exchange(other.value, -1);
    return *this;
  }
  ~Counted() { --alive; }
  friend bool operator==(const Counted& a, const Counted& b) { return a.value == b.value; }
};
using Vector = SmallVector<Counted, 3>;

Vector numbers(int count) {
  Vector result;
  for (int i = 0; i < count; ++i) result.emplace_back(i);
  return result;
}
std::vector<int> values(const Vector& vector) {
  std::vector<int> result;
  for (const Counted& element : vector) result.push_back(element.value);
  return result;
}
std::vector<int> iota(int count) {
  std::vector<int> result(static_cast<size_t>(count));
  std::iota(result.begin(), result.end(), 0);
  return result;
}

class SmallVectorTest : public testing::Test {
  void TearDown() override {
    EXPECT_EQ(Counted::alive, 0);
    Counted::copies_left = 1000;
  }
};

TEST_F(SmallVectorTest, KeepsOrderAcrossTheStepFromInlineToHeap) {
  for (int count = 0; count < 20; ++count) {
    const Vector vector = numbers(count);
    EXPECT_EQ(values(vector), iota(count));
    EXPECT_EQ(vector.empty(), count == 0);
  }
}

TEST_F(SmallVectorTest, UpToNElementsLieInsideTheVector) {
  const auto is_inside = [](const Vector& vector) {
    const auto* at = reinterpret_cast<const std::byte*>(vector.data());
    const auto* begin = reinterpret_cast<const std::byte*>(&vector);
    return at >= begin && at < begin + sizeof(vector);
  };
  const Vector three = numbers(3), four = numbers(4);
  EXPECT_TRUE(is_inside(three));
  EXPECT_FALSE(is_inside(four));
}

TEST_F(SmallVectorTest, CopyAndMoveAssignmentWorkBetweenEveryPairOfSizes) {
  for (int from = 0; from < 6; ++from) {
    for (int to = 0; to < 6; ++to) {
      const Vector source = numbers(from);
      Vector copied = numbers(to);
      copied = source;
      EXPECT_EQ(values(copied), iota(from));
      EXPECT_EQ(values(source), iota(from));
      Vector moved = numbers(to);
      moved = std::move(copied);
      EXPECT_EQ(values(moved), iota(from));
      EXPECT_TRUE(copied.empty());
      copied.push_back(Counted(7));  // a vector that was moved from can be used again
      EXPECT_EQ(values(copied), std::vector<int>{7});
    }
  }
}

TEST_F(SmallVectorTest, AssigningAVectorToItselfChangesNothing) {
  for (int count : {2, 5}) {
    Vector vector = numbers(count);
    const Vector& same = vector;
    vector = same;
    EXPECT_EQ(values(vector), iota(count));
    vector = std::move(const_cast<Vector&>(same));
    EXPECT_EQ(values(vector), iota(count));
  }
}

TEST_F(SmallVectorTest, MovingALargeVectorMovesNoElement) {
  Vector large = numbers(10);
  const Counted* before = large.data();
  const Vector taken = std::move(large);
  EXPECT_EQ(taken.data(), before);
}

TEST_F(SmallVectorTest, ResizeGrowsWithCopiesAndShrinksFromTheBack) {
  Vector vector = numbers(2);
  vector.resize(5, Counted(9));
  EXPECT_EQ(values(vector), (std::vector<int>{0, 1, 9, 9, 9}));
  vector.resize(1);
  EXPECT_EQ(values(vector), std::vector<int>{0});
}

TEST_F(SmallVectorTest, ResizeMayTakeItsValueFromTheVectorItself) {
  Vector vector = numbers(3);
  vector.resize(8, vector[2]);
  EXPECT_EQ(values(vector), (std::vector<int>{0, 1, 2, 2, 2, 2, 2, 2}));
}

TEST_F(SmallVectorTest, PushBackMayTakeAnElementOfTheVectorItself) {
  Vector vector = numbers(3);
  vector.push_back(vector[1]);
  EXPECT_EQ(values(vector), (std::vector<int>{0, 1, 2, 1}));
}

TEST_F(SmallVectorTest, InsertAndEraseWorkAtEveryPlace) {
  for (size_t at = 0; at <= 4; ++at) {
    Vector vector = numbers(4);
    vector.insert(at, Counted(42));
    std::vector<int> expected = iota(4);
    expected.insert(expected.begin() + static_cast<std::ptrdiff_t>(at), 42);
    EXPECT_EQ(values(vector), expected);
    vector.erase(at);
    EXPECT_EQ(values(vector), iota(4));
  }
}

TEST_F(SmallVectorTest, AThrowingCopyLeaksNothing) {
  const Vector source = numbers(5);
  for (int copies = 0; copies < 5; ++copies) {
    Counted::copies_left = copies;
    EXPECT_THROW(Vector{source}, std::runtime_error);
    Counted::copies_left = copies;
    Vector target = numbers(1);
    EXPECT_THROW(target = source, std::runtime_error);
    EXPECT_EQ(values(target), iota(copies));
  }
}

TEST_F(SmallVectorTest, EqualityComparesElementsNotCapacity) {
  Vector grown = numbers(5);
  grown.resize(2);
  EXPECT_EQ(grown, numbers(2));
  EXPECT_NE(grown, numbers(3));
  Vector other = numbers(2);
  other[1].value = 5;
  EXPECT_NE(grown, other);
}

TEST(SmallVector, HoldsTypesThatCanOnlyBeMoved) {
  SmallVector<std::unique_ptr<int>, 2> vector;
  for (int i = 0; i < 5; ++i) vector.push_back(std::make_unique<int>(i));
  const SmallVector<std::unique_ptr<int>, 2> taken = std::move(vector);
  ASSERT_EQ(taken.size(), 5u);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(*taken[static_cast<size_t>(i)], i);
}

}  // namespace
}  // namespace chorale
