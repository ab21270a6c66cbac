#include "chorale/train/event_file.h"

#include <gtest/gtest.h>

#include <cstring>
#include <span>

#include "chorale/base/crc32c.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::train {
namespace {

template <class T>
T take(std::string_view& bytes) {
  T value;
  std::memcpy(&value, bytes.data(), sizeof value);
  bytes.remove_prefix(sizeof value);
  return value;
}
uint32_t checksum(std::string_view bytes) { return crc32c(std::as_bytes(std::span(bytes))); }
uint32_t unmask(uint32_t value) {
  const uint32_t rotated = value - 0xa282ead8u;
  return rotated >> 17 | rotated << 15;
}
// The messages of a file, less their times (a field of 9 bytes at the front), after checking the checksums.
std::vector<std::string> messages(const std::string& file) {
  std::vector<std::string> found;
  for (std::string_view rest = file; !rest.empty();) {
    const std::string_view length_bytes = rest.substr(0, 8);
    const auto length = take<uint64_t>(rest);
    EXPECT_EQ(unmask(take<uint32_t>(rest)), checksum(length_bytes));
    const std::string_view data = rest.substr(0, length);
    rest.remove_prefix(length);
    EXPECT_EQ(unmask(take<uint32_t>(rest)), checksum(data));
    EXPECT_EQ(data[0], '\x09');
    found.emplace_back(data.substr(9));
  }
  return found;
}

TEST(EventFile, RecordsAreThoseThatTensorBoardReads) {
  const TemporaryFolder folder;
  {
    EventFile events(folder.path(), 300);
    events.number(300, "train/loss", 0.5);
    events.text(301, "sample", "ab");
  }
  const auto entry = *std::filesystem::directory_iterator(folder.path());
  EXPECT_TRUE(entry.path().filename().string().starts_with("events.out.tfevents."));
  using namespace std::string_literals;
  // The bytes that tensorboard.compat.proto.event_pb2 makes.
  const std::vector<std::string> expected = {
      "\x10\0\x1a\x0d"s + "brain.Event:2",
      "\x10\xac\x02\x3a\x02\x08\x01"s,
      "\x10\xac\x02\x2a\x13\x0a\x11\x0a\x0atrain/loss\x15\0\0\0\x3f"s,
      "\x10\xad\x02\x2a\x22\x0a\x20\x0a\x06sample\x42\x0c\x08\x07\x12\x04\x12\x02\x08\x01\x42\x02"s +
          "ab\x4a\x08\x0a\x06\x0a\x04text",
  };
  const auto found = messages(folder.read(entry.path().filename().string()));
  EXPECT_EQ(found, expected);
}

}  // namespace
}  // namespace chorale::train
