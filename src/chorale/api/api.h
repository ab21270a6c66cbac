// What users call: tensors, functions of them, automatic differentiation, mixed precision.
#pragma once

#include "chorale/autocast/autocast.h"
#include "chorale/autograd/autograd.h"
#include "chorale/op/functions.h"
#include "chorale/tensor/tensor.h"
