#include "chorale/data/fashion_mnist.h"

#include <algorithm>

#include "chorale/io/idx.h"
#include "chorale/op/copy.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/view.h"

namespace chorale::data {
namespace {

// Mean and standard deviation of the training pictures, in units of a pixel's 0 … 255.
constexpr double kMean = 72.9404, kDeviation = 90.0212;

}  // namespace

FashionMnist::FashionMnist(Split split, const std::filesystem::path& folder) {
  const std::string stem = split == Split::kTrain ? "train" : "t10k";
  std::error_code ignored;
  CHORALE_CHECK(std::filesystem::is_directory(folder, ignored), "[FashionMnist] there is no folder ", folder,
                "; install the Debian package dataset-fashion-mnist, or name the folder that has the files");
  const Tensor images = io::load_idx(folder / (stem + "-images-idx3-ubyte.gz"));
  labels_ = io::load_idx(folder / (stem + "-labels-idx1-ubyte.gz"));
  CHORALE_CHECK(images.dtype() == DType::kU8 && images.dims() == 3 && images.size(1) == 28 && images.size(2) == 28,
                "[FashionMnist] expected pictures u8 [n, 28, 28] in ", folder, ", found ", images.dtype(), " ",
                images.sizes());
  CHORALE_CHECK(labels_.dtype() == DType::kU8 && labels_.dims() == 1 && labels_.size(0) == images.size(0),
                "[FashionMnist] expected ", images.size(0), " labels of u8 in ", folder, ", found ", labels_.dtype(),
                " ", labels_.sizes());
  const auto labels = labels_.span<uint8_t>();
  const auto wrong = std::find_if(labels.begin(), labels.end(), [](uint8_t label) { return label >= kClasses.size(); });
  CHORALE_CHECK(wrong == labels.end(), "[FashionMnist] label ", wrong - labels.begin(), " in ", folder, " is ",
                static_cast<int>(*wrong), "; there are ten classes");
  images_ = images.view_as({images.size(0), 1, 28, 28}, {28 * 28, 28 * 28, 28, 1}, 0);
}

Example FashionMnist::get(int64_t index) const {
  const Example batch = get_batch({&index, 1});
  return {select(batch.x, 0, 0), select(batch.y, 0, 0)};
}

Example FashionMnist::get_batch(std::span<const int64_t> indices) const {
  Tensor x = to(rows_at(images_, indices), DType::kF32);
  sub_(x, kMean);
  mul_(x, 1 / kDeviation);
  return {x, to(rows_at(labels_, indices), DType::kI64)};
}

}  // namespace chorale::data
