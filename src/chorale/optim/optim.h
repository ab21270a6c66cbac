// Everything for turning gradients into better parameters.
#pragma once

#include "chorale/optim/adam.h"
#include "chorale/optim/optimizer.h"
#include "chorale/optim/sgd.h"
