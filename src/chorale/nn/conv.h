// Convolutions over [N, C, …] or, without a batch, [C, …].
#pragma once

#include <concepts>

#include "chorale/nn/module.h"
#include "chorale/op/shape.h"

namespace chorale::nn {

// Lists have one entry, or one per dimension. Conv2d(1, 8, 3) has a kernel of 3 and the usual options.
struct ConvOptions {
  IntList kernel{};
  IntList stride = 1;
  IntList padding = 0;
  IntList dilation = 1;
  int64_t groups = 1;
  bool bias = true;
  PadMode padding_mode = PadMode::kConstant;  // what is around the image: zeros, or the image continued
};

// What the convolutions share; use Conv1d, Conv2d, Conv3d.
class Conv : public Module {
 public:
  Tensor forward(const Tensor& x) const;
  std::string describe() const override;

  Parameter weight;  // [out, in / groups, kernel…], uniform in +-1 / sqrt(in / groups * window)
  Parameter bias;    // [out], likewise
  CHORALE_MODULE(Conv, weight, bias)

 protected:
  Conv(int64_t dims, int64_t in_channels, int64_t out_channels, const ConvOptions& options);

 private:
  ConvOptions options_;
};
struct Conv1d : Conv {
  template <std::integral Kernel>
  Conv1d(int64_t in_channels, int64_t out_channels, Kernel kernel)
      : Conv(1, in_channels, out_channels, {.kernel = static_cast<int64_t>(kernel)}) {}
  Conv1d(int64_t in_channels, int64_t out_channels, const ConvOptions& options)
      : Conv(1, in_channels, out_channels, options) {}
  const char* type_name() const override { return "Conv1d"; }
};
struct Conv2d : Conv {
  template <std::integral Kernel>
  Conv2d(int64_t in_channels, int64_t out_channels, Kernel kernel)
      : Conv(2, in_channels, out_channels, {.kernel = static_cast<int64_t>(kernel)}) {}
  Conv2d(int64_t in_channels, int64_t out_channels, const ConvOptions& options)
      : Conv(2, in_channels, out_channels, options) {}
  const char* type_name() const override { return "Conv2d"; }
};
struct Conv3d : Conv {
  template <std::integral Kernel>
  Conv3d(int64_t in_channels, int64_t out_channels, Kernel kernel)
      : Conv(3, in_channels, out_channels, {.kernel = static_cast<int64_t>(kernel)}) {}
  Conv3d(int64_t in_channels, int64_t out_channels, const ConvOptions& options)
      : Conv(3, in_channels, out_channels, options) {}
  const char* type_name() const override { return "Conv3d"; }
};

struct ConvTransposeOptions {
  IntList kernel{};
  IntList stride = 1;
  IntList padding = 0;
  IntList output_padding = 0;  // makes the result larger at one end
  IntList dilation = 1;
  int64_t groups = 1;
  bool bias = true;
};

class ConvTranspose : public Module {
 public:
  Tensor forward(const Tensor& x) const;
  std::string describe() const override;

  Parameter weight;  // [in, out / groups, kernel…], uniform in +-1 / sqrt(out / groups * window)
  Parameter bias;    // [out], likewise
  CHORALE_MODULE(ConvTranspose, weight, bias)

 protected:
  ConvTranspose(int64_t dims, int64_t in_channels, int64_t out_channels, const ConvTransposeOptions& options);

 private:
  ConvTransposeOptions options_;
};
struct ConvTranspose1d : ConvTranspose {
  template <std::integral Kernel>
  ConvTranspose1d(int64_t in_channels, int64_t out_channels, Kernel kernel)
      : ConvTranspose(1, in_channels, out_channels, {.kernel = static_cast<int64_t>(kernel)}) {}
  ConvTranspose1d(int64_t in_channels, int64_t out_channels, const ConvTransposeOptions& options)
      : ConvTranspose(1, in_channels, out_channels, options) {}
  const char* type_name() const override { return "ConvTranspose1d"; }
};
struct ConvTranspose2d : ConvTranspose {
  template <std::integral Kernel>
  ConvTranspose2d(int64_t in_channels, int64_t out_channels, Kernel kernel)
      : ConvTranspose(2, in_channels, out_channels, {.kernel = static_cast<int64_t>(kernel)}) {}
  ConvTranspose2d(int64_t in_channels, int64_t out_channels, const ConvTransposeOptions& options)
      : ConvTranspose(2, in_channels, out_channels, options) {}
  const char* type_name() const override { return "ConvTranspose2d"; }
};
struct ConvTranspose3d : ConvTranspose {
  template <std::integral Kernel>
  ConvTranspose3d(int64_t in_channels, int64_t out_channels, Kernel kernel)
      : ConvTranspose(3, in_channels, out_channels, {.kernel = static_cast<int64_t>(kernel)}) {}
  ConvTranspose3d(int64_t in_channels, int64_t out_channels, const ConvTransposeOptions& options)
      : ConvTranspose(3, in_channels, out_channels, options) {}
  const char* type_name() const override { return "ConvTranspose3d"; }
};

}  // namespace chorale::nn
