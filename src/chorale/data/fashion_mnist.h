// Fashion-MNIST: 28 x 28 grey pictures of ten kinds of clothes, 60,000 to train on and 10,000 to test with.
#pragma once

#include <array>
#include <filesystem>

#include "chorale/data/dataset.h"

namespace chorale::data {

class FashionMnist {
 public:
  enum class Split { kTrain, kTest };
  // Where Debian's package dataset-fashion-mnist puts it.
  static constexpr const char* kFolder = "/usr/share/datasets/fashion-mnist";
  static constexpr std::array<const char*, 10> kClasses = {"T-shirt", "trouser", "pullover", "dress", "coat",
                                                           "sandal",  "shirt",   "sneaker",  "bag",   "ankle boot"};

  // Throws InvalidArgument when the files are missing (saying what to install) or damaged.
  explicit FashionMnist(Split split, const std::filesystem::path& folder = kFolder);

  int64_t size() const { return images_.size(0); }
  // x: f32 [1, 28, 28], scaled to mean 0 and deviation 1 over the training pictures; y: i64, the class.
  Example get(int64_t index) const;
  Example get_batch(std::span<const int64_t> indices) const;

  // What the files hold: u8 [n, 1, 28, 28] and u8 [n].
  const Tensor& images() const { return images_; }
  const Tensor& labels() const { return labels_; }

 private:
  Tensor images_, labels_;  // in 8 bits, a quarter of the memory: converting a batch costs microseconds
};

}  // namespace chorale::data
