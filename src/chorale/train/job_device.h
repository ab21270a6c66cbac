// Which device a rank of a training job uses.
#pragma once

#include "chorale/device/device.h"
#include "chorale/train/options.h"

namespace chorale::train {

// How many GPUs the job takes on this node, one for each rank: those that are there, or none where --device says
// otherwise or nothing here drives them.
int64_t gpus_of(const TrainOptions& options);

// Throws InvalidArgument for a name that is none and for a device that the other options do not allow, StateError for
// one that is not there.
Device device_of(const TrainOptions& options, int rank);

}  // namespace chorale::train
