#include "chorale/graph/passes/spread_updates.h"

#include <gtest/gtest.h>

#include "chorale/base/error.h"

namespace chorale::graph {
namespace {

constexpr const char* kRule =
    "{momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=false, maximize=false, masters=false}";

std::string spread(const std::string& text) {
  Graph graph = parse(text);
  verify(graph);
  spread_updates(graph);
  verify(graph);
  return print(graph);
}

// Each goes behind its gradient, and behind what still reads the old value of the parameter.
TEST(SpreadUpdates, GoBehindTheirGradients) {
  const std::string w = "f32[256, 256]";
  EXPECT_EQ(
      spread(concat("graph(%0: f64[], %1: ", w, ", %2: ", w, ", %3: i64[], %4: i64[], %5: ", w, ") {\n",  //
                    "  %6: ", w, " = matmul(%5, %1)\n",                                                   //
                    "  %7: ", w, " = matmul(%6, %2)\n",                                                   //
                    "  %8: ", w, " = matmul(%7, %5)\n",                                                   //
                    "  %9: ", w, " = matmul(%8, %1)\n",                                                   //
                    "  %10: ", w, " = matmul(%9, %9)\n",                                                  //
                    "  %11: ", w, ", %12: ", w, ", %13: i64[], %14: i64[] = update_sgd(%0, none, %1, %2, %6, %7, ",
                    "%3, %4) ", kRule, "\n  return %10, %11 -> %1, %12 -> %2, %13 -> %3, %14 -> %4\n}\n")),
      concat("graph(%0: f64[], %1: ", w, ", %2: ", w, ", %3: i64[], %4: i64[], %5: ", w, ") {\n",  //
             "  %6: ", w, " = matmul(%5, %1)\n",                                                   //
             "  %7: ", w, " = matmul(%6, %2)\n",                                                   //
             "  %8: ", w, ", %9: i64[] = update_sgd(%0, none, %2, %7, %4) ", kRule, "\n",          //
             "  %10: ", w, " = matmul(%7, %5)\n",                                                  //
             "  %11: ", w, " = matmul(%10, %1)\n",                                                 //
             "  %12: ", w, ", %13: i64[] = update_sgd(%0, none, %1, %6, %3) ", kRule, "\n",        //
             "  %14: ", w, " = matmul(%11, %11)\n",                                                //
             "  return %14, %12 -> %1, %8 -> %2, %13 -> %3, %9 -> %4\n}\n"));
}

// A call costs more than a few numbers do.
TEST(SpreadUpdates, SmallParametersStayTogether) {
  const std::string text =
      concat("graph(%0: f64[], %1: f32[8], %2: f32[4], %3: i64[], %4: i64[], %5: f32[8], %6: f32[4]) {\n",
             "  %7: f32[8], %8: f32[4], %9: i64[], %10: i64[] = update_sgd(%0, none, %1, %2, %5, %6, %3, %4) ", kRule,
             "\n  return %7 -> %1, %8 -> %2, %9 -> %3, %10 -> %4\n}\n");
  EXPECT_EQ(spread(text), text);
}

}  // namespace
}  // namespace chorale::graph
