#include "chorale/io/gzip.h"

#include <zlib.h>

#include <algorithm>
#include <limits>

#include "chorale/base/error.h"

namespace chorale::io {

struct GzipReader::State {
  z_stream stream{};
  size_t taken = 0;  // packed bytes handed to zlib so far
  bool ended = false;
};

bool is_gzip(std::span<const std::byte> bytes) {
  return bytes.size() >= 2 && bytes[0] == std::byte{0x1f} && bytes[1] == std::byte{0x8b};
}

GzipReader::GzipReader(std::string what, std::span<const std::byte> packed)
    : what_(std::move(what)), packed_(packed), state_(std::make_unique<State>()) {
  constexpr int kGzipOnly = 15 + 16;  // the largest window; plus 16: a gzip header is required
  CHORALE_INVARIANT(inflateInit2(&state_->stream, kGzipOnly) == Z_OK, "zlib does not start");
}

GzipReader::~GzipReader() { inflateEnd(&state_->stream); }

size_t GzipReader::inflate_some(std::span<std::byte> out) {
  z_stream& stream = state_->stream;
  const auto piece = [](size_t bytes) {  // zlib counts in unsigned int
    return static_cast<uInt>(std::min<size_t>(bytes, std::numeric_limits<uInt>::max()));
  };
  if (stream.avail_in == 0) {
    stream.next_in = reinterpret_cast<Bytef*>(const_cast<std::byte*>(packed_.data() + state_->taken));
    stream.avail_in = piece(packed_.size() - state_->taken);
    state_->taken += stream.avail_in;
  }
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = piece(out.size());
  const uInt room = stream.avail_out;
  const int status = inflate(&stream, Z_NO_FLUSH);
  state_->ended = status == Z_STREAM_END;
  // Z_BUF_ERROR: no progress, because the packed bytes are used up.
  CHORALE_CHECK(status == Z_OK || status == Z_STREAM_END || status == Z_BUF_ERROR, "[gzip] ", what_,
                " is damaged: ", stream.msg ? stream.msg : "wrong checksum");
  const bool starved =
      stream.avail_out == room && !state_->ended && stream.avail_in == 0 && state_->taken == packed_.size();
  CHORALE_CHECK(!starved, "[gzip] ", what_, " was cut off");
  return room - stream.avail_out;
}

void GzipReader::read(std::span<std::byte> out) {
  while (!out.empty()) {
    CHORALE_CHECK(!state_->ended, "[gzip] ", what_, " ends ", out.size(), " bytes too early");
    out = out.subspan(inflate_some(out));
  }
}

void GzipReader::finish() {
  std::byte extra{};
  while (!state_->ended) {
    CHORALE_CHECK(inflate_some({&extra, 1}) == 0, "[gzip] ", what_, " has more data than it should");
  }
  const size_t rest = packed_.size() - state_->taken + state_->stream.avail_in;
  CHORALE_CHECK(rest == 0, "[gzip] ", what_, " has ", rest, " bytes behind its end");
}

size_t GzipReader::most_bytes() const {
  constexpr size_t kBestRatio = 1032;  // deflate's limit: 258 bytes for two bits
  return packed_.size() * kBestRatio;
}

}  // namespace chorale::io
