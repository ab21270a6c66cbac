#include "chorale/base/error.h"
#include "chorale/io/npy.h"
#include "chorale/testing/fuzz_test_util.h"

namespace {

std::string file(int version, const std::string& header, std::string_view data) {
  using chorale::fuzz::bytes_of;
  const auto length = static_cast<uint16_t>(header.size());
  return "\x93NUMPY" + bytes_of(static_cast<uint8_t>(version), uint8_t{0}) +
         (version == 1 ? bytes_of(length) : bytes_of(uint32_t{length})) + header + std::string(data);
}

}  // namespace

CHORALE_FUZZ(Npy, {file(1, "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 2), }   \n", "01234567"),
                   file(3, "{'descr': '>c16', 'fortran_order': True, 'shape': (), }\n", "0123456789abcdef"),
                   file(2, "{\"shape\": (0L,), 'fortran_order': True, 'descr': '|V2'}", "")}) {
  const auto header = chorale::io::parse_npy("input", input);
  const auto bytes = static_cast<size_t>(chorale::count_elems(header.sizes)) * chorale::size_of(header.dtype);
  CHORALE_INVARIANT(header.data_begin + bytes == input.size(), "the elements do not fill the file");
}
