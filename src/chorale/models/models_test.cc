// The benchmark models have the sizes and names that the peers' programs have.
#include <gtest/gtest.h>

#include "chorale/api/api.h"
#include "chorale/models/cnn.h"
#include "chorale/models/encoder.h"
#include "chorale/models/mlp.h"

namespace chorale::models {
namespace {

std::vector<std::string> names_of(const nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& [name, value] : module.state_dict()) names.push_back(name);
  return names;
}

TEST(Mlp, HasTheBenchmarksParameters) {
  EXPECT_EQ(mlp({20, 32, 10}).parameter_count(), 1002);
  EXPECT_EQ(mlp({512, 512, 512, 512, 512, 10}).parameter_count(), 1055754);
  EXPECT_EQ(names_of(mlp({20, 32, 10})), (std::vector<std::string>{"0.weight", "0.bias", "2.weight", "2.bias"}));
  EXPECT_THROW(mlp({3}), InvalidArgument);
}

TEST(Cnn, HasTheBenchmarksParameters) {
  nn::Sequential cnn = fashion_cnn();
  EXPECT_EQ(cnn.parameter_count(), 421834);
  const auto names = names_of(cnn);
  EXPECT_EQ(names.front(), "0.weight");
  EXPECT_EQ(names[4], "1.running_mean");
  EXPECT_EQ(names.back(), "11.bias");
  EXPECT_EQ(cnn(zeros({2, 1, 28, 28})).sizes(), (Shape{2, 10}));
}

TEST(Encoder, HasTheBenchmarksParameters) {
  EXPECT_EQ(Encoder().parameter_count(), 7394816);
  Encoder small({.vocabulary = 11, .width = 8, .layers = 2, .heads = 2, .length = 5});
  EXPECT_EQ(names_of(small)[2], "blocks.0.ln1.weight");
  EXPECT_EQ(small(Tensor::from({1L, 2L, 3L, 4L}, {2, 2})).sizes(), (Shape{2, 2, 11}));
  EXPECT_THROW(small(zeros({1, 6}, DType::kI64)), InvalidArgument);
  EXPECT_THROW(Encoder({.width = 8, .heads = 3}), InvalidArgument);
}

}  // namespace
}  // namespace chorale::models
