// Which parameters a wrapper reduces, and whether all ranks have the same ones.
#pragma once

#include <string>
#include <vector>

#include "chorale/comm/group.h"
#include "chorale/nn/module.h"

namespace chorale::parallel {

// The index of each managed parameter's name, for debugging: `tensors` must be the managed ones of the module.
// InvalidArgument when there are more or fewer of them than the module has, or one is missing.
std::vector<std::string> parameter_names(const nn::Module& module, const std::vector<Tensor>& tensors,
                                         const std::vector<std::string>& ignore = {});
// Parameters that a wrapper of `module` would reduce.
NamedTensors managed_parameters(const nn::Module& module, const std::vector<std::string>& ignore = {});

// Every rank must have the same parameters: their number, and each one's shape, strides and dtype. StateError on all
// ranks otherwise, naming the rank and the parameter that differ from the first rank's.
void verify_parameters(const comm::Group& group, const NamedTensors& parameters);

}  // namespace chorale::parallel
