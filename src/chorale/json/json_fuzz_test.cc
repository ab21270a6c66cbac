#include "chorale/json/json.h"
#include "chorale/testing/fuzz_test_util.h"

CHORALE_FUZZ(Json, {R"({"a": [1, -2, 1.5e3, 18446744073709551615], "b": {"c": null, "d": true}})",
                    R"(["\u00e9\ud83d\ude00\\\n", "é", "", [[[[]]]], {}])", " 0 "}) {
  chorale::json::parse("input", input);
}
