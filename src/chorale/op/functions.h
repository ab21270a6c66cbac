// All functions of tensors.
#pragma once

#include "chorale/op/convolution.h"
#include "chorale/op/copy.h"
#include "chorale/op/creation.h"
#include "chorale/op/embedding.h"
#include "chorale/op/index.h"
#include "chorale/op/linalg.h"
#include "chorale/op/nn.h"
#include "chorale/op/order.h"
#include "chorale/op/pointwise.h"
#include "chorale/op/product.h"
#include "chorale/op/random.h"
#include "chorale/op/reduce.h"
#include "chorale/op/shape.h"
#include "chorale/op/sparse.h"
#include "chorale/op/view.h"
