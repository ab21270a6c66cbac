#include "chorale/base/error.h"
#include "chorale/io/safetensors.h"
#include "chorale/testing/fuzz_test_util.h"

namespace {

std::string file(std::string_view header, std::string_view data) {
  return chorale::fuzz::bytes_of(uint64_t{header.size()}) + std::string(header) + std::string(data);
}

}  // namespace

CHORALE_FUZZ(Safetensors,
             {file(R"({"x":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"y":{"dtype":"BOOL","shape":[3],)"
                   R"("data_offsets":[8,11]}}  )",
                   "01234567abc"),
              file(R"({"__metadata__":{"format":"pt"},"e":{"dtype":"I64","shape":[0],"data_offsets":[0,0]}})", "")}) {
  const auto header = chorale::io::parse_safetensors("input", std::as_bytes(std::span(input)));
  size_t bytes = 0;
  for (const auto& entry : header.entries) bytes += entry.end - entry.begin;
  CHORALE_INVARIANT(header.data_begin + bytes == input.size(), "the tensors do not cover the file");
}
