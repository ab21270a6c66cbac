#include "chorale/graph/passes/join_rows.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "chorale/base/error.h"

namespace chorale::graph {
namespace {

std::string joined(const std::string& text) {
  Graph graph = parse(text);
  verify(graph);
  join_rows(graph);
  verify(graph);
  return print(graph);
}

// A sum and its norm, with casts, forward and backward; `more` is returned, too.
std::string residual(const std::string& device, const std::string& more) {
  std::string text =
      "graph(%0: f32[4, 8]@, %1: bf16[4, 8]@, %2: f32[8]@, %3: f32[8]@, %4: bf16[4, 8]@, %5: f32[4, 8]@) {\n"
      "  %6: f32[4, 8]@ = to(%1) {dtype=f32, keep_layout=true}\n"
      "  %7: f32[4, 8]@ = add(%0, %6)\n"
      "  %8: f32[4, 8]@, %9: f32[4, 1]@, %10: f32[4, 1]@ = layer_norm(%7, %2, %3) {normalized_shape=[8], eps=0.5}\n"
      "  %11: bf16[4, 8]@ = to(%8) {dtype=bf16, keep_layout=true}\n"
      "  %12: f32[4, 8]@ = to(%4) {dtype=f32, keep_layout=true}\n"
      "  %13: f32[4, 8]@, %14: f32[8]@, %15: f32[8]@ = layer_norm_backward(%12, %7, %9, %10, %2) "
      "{normalized_shape=[8], affine=true, eps=0.5}\n"
      "  %16: f32[4, 8]@ = add(%5, %13)\n"
      "  %17: bf16[4, 8]@ = to(%16) {dtype=bf16, keep_layout=true}\n"
      "  return %11, %16, %17, %14, %15" +
      more + "\n}\n";
  for (size_t at = text.find('@'); at != std::string::npos; at = text.find('@', at + device.size()))
    text.replace(at, 1, device);
  return text;
}

TEST(JoinRows, ASumAndItsNormAreReadAndWrittenOnce) {
  EXPECT_EQ(
      joined(residual("@sim:0", "")),
      R"(graph(%0: f32[4, 8]@sim:0, %1: bf16[4, 8]@sim:0, %2: f32[8]@sim:0, %3: f32[8]@sim:0, %4: bf16[4, 8]@sim:0, %5: f32[4, 8]@sim:0) {
  %6: f32[4, 8]@sim:0, %7: bf16[4, 8]@sim:0, %8: f32[4, 1]@sim:0, %9: f32[4, 1]@sim:0 = add_layer_norm(%0, %1, %2, %3) {normalized_shape=[8], eps=0.5}
  %10: f32[4, 8]@sim:0, %11: bf16[4, 8]@sim:0, %12: f32[8]@sim:0, %13: f32[8]@sim:0 = add_layer_norm_backward(%5, %4, %6, %8, %9, %2) {normalized_shape=[8], affine=true, eps=0.5}
  return %7, %10, %11, %12, %13
}
)");
  // Where somebody reads what lies between, it is still made.
  EXPECT_THAT(joined(residual("@sim:0", ", %8")), ::testing::HasSubstr("= add_layer_norm(%0, %6, %2, %3)"));
  EXPECT_THAT(joined(residual("@sim:0", ", %13")), ::testing::HasSubstr(" = add_layer_norm_backward(none, %4, "));
}

// A layer that takes rows casts them in another shape; a sum takes a narrow operand as it is.
TEST(JoinRows, ShapesMayChangeBetweenNormAndCast) {
  const std::string wide = "f32[2, 2, 8]@sim:0", rows = "f32[4, 8]@sim:0", narrow = "bf16[2, 2, 8]@sim:0",
                    narrow_rows = "bf16[4, 8]@sim:0", vector = "f32[8]@sim:0", lines = "f32[2, 2, 1]@sim:0";
  const std::string norm = " {normalized_shape=[8], eps=0.5}\n",
                    backward = " {normalized_shape=[8], affine=true, eps=0.5}\n";
  const std::string inputs =
      "graph(%0: " + wide + ", %1: " + narrow + ", %2: " + vector + ", %3: " + narrow_rows + ", %4: " + wide + ") {\n";
  EXPECT_EQ(joined(inputs + "  %5: " + wide + " = add(%0, %1)\n  %6: " + wide + ", %7: " + lines + ", %8: " + lines +
                   " = layer_norm(%5, %2, none)" + norm + "  %9: " + rows + " = view(%6) {sizes=[4, 8]}\n  %10: " +
                   narrow_rows + " = to(%9) {dtype=bf16, keep_layout=true}\n  %11: " + rows +
                   " = to(%3) {dtype=f32, keep_layout=true}\n  %12: " + wide +
                   " = view(%11) {sizes=[2, 2, 8]}\n  %13: " + wide + ", %14: " + vector + ", %15: " + vector +
                   " = layer_norm_backward(%12, %5, %7, %8, %2)" + backward + "  %16: " + wide +
                   " = add(%4, %13)\n  %17: " + narrow +
                   " = to(%16) {dtype=bf16, keep_layout=true}\n  return %10, %16, %17, %14\n}\n"),
            inputs + "  %5: " + wide + ", %6: " + narrow + ", %7: " + lines + ", %8: " + lines +
                " = add_layer_norm(%0, %1, %2, none)" + norm + "  %9: " + narrow_rows +
                " = view(%6) {sizes=[4, 8]}\n  %10: " + narrow + " = view(%3) {sizes=[2, 2, 8]}\n  %11: " + wide +
                ", %12: " + narrow + ", %13: " + vector + ", %14: " + vector +
                " = add_layer_norm_backward(%4, %10, %5, %7, %8, %2)" + backward + "  return %9, %11, %12, %13\n}\n");
}

TEST(JoinRows, TheCpuKeepsThemApart) { EXPECT_EQ(joined(residual("", "")), residual("", "")); }

std::string attention(const std::string& last, const std::string& more) {
  const std::string x = "f32[2, 3, 4, 5]:[60, 5, 15, 1]@sim:0", lse = "f32[2, 3, 4]@sim:0",
                    turned = "f32[2, 4, 1, 3, 5]:[60, 15, 120, 5, 1]@sim:0",
                    one = "f32[1, 2, 3, 4, 5]:[120, 60, 5, 15, 1]@sim:0";
  std::string text =
      "graph(%0: " + x + ", %1: " + x + ", %2: " + x + ", %3: " + x + ", %4: " + lse + ", %5: " + x + ") {\n";
  text += "  %6: " + x + ", %7: " + x + ", %8: " + x +
          " = attention_backward(%5, none, %0, %1, %2, none, %3, %4, none) "
          "{scale=1.0, causal=true, grouped=false, dropout_p=0.0}\n";
  for (int i = 0; i < 3; ++i) {
    const std::string from = std::to_string(6 + i), to = std::to_string(9 + 2 * i), end = std::to_string(10 + 2 * i);
    text += concat("  %", to, ": ", one, " = view(%", from, ") {sizes=[1, 2, 3, 4, 5]}\n");
    text += concat("  %", end, ": ", turned, " = permute(%", to, ") {dims=[1, 3, 0, 2, 4]}\n");
  }
  return text + "  %15: f32[2, 4, 3, 3, 5]@sim:0 = cat(%10, %12, " + last + ") {dim=2}\n  return %15" + more + "\n}\n";
}

TEST(JoinRows, GradientsOfAttentionAreWrittenSideBySide) {
  EXPECT_THAT(
      joined(attention("%14", "")),
      ::testing::HasSubstr("%6: f32[2, 4, 3, 3, 5]@sim:0 = attention_backward_joined(%5, none, %0, %1, %2, none, "
                           "%3, %4, none) {scale=1"));
  EXPECT_THAT(joined(attention("%14", "")), ::testing::Not(::testing::HasSubstr("cat")));
  // Where they are in another order, or somebody else reads them, they are put together as before.
  EXPECT_THAT(joined(attention("%10", "")), ::testing::HasSubstr("cat"));
  EXPECT_THAT(joined(attention("%14", ", %7")), ::testing::HasSubstr("cat"));
}

// A loss and its gradient by %2.
std::string loss(const std::string& seed, const std::string& classes) {
  const std::string x = "bf16[8, 16]@sim:0", attrs = " {ignore_index=-100, label_smoothing=0.0, reduction=1}\n";
  return "graph(%0: " + x + ", %1: i64[8]@sim:0, %2: f32[]@sim:0) {\n  %3: f32[]@sim:0, %4: f64[8]@sim:0 = " +
         "cross_entropy(%0, %1, none)" + attrs + "  %5: f32[]@sim:0 = " + seed + "\n  %6: " + x +
         " = cross_entropy_backward(%5, %0, " + classes + ", none, %4)" + attrs + "  return %3, %6\n}\n";
}

TEST(JoinRows, RowsOfLogitsAreReadOnceForTheLossAndItsGradient) {
  const std::string x = "bf16[8, 16]@sim:0", attrs = " {ignore_index=-100, label_smoothing=0.0, reduction=1}\n";
  EXPECT_EQ(joined(loss("full_like(%3) {value=1}", "%1")),
            "graph(%0: " + x + ", %1: i64[8]@sim:0, %2: f32[]@sim:0) {\n  %3: f32[]@sim:0, %4: f64[8]@sim:0, %5: " + x +
                " = cross_entropy_with_slopes(none, %0, %1, none)" + attrs + "  return %3, %5\n}\n");
  // Where the gradient's own gradient comes of the loss, the loss is there first.
  EXPECT_THAT(joined(loss("full_like(%3) {value=2}", "%1")), ::testing::HasSubstr("= cross_entropy_backward("));
  EXPECT_THAT(joined(loss("mul(%3, %2)", "%1")), ::testing::HasSubstr("= cross_entropy_backward("));
}

TEST(JoinRows, TheGradientOfABiasBehindGeluIsSummedWhereItsOperandIsMade) {
  const std::string x = "bf16[2, 3, 8]@sim:0", rows = "bf16[6, 8]@sim:0";
  const auto text = [&](const std::string& attrs) {
    const std::string sums = attrs.ends_with("true") ? "bf16[1, 8]@sim:0" : "bf16[8]@sim:0";
    return "graph(%0: " + x + ", %1: " + x + ") {\n  %2: " + x + " = gelu_tanh_backward(%0, %1)\n  %3: " + rows +
           " = view(%2) {sizes=[6, 8]}\n  %4: " + sums + " = sum(%3) {dims=" + attrs + "}\n  return %3, %4\n}\n";
  };
  EXPECT_EQ(joined(text("[0], keepdim=true")),
            "graph(%0: " + x + ", %1: " + x + ") {\n  %2: " + x +
                ", %3: bf16[8]@sim:0 = gelu_tanh_backward_summed(%0, %1)\n  %4: " + rows +
                " = view(%2) {sizes=[6, 8]}\n  %5: bf16[1, 8]@sim:0 = view(%3) {sizes=[1, 8]}\n  return %4, %5\n}\n");
  EXPECT_EQ(joined(text("[0], keepdim=false")), "graph(%0: " + x + ", %1: " + x + ") {\n  %2: " + x +
                                                    ", %3: bf16[8]@sim:0 = gelu_tanh_backward_summed(%0, %1)\n  %4: " +
                                                    rows + " = view(%2) {sizes=[6, 8]}\n  return %4, %3\n}\n");
}

// Two norms with ReLUs, the second one with a sum before it, and their gradients; `more` is returned, too.
std::string norms(const std::string& layout, const std::string& more) {
  const std::string x = "bf16[2, 8, 3, 3]" + layout + "@sim:0", c = "f32[8]@sim:0", eps = " {eps=0.5}\n";
  std::string text =
      "graph(%0: " + x + ", %1: " + c + ", %2: " + c + ", %3: " + x + ", %4: " + x + ", %5: " + x + ") {\n";
  const auto norm = [&](int y, const std::string& in) {
    text +=
        concat("  %", y, ": ", x, ", %", y + 1, ": ", c, ", %", y + 2, ": ", c, " = batch_norm(", in, ", %1, %2)", eps);
  };
  const auto row = [&](int y, const std::string& call) { text += concat("  %", y, ": ", x, " = ", call, "\n"); };
  norm(6, "%0");
  row(9, "relu(%6)");
  norm(10, "%9");
  row(13, "add(%10, %3)");
  row(14, "relu(%13)");
  row(15, "add(%4, %5)");
  row(16, "relu_backward(%15, %14)");
  text += concat("  %17: ", x, ", %18: ", c, ", %19: ", c, " = batch_norm_backward(%16, %9, %11, %12, %1)", eps);
  row(20, "relu_backward(%17, %9)");
  text += concat("  %21: ", x, ", %22: ", c, ", %23: ", c, " = batch_norm_backward(%20, %0, %7, %8, %1)", eps);
  return text + "  return %14, %16, %21, %22, %23, %18, %19, %7, %8" + more + "\n}\n";
}

TEST(JoinRows, ANormIsWrittenWithItsReluAndSum) {
  const std::string last = ":[72, 1, 24, 8]", x = "bf16[2, 8, 3, 3]" + last + "@sim:0", c = "f32[8]@sim:0",
                    eps = " {eps=0.5}\n";
  EXPECT_EQ(joined(norms(last, "")),
            "graph(%0: " + x + ", %1: " + c + ", %2: " + c + ", %3: " + x + ", %4: " + x + ", %5: " + x +
                ") {\n  %6: " + x + ", %7: " + c + ", %8: " + c + " = batch_norm_relu(%0, none, %1, %2)" + eps +
                "  %9: " + x + ", %10: " + c + ", %11: " + c + " = batch_norm_relu(%6, %3, %1, %2)" + eps +
                "  %12: " + x + ", %13: " + x + ", %14: " + c + ", %15: " + c +
                " = relu_batch_norm_backward(%4, %5, %9, %6, %10, %11, %1)" + eps + "  %16: " + x + ", %17: " + c +
                ", %18: " + c + " = batch_norm_relu_backward(%13, %0, %7, %8, %1, %2)" + eps +
                "  return %9, %12, %16, %17, %18, %14, %15, %7, %8\n}\n");
  // What somebody else reads is still made.
  EXPECT_THAT(joined(norms(last, ", %6")), ::testing::HasSubstr("= batch_norm(%0, %1, %2)"));
  EXPECT_THAT(joined(norms(last, ", %13")), ::testing::HasSubstr("= batch_norm(%6, %1, %2)"));
  EXPECT_THAT(joined(norms(last, ", %15")), ::testing::HasSubstr("relu_batch_norm_backward(%12, none, "));
  EXPECT_THAT(joined(norms(last, ", %20")), ::testing::HasSubstr("relu_batch_norm_backward(%13, none, %6, %0, "));
  // Kernels read whole columns of channels.
  EXPECT_EQ(joined(norms("", "")), norms("", ""));
}

}  // namespace
}  // namespace chorale::graph
