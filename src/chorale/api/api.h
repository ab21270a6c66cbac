// What users call: tensors, functions of them, automatic differentiation.
#pragma once

#include "chorale/autograd/autograd.h"
#include "chorale/op/functions.h"
#include "chorale/tensor/tensor.h"
