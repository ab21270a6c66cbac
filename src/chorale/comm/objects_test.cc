// Collectives of values: the rows of section 3.6 of the contract, and the codec.
#include "chorale/comm/objects.h"

#include <gtest/gtest.h>

#include <random>

#include "chorale/base/debug_level.h"
#include "chorale/base/error.h"
#include "chorale/comm/spec_test_util.h"
#include "chorale/device/sim/sim_device.h"
#include "chorale/device/stream.h"

namespace chorale::comm {
namespace {

Tensor some_tensor() {
  const Tensor tensor = Tensor::empty({3, 3}, DType::kF32);
  for (int64_t i = 0; i < 9; ++i) tensor.data<float>()[i] = 1.0f / static_cast<float>(i + 3);
  return tensor;
}

// Five kinds, as in the contract: nested map, struct, struct with a tensor, string, mixed nested list.
Value sample(int index) {
  switch (index % 5) {
    case 0:
      return Map{{"foo", 5}, {"bar", Map{{"baz", 1.5}, {"on", true}}}};
    case 1:
      return Record{"Foo", {{"x", 7}, {"added", "later"}}};
    case 2:
      return Record{"Bar", {{"weights", some_tensor()}}};
    case 3:
      return "foo";
    default:
      return List{1, 2, true, "string", List{4, 5, "nested", Value()}};
  }
}

// What is not the CPU: the simulated device, whose memory the host cannot touch.
constexpr Device kOtherDevice{DeviceType::kSim, 0};

Value too_deep() {
  Value value = 1;
  for (int depth = 0; depth <= kMostValueDepth; ++depth) value = List{value};
  return value;
}

// spec: test_all_gather_object_default_pg, test_all_gather_object_subgroup
// spec: collectives:test_gather_object, test_gather_object_subgroup
TEST(Objects, AreGathered) {
  for (DebugLevel level : {DebugLevel::kOff, DebugLevel::kInfo, DebugLevel::kDetail}) {
    set_debug_level(level);
    run_ranks(6, [](Group& world) {
      Group full = world.duplicate();
      for (Group* group : {&world, &full}) {
        const auto all = all_gather_object(*group, sample(group->rank()));
        ASSERT_EQ(all.size(), 6u);
        for (int r = 0; r < 6; ++r) EXPECT_EQ(all[static_cast<size_t>(r)], sample(r));
        EXPECT_THROW(all_gather_object(*group, too_deep()), InvalidArgument);
        const auto gathered = gather_object(*group, sample(group->rank()), 0);
        EXPECT_EQ(gathered.size(), group->rank() == 0 ? 6u : 0u);
        for (size_t r = 0; r < gathered.size(); ++r) EXPECT_EQ(gathered[r], sample(static_cast<int>(r)));
      }
    });
  }
  set_debug_level(DebugLevel::kOff);
}

// Every value, alone and in a list with all others: different before, those of the root after. A value alone travels
// with no device given, on the CPU, on another device, and on different ones.
void broadcast_samples(const Group& group, int root) {
  const bool is_root = group.global_rank(group.rank()) == root;
  std::vector<Value> five;
  for (int i = 0; i < 5; ++i) {
    five.push_back(is_root ? sample(i) : Value(i));
    const auto broadcast_one = [&](const auto&... device) {
      std::vector<Value> one{five.back()};
      EXPECT_EQ(one[0] == sample(i), is_root);
      broadcast_object_list(group, one, root, device...);
      EXPECT_EQ(one, std::vector<Value>{sample(i)});
    };
    broadcast_one();
    broadcast_one(kCpu);
    broadcast_one(kOtherDevice);
    broadcast_one(is_root ? kOtherDevice : kCpu);
  }
  broadcast_object_list(group, five, root);
  ASSERT_EQ(five.size(), 5u);
  for (int i = 0; i < 5; ++i) EXPECT_EQ(five[static_cast<size_t>(i)], sample(i));
}

// spec: test_broadcast_object_list
TEST(Objects, AreBroadcast) {
  sim::add_device({.devices = 4, .most_delay = std::chrono::microseconds(20)});
  for (DebugLevel level : {DebugLevel::kOff, DebugLevel::kDetail}) {
    set_debug_level(level);
    run_ranks(6, [](Group& world) {
      // Ranks that are threads would share the device's default stream.
      const StreamScope stream(make_stream(kOtherDevice));
      broadcast_samples(world, 0);
      const Group sub = world.new_group({1, 2, 5});
      if (sub.is_member()) {
        for (int root : {1, 5}) broadcast_samples(sub, root);
      } else {
        std::vector<Value> own{sample(3)};
        broadcast_object_list(sub, own, 1);
        EXPECT_EQ(own, std::vector<Value>{sample(3)}) << "nothing happens outside the group";
      }
    });
  }
  set_debug_level(DebugLevel::kOff);
}

// spec: test_scatter_object_list
TEST(Objects, AreScattered) {
  run_ranks(6, [](Group& group) {
    std::vector<Value> inputs, output(1), none;
    for (int r = 0; r < group.size() && group.rank() == 0; ++r) inputs.push_back(sample(r));
    scatter_object_list(group, output, inputs, 0);
    EXPECT_EQ(output[0], sample(group.rank()));
    EXPECT_THROW(scatter_object_list(group, none, inputs, 0), InvalidArgument);
  });
}

TEST(Codec, RoundTripsEveryKind) {
  for (int i = 0; i < 5; ++i) EXPECT_EQ(decode(encode(sample(i))), sample(i));
  const Tensor empty = Tensor::empty({0, 5}, DType::kI64);
  EXPECT_EQ(decode(encode(empty)).as<Tensor>().sizes(), (Shape{0, 5}));
  EXPECT_EQ(decode(encode(sample(2))).as<Record>().type, "Bar");
  EXPECT_EQ(decode(encode(sample(0))).as<Map>().at("foo").as<int64_t>(), 5);
  EXPECT_THROW(decode(encode(sample(3))).as<List>(), InvalidArgument);
}

TEST(Codec, RefusesWhatCannotTravel) {
  EXPECT_THROW(encode(too_deep()), InvalidArgument);
  EXPECT_THROW(encode(Tensor()), InvalidArgument);
}

// Whatever the bytes are: a value, or InvalidArgument.
TEST(Codec, SurvivesBytesThatNobodyEncoded) {
  std::mt19937 random(17);
  const auto try_decode = [](const std::string& text) {
    try {
      const Value value = decode(text);
      EXPECT_EQ(decode(encode(value)), value);
    } catch (const InvalidArgument&) {
    }
  };
  for (int round = 0; round < 3000; ++round) {
    std::string text = encode(sample(round));
    const size_t changes = 1 + random() % 4;
    for (size_t i = 0; i < changes; ++i) text[random() % text.size()] = static_cast<char>(random());
    if (round % 3 == 0) text.resize(random() % (text.size() + 1));
    try_decode(text);
  }
}

}  // namespace
}  // namespace chorale::comm
