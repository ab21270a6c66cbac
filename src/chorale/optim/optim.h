// Everything for turning gradients into better parameters.
#pragma once

#include "chorale/optim/adadelta.h"
#include "chorale/optim/adagrad.h"
#include "chorale/optim/adam.h"
#include "chorale/optim/adamax.h"
#include "chorale/optim/asgd.h"
#include "chorale/optim/clip.h"
#include "chorale/optim/grad_scaler.h"
#include "chorale/optim/lamb.h"
#include "chorale/optim/nadam.h"
#include "chorale/optim/optimizer.h"
#include "chorale/optim/radam.h"
#include "chorale/optim/rmsprop.h"
#include "chorale/optim/rprop.h"
#include "chorale/optim/scheduler.h"
#include "chorale/optim/sgd.h"
