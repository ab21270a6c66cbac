#include "chorale/data/fashion_mnist.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::data {
namespace {

using namespace std::string_literals;

bool installed() { return std::filesystem::is_directory(FashionMnist::kFolder); }

TEST(FashionMnist, IsTheKnownDataSet) {
  if (!installed()) GTEST_SKIP() << "dataset-fashion-mnist is not installed";
  const FashionMnist test(FashionMnist::Split::kTest);
  EXPECT_EQ(test.size(), 10000);
  const auto labels = test.labels().span<uint8_t>().first(10);
  EXPECT_EQ(std::vector<int>(labels.begin(), labels.end()), (std::vector<int>{9, 2, 1, 1, 6, 1, 4, 6, 5, 7}));
  int64_t sum = 0;
  for (const uint8_t pixel : test.images().span<uint8_t>()) sum += pixel;
  EXPECT_EQ(sum, 573469082);  // as gzip and NumPy read it
}

TEST(FashionMnist, BatchesAreScaled) {
  if (!installed()) GTEST_SKIP() << "dataset-fashion-mnist is not installed";
  const FashionMnist test(FashionMnist::Split::kTest);
  const std::vector<int64_t> indices = {17, 3};
  const Example batch = test.get_batch(indices);
  EXPECT_EQ(batch.x.sizes(), (Shape{2, 1, 28, 28}));
  EXPECT_EQ(batch.y.to_vector<int>(), (std::vector<int>{test.labels().span<uint8_t>()[17], 1}));
  const auto pixels = test.images().span<uint8_t>().subspan(size_t{17} * 784, 784);
  const std::vector<float> x = batch.x.to_vector<float>();
  for (size_t i = 0; i < 784; ++i) EXPECT_NEAR(x[i], (pixels[i] - 72.94035) / 90.02118, 1e-5);
  EXPECT_EQ(test.get(3).x.to_vector<float>(), std::vector<float>(x.begin() + 784, x.end()));
}

TEST(FashionMnist, SaysWhatIsMissingOrWrong) {
  const TemporaryFolder folder;
  const auto error_of = [](const std::filesystem::path& path) -> std::string {
    return message_of([&] { const FashionMnist dataset(FashionMnist::Split::kTest, path); });
  };
  EXPECT_THAT(error_of(folder / "none"), testing::HasSubstr("install the Debian package dataset-fashion-mnist"));
  EXPECT_THAT(error_of(folder.path()), testing::HasSubstr("No such file"));
  const std::string picture = "\0\0\x08\x03\0\0\0\x01\0\0\0\x1c\0\0\0\x1c"s + std::string(784, 'x');
  folder.write("t10k-images-idx3-ubyte.gz", picture);
  folder.write("t10k-labels-idx1-ubyte.gz", "\0\0\x08\x01\0\0\0\x01\x09"s);
  EXPECT_EQ(error_of(folder.path()), "");
  folder.write("t10k-labels-idx1-ubyte.gz", "\0\0\x08\x01\0\0\0\x01\x0a"s);
  EXPECT_THAT(error_of(folder.path()), testing::HasSubstr("label 0"));
  folder.write("t10k-labels-idx1-ubyte.gz", "\0\0\x08\x01\0\0\0\x02\x01\x01"s);
  EXPECT_THAT(error_of(folder.path()), testing::HasSubstr("expected 1 labels of u8"));
  folder.write("t10k-images-idx3-ubyte.gz", "\0\0\x08\x01\0\0\0\x01x"s);
  EXPECT_THAT(error_of(folder.path()), testing::HasSubstr("expected pictures u8 [n, 28, 28]"));
}

}  // namespace
}  // namespace chorale::data
