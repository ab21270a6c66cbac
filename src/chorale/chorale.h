// All of Chorale:
//
//   #include "chorale/chorale.h"
//   using namespace chorale;
//
// What this header reaches is what `cmake --install` installs; everything else is the library's own affair. A program
// that wants to compile faster includes the parts it uses.
#pragma once

#include "chorale/api/api.h"
#include "chorale/base/comm_error.h"
#include "chorale/base/debug_level.h"
#include "chorale/base/error.h"
#include "chorale/comm/group.h"
#include "chorale/comm/mesh.h"
#include "chorale/comm/objects.h"
#include "chorale/comm/world.h"
#include "chorale/data/fashion_mnist.h"
#include "chorale/data/loader.h"
#include "chorale/data/stream.h"
#include "chorale/data/token_windows.h"
#include "chorale/io/idx.h"
#include "chorale/io/npy.h"
#include "chorale/io/sharded.h"
#include "chorale/io/tokens.h"
#include "chorale/models/checkpoint.h"
#include "chorale/models/cnn.h"
#include "chorale/models/mlp.h"
#include "chorale/models/resnet.h"
#include "chorale/nn/nn.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/averaging.h"
#include "chorale/parallel/comm_hooks.h"
#include "chorale/parallel/ddp.h"
#include "chorale/parallel/distributed_sampler.h"
#include "chorale/parallel/power_sgd.h"
#include "chorale/parallel/sync_batch_norm.h"
#include "chorale/reducer/join.h"
#include "chorale/tensor/dlpack.h"
#include "chorale/text/bpe.h"
#include "chorale/text/bytes.h"
#include "chorale/text/wordpiece.h"
#include "chorale/trace/trace.h"
#include "chorale/trace/trace_summary.h"
