#include "chorale/tensor/storage.h"

#include <gtest/gtest.h>

#include <array>
#include <string>
#include <thread>

#include "chorale/base/error.h"

namespace chorale {
namespace {

TEST(Storage, AllocatesAlignedMemoryAndGivesItBack) {
  const size_t before = cpu_allocator().stats().current_bytes;
  {
    const auto storage = Storage::allocate(100, kCpu);
    EXPECT_EQ(storage->bytes(), 100u);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(storage->data()) % memory::kBlockAlignment, 0u);
    EXPECT_EQ(cpu_allocator().stats().current_bytes, before + 128);
  }
  EXPECT_EQ(cpu_allocator().stats().current_bytes, before);
}

TEST(Storage, TheNullDeviceHasASizeAndNoBytes) {
  const size_t before = cpu_allocator().stats().current_bytes;
  const auto storage = Storage::allocate(size_t{1} << 40, kNull);
  EXPECT_EQ(storage->bytes(), size_t{1} << 40);
  EXPECT_EQ(storage->data(), nullptr);
  EXPECT_EQ(cpu_allocator().stats().current_bytes, before);
}

TEST(Storage, WrappedMemoryIsReleasedOnceByTheLastOwner) {
  std::array<float, 4> memory{};
  int released = 0;
  auto first = Storage::wrap(memory.data(), sizeof(memory), kCpu, [&] { ++released; });
  EXPECT_EQ(first->data(), reinterpret_cast<std::byte*>(memory.data()));
  auto second = first;
  first = {};
  EXPECT_EQ(released, 0);
  std::thread([mine = std::move(second)] {}).join();
  EXPECT_EQ(released, 1);
}

TEST(Storage, AReleaseMayDropAnotherStorage) {
  std::array<float, 4> memory{};
  int released = 0;
  auto inner = Storage::wrap(memory.data(), sizeof(memory), kCpu, [&] { ++released; });
  auto outer = Storage::wrap(memory.data(), sizeof(memory), kCpu, [kept = std::move(inner)] {});
  EXPECT_EQ(released, 0);
  outer = {};
  EXPECT_EQ(released, 1);
}

TEST(Storage, NothingCanBeWrappedAtANullPointerOrOnTheNullDevice) {
  int released = 0;
  EXPECT_THROW(Storage::wrap(nullptr, 8, kCpu, [&] { ++released; }), InvalidArgument);
  EXPECT_THROW(Storage::wrap(&released, 4, kNull, [&] { ++released; }), InvalidArgument);
  EXPECT_EQ(released, 0);
  EXPECT_EQ(Storage::wrap(nullptr, 0, kCpu)->bytes(), 0u);
}

TEST(Storage, CountsWritesAndRemembersTheLastWriter) {
  const auto storage = Storage::allocate(4, kCpu);
  EXPECT_EQ(storage->version(), 0u);
  EXPECT_EQ(storage->last_writer(), nullptr);
  storage->note_write("add");
  storage->note_write("mul");
  EXPECT_EQ(storage->version(), 2u);
  EXPECT_STREQ(storage->last_writer(), "mul");
}

TEST(Storage, ARecycledStorageStartsAfresh) {
  std::array<float, 4> memory{};
  for (int i = 0; i < 10; ++i) {
    auto storage = Storage::wrap(
        memory.data(), sizeof(memory), kCpu, [] {}, Access::kReadOnly);
    storage->note_write("add");
    storage = {};
    const auto fresh = Storage::allocate(4, kCpu);
    EXPECT_EQ(fresh->version(), 0u);
    EXPECT_EQ(fresh->last_writer(), nullptr);
    EXPECT_FALSE(fresh->read_only());
  }
}

TEST(Storage, ReadOnlyMemoryRefusesWritersByName) {
  const std::array<float, 4> memory{};
  const auto storage = Storage::wrap(const_cast<float*>(memory.data()), sizeof(memory), kCpu, {}, Access::kReadOnly);
  EXPECT_TRUE(storage->read_only());
  try {
    storage->check_writable("add");
    FAIL() << "no error";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("[add]"), std::string::npos) << error.what();
  }
  Storage::allocate(4, kCpu)->check_writable("add");
}

}  // namespace
}  // namespace chorale
