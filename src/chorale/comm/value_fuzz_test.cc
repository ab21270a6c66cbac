#include <stdexcept>

#include "chorale/comm/value.h"
#include "chorale/testing/fuzz_test_util.h"

namespace chorale::comm {
namespace {

std::vector<std::string> values() {
  const Tensor tensor = Tensor::from(std::vector<float>{1, 2, 3, 4, 5, 6}, {2, 3});
  return {encode(Value()), encode(Value(int64_t{-7})), encode(Value(List{true, 2.5, "text", List{}})),
          encode(Value(Map{{"a", 1}, {"b", Map{{"c", tensor}}}})),
          encode(Value(Record{"Point", {{"x", 1.0}, {"y", Tensor::empty({0, 3}, DType::kI64)}}}))};
}

// One value has one spelling.
CHORALE_FUZZ(Value, values()) {
  const Value value = decode(input);
  // A map that is not sorted decodes to a sorted one, so what is compared is the second spelling.
  const std::string text = encode(value);
  if (encode(decode(text)) != text) throw std::logic_error("a value changes on its way");
}

}  // namespace
}  // namespace chorale::comm
