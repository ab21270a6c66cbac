// A file is a row of records: length (u64), masked CRC of these 8 bytes, the bytes of a protocol-buffer message, masked
// CRC of those. The messages are Event, Summary and SessionLog, of which the few fields used here are written by hand.
#include "chorale/train/event_file.h"

#include <unistd.h>

#include <bit>
#include <chrono>
#include <cstring>
#include <span>

#include "chorale/base/crc32c.h"
#include "chorale/base/error.h"

namespace chorale::train {
namespace {

// ---- protocol buffers: a field is its number and wire type, then the value

template <class T>
std::string bytes_of(T value) {
  static_assert(std::endian::native == std::endian::little);
  std::string bytes(sizeof value, '\0');
  std::memcpy(bytes.data(), &value, sizeof value);
  return bytes;
}
std::string varint(uint64_t value) {
  std::string bytes;
  for (; value >= 128; value >>= 7) bytes += static_cast<char>(value | 128);
  return bytes + static_cast<char>(value);
}
std::string varint_field(int number, int64_t value) {
  return varint(static_cast<uint64_t>(number) << 3) + varint(static_cast<uint64_t>(value));
}
std::string double_field(int number, double value) {
  return varint(static_cast<uint64_t>(number) << 3 | 1) + bytes_of(value);
}
std::string float_field(int number, float value) {
  return varint(static_cast<uint64_t>(number) << 3 | 5) + bytes_of(value);
}
std::string bytes_field(int number, std::string_view value) {
  return (varint(static_cast<uint64_t>(number) << 3 | 2) + varint(value.size())).append(value);
}

std::string summary(const std::string& value) { return bytes_field(5, bytes_field(1, value)); }

std::string record_of(const std::string& data) {
  const auto masked = [](std::string_view bytes) {
    const uint32_t crc = crc32c(std::as_bytes(std::span(bytes)));
    return bytes_of((crc >> 15 | crc << 17) + 0xa282ead8u);
  };
  const std::string length = bytes_of(static_cast<uint64_t>(data.size()));
  return length + masked(length) + data + masked(data);
}

double now_s() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

std::filesystem::path new_name(const std::filesystem::path& folder) {
  char host[256] = "";
  ::gethostname(host, sizeof host - 1);
  return folder / concat("events.out.tfevents.", static_cast<int64_t>(now_s()), ".", host, ".", ::getpid());
}

}  // namespace

EventFile::EventFile(const std::filesystem::path& folder, int64_t first_step) : file_(new_name(folder)) {
  event(0, bytes_field(3, "brain.Event:2"));                                  // the version of the format
  if (first_step > 0) event(first_step, bytes_field(7, varint_field(1, 1)));  // SessionLog: start
  flush();
}

void EventFile::event(int64_t step, std::string_view field) {
  file_.add(record_of(double_field(1, now_s()) + varint_field(2, step).append(field)));
}
void EventFile::number(int64_t step, std::string_view tag, double value) {
  event(step, summary(bytes_field(1, tag) + float_field(2, static_cast<float>(value))));
}
void EventFile::text(int64_t step, std::string_view tag, std::string_view value) {
  constexpr int64_t kString = 7;  // of DataType
  const std::string tensor =
      varint_field(1, kString) + bytes_field(2, bytes_field(2, varint_field(1, 1))) + bytes_field(8, value);
  const std::string metadata = bytes_field(1, bytes_field(1, "text"));
  event(step, summary(bytes_field(1, tag) + bytes_field(8, tensor) + bytes_field(9, metadata)));
}
void EventFile::flush() { file_.flush(); }

}  // namespace chorale::train
