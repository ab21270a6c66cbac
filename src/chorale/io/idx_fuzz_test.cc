#include "chorale/io/idx.h"
#include "chorale/testing/fuzz_test_util.h"

using namespace std::string_literals;

// The last one is the first one, packed by gzip.
CHORALE_FUZZ(Idx, {"\0\0\x0b\x02\0\0\0\x02\0\0\0\x03\0\1\0\2\xff\xff\1\0\0\4\0\5"s, "\0\0\x0d\0abcd"s,
                   "\x1f\x8b\x08\0\0\0\0\0\2\3\x63\x60\xe0\x66\x62\x60\x60\0\x61\x66\x06\x46\x06\xa6\xff\xff"
                   "\x19\x19\x18\x58\x18\x58\1\x72\x88\xf2\x49\x18\0\0\0"s}) {
  chorale::io::parse_idx("input", std::as_bytes(std::span(input)));
}
