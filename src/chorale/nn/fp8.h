// Linear layers whose products are of 8 bits (op/fp8.h): faster on GPUs from Ada on, and emulated elsewhere.
// Weights stay as they are, and are cast in each step. It goes with Autocast(DType::kBF16), which is what the layers'
// inputs, results and gradients are in.
#pragma once

#include <string>
#include <vector>

#include "chorale/graph/host_value.h"

namespace chorale::nn {

class Module;

// A layer that can do so derives from this, too.
class TakesFp8 {
 public:
  bool fp8() const { return fp8_.read("whether a layer multiplies in 8 bits") != 0; }
  void set_fp8(bool on) { fp8_.set(on ? 1 : 0); }

 protected:
  TakesFp8() = default;
  TakesFp8(const TakesFp8&) = default;
  TakesFp8(TakesFp8&&) = default;
  TakesFp8& operator=(const TakesFp8&) = default;
  TakesFp8& operator=(TakesFp8&&) = default;
  ~TakesFp8() = default;

 private:
  graph::HostValue fp8_{0};
};

// Switches it on in all layers that can, but for those that are named and those whose weight another module before them
// has (the head of GPT-2, which is its table of tokens). Heads should stay as they are: their results are what a loss
// is made of. Returns the names of the layers.
std::vector<std::string> use_fp8(Module& model, const std::vector<std::string>& except = {});

}  // namespace chorale::nn
