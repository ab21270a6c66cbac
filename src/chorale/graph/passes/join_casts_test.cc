#include "chorale/graph/passes/join_casts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace chorale::graph {
namespace {

std::string on(const std::string& device, std::string text) {
  for (size_t at = text.find('@'); at != std::string::npos; at = text.find('@', at + device.size()))
    text.replace(at, 1, device);
  return text;
}
std::string joined(const std::string& text) {
  Graph graph = parse(text);
  verify(graph);
  join_casts(graph);
  verify(graph);
  return print(graph);
}

// A layer under autocast: weights are cast, their gradients are cast back, read by an update, and returned.
const std::string kHead = "graph(%0: f32[4, 8]@, %1: f32[8, 8]@, %2: f32[8]@, %3: f64[]@, %4: i64[]@, %5: i64[]@) {\n";
const std::string kLayer =
    "  %9: bf16[4, 8]@ = linear(%6, %7, %8)\n"
    "  %10: bf16[8, 4]:[1, 8]@ = permute(%9) {dims=[1, 0]}\n"
    "  %11: bf16[8, 8]@ = matmul(%10, %6)\n";
const std::string kRule =
    " {momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=false, maximize=false, masters=false}\n";
const std::string kStep =
    kHead +
    "  %6: bf16[4, 8]@ = to(%0) {dtype=bf16, keep_layout=true}\n"
    "  %7: bf16[8, 8]@ = to(%1) {dtype=bf16, keep_layout=true}\n"
    "  %8: bf16[8]@ = to(%2) {dtype=bf16, keep_layout=true}\n" +
    kLayer +
    "  %12: f32[8, 8]@ = to(%11) {dtype=f32, keep_layout=true}\n"
    "  %13: bf16[8]@ = sum(%9) {dims=[0], keepdim=false}\n"
    "  %14: f32[8]@ = to(%13) {dtype=f32, keep_layout=true}\n"
    "  %15: f32[8, 8]@, %16: f32[8]@, %17: i64[]@, %18: i64[]@ = update_sgd(%3, none, %1, %2, %12, %14, %4, %5)" +
    kRule + "  return %12, %14, %15 -> %1, %16 -> %2, %17 -> %4, %18 -> %5\n}\n";

TEST(JoinCasts, WeightsAndGradientsAreCastTogether) {
  EXPECT_EQ(joined(on("@sim:0", kStep)),
            on("@sim:0",
               kHead +
                   "  %6: bf16[4, 8]@, %7: bf16[8, 8]@, %8: bf16[8]@ = to_each(%0, %1, %2) {dtype=bf16, "
                   "keep_layout=false}\n" +
                   kLayer +
                   "  %12: bf16[8]@ = sum(%9) {dims=[0], keepdim=false}\n"
                   "  %13: f32[8, 8]@, %14: f32[8]@ = to_each(%11, %12) {dtype=f32, keep_layout=false}\n"
                   "  %15: f32[8, 8]@, %16: f32[8]@, %17: i64[]@, %18: i64[]@ = update_sgd(%3, none, %1, %2, %11, %12, "
                   "%4, %5)" +
                   kRule + "  return %13, %14, %15 -> %1, %16 -> %2, %17 -> %4, %18 -> %5\n}\n"));
}

// What is read by pointwise rows alone is cast there, when they are fused; a cast that somebody reads stays where it
// is.
TEST(JoinCasts, CastsThatOthersReadStay) {
  const std::string text = on("@sim:0",
                              "graph(%0: f32[8]@, %1: f32[8]@) {\n"
                              "  %2: bf16[8]@ = to(%0) {dtype=bf16, keep_layout=true}\n"
                              "  %3: bf16[8]@ = to(%1) {dtype=bf16, keep_layout=true}\n"
                              "  %4: bf16[8]@ = mul(%2, %3)\n"
                              "  %5: f32[8]@ = to(%4) {dtype=f32, keep_layout=true}\n"
                              "  %6: f32[8]@ = exp(%5)\n"
                              "  %7: bf16[8]@ = neg(%4)\n"
                              "  %8: f32[8]@ = to(%7) {dtype=f32, keep_layout=true}\n"
                              "  return %5, %6, %8\n}\n");
  EXPECT_EQ(joined(text), text);
}

TEST(JoinCasts, TheCpuCastsEachByItself) { EXPECT_EQ(joined(on("", kStep)), on("", kStep)); }

}  // namespace
}  // namespace chorale::graph
