// Everything of nn: modules, layers, initialisers.
#pragma once

#include "chorale/api/api.h"
#include "chorale/nn/activation.h"
#include "chorale/nn/attention.h"
#include "chorale/nn/container.h"
#include "chorale/nn/conv.h"
#include "chorale/nn/flex_attention.h"
#include "chorale/nn/fp8.h"
#include "chorale/nn/init.h"
#include "chorale/nn/linear.h"
#include "chorale/nn/loss.h"
#include "chorale/nn/module.h"
#include "chorale/nn/norm.h"
#include "chorale/nn/pool.h"
#include "chorale/nn/recurrent.h"
