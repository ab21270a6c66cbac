// Data compressed by gzip, unpacked piece by piece.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace chorale::io {

bool is_gzip(std::span<const std::byte> bytes);

// The caller says how much it wants, so that a small file cannot fill the memory. Errors (InvalidArgument) name `what`.
class GzipReader {
 public:
  // `packed` must outlive the reader.
  GzipReader(std::string what, std::span<const std::byte> packed);
  ~GzipReader();
  GzipReader(const GzipReader&) = delete;
  GzipReader& operator=(const GzipReader&) = delete;

  // Fills `out` whole.
  void read(std::span<std::byte> out);
  // Checks that nothing follows, and the checksum.
  void finish();
  // No data of this many packed bytes unpacks to more.
  size_t most_bytes() const;

 private:
  struct State;
  size_t inflate_some(std::span<std::byte> out);

  const std::string what_;
  const std::span<const std::byte> packed_;
  std::unique_ptr<State> state_;
};

}  // namespace chorale::io
