#include "chorale/io/idx.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include "chorale/base/error.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::io {
namespace {

using testing::HasSubstr;
using namespace std::string_literals;

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

std::string error_of(const std::string& file) {
  return message_of([&] { parse_idx("it", bytes_of(file)); });
}

std::string gzip(const std::string& text) {
  z_stream stream{};
  deflateInit2(&stream, 9, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY);
  std::string packed(deflateBound(&stream, text.size()) + 64, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  deflate(&stream, Z_FINISH);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

// 2 x 3 elements of 16 bits.
const std::string kShorts = "\0\0\x0b\x02\0\0\0\x02\0\0\0\x03\0\1\0\2\xff\xff\1\0\0\4\0\5"s;

TEST(Idx, ReadsBigEndianElements) {
  const Tensor x = parse_idx("it", bytes_of(kShorts));
  EXPECT_EQ(x.dtype(), DType::kI16);
  EXPECT_EQ(x.sizes(), (Shape{2, 3}));
  EXPECT_EQ(x.to_vector<int>(), (std::vector<int>{1, 2, -1, 256, 4, 5}));
  EXPECT_EQ(parse_idx("it", bytes_of("\0\0\x0d\x01\0\0\0\x01\x3f\xc0\0\0"s)).to_vector<float>(),
            (std::vector<float>{1.5f}));
  EXPECT_EQ(parse_idx("it", bytes_of("\0\0\x0e\0\xc0\0\0\0\0\0\0\0"s)).item<double>(), -2);
  EXPECT_EQ(parse_idx("it", bytes_of("\0\0\x08\x01\0\0\0\x02\x80\1"s)).to_vector<int>(), (std::vector<int>{128, 1}));
  EXPECT_EQ(parse_idx("it", bytes_of("\0\0\x09\x01\0\0\0\x01\x80"s)).to_vector<int>(), (std::vector<int>{-128}));
  EXPECT_EQ(parse_idx("it", bytes_of("\0\0\x0c\0\0\1\0\2"s)).item<int>(), 65538);
}

TEST(Idx, ReadsGzip) {
  const TemporaryFolder folder;
  EXPECT_EQ(load_idx(folder.write("a.gz", gzip(kShorts))).to_vector<int>(), (std::vector<int>{1, 2, -1, 256, 4, 5}));
}

TEST(Idx, SaysWhyAFileIsRefused) {
  EXPECT_THAT(error_of(""), HasSubstr("ends 4 bytes too early"));
  EXPECT_THAT(error_of("\0\0\x0a\0"s), HasSubstr("is not an IDX file"));
  EXPECT_THAT(error_of("\0\1\x08\0"s), HasSubstr("is not an IDX file"));
  EXPECT_THAT(error_of("\0\0\x08\x09"s), HasSubstr("has 9 dimensions"));
  EXPECT_THAT(error_of(kShorts.substr(0, 10)), HasSubstr("ends 2 bytes too early"));
  EXPECT_THAT(error_of(kShorts.substr(0, 20)), HasSubstr("cannot hold [2, 3] elements of i16"));
  EXPECT_THAT(error_of(kShorts + "x"), HasSubstr("1 bytes behind its end"));
  EXPECT_NE(error_of("\0\0\x08\x02\xff\xff\xff\xff\xff\xff\xff\xff"s), "");
}

TEST(Idx, SaysWhyAPackedFileIsRefused) {
  const std::string packed = gzip(kShorts);
  for (size_t size = 2; size < packed.size(); ++size)
    EXPECT_THAT(error_of(packed.substr(0, size)), HasSubstr("cut off"));
  EXPECT_THAT(error_of(packed + "x"), HasSubstr("1 bytes behind its end"));
  EXPECT_THAT(error_of(gzip(kShorts + "x")), HasSubstr("has more data than it should"));
  EXPECT_THAT(error_of(gzip(kShorts.substr(0, 20))), HasSubstr("ends 4 bytes too early"));
  std::string damaged = packed;
  damaged[packed.size() - 6] ^= 1;  // in the checksum
  EXPECT_THAT(error_of(damaged), HasSubstr("is damaged: incorrect data check"));
  // A terabyte is promised by a few bytes: refused before any memory is asked for.
  EXPECT_THAT(error_of(gzip("\0\0\x08\x02\0\x10\0\0\0\x10\0\0"s)), HasSubstr("cannot hold [1048576, 1048576]"));
}

}  // namespace
}  // namespace chorale::io
