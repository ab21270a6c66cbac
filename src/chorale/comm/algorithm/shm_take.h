// What the two ways of reading on one host share (shm_slot.cc, shm_read.cc): each rank has entered with the place of
// what it gives (Note [Give and take]), and takes what it needs from the others' places.
#pragma once

#include "chorale/comm/shm/shm_call.h"

namespace chorale::comm {

// Sizes are checked before anything is written: a misfit is an error, not half a result.
void take_what_others_give(ShmCall& call);

// A tensor that peers read in place must not change before they have acted. Until then the result waits in this rank's
// own slot, whose payload nobody reads then; with checksums, which allow any size, in scratch memory.
bool result_waits(const ShmCall& call);
void fetch_result(const ShmCall& call);

}  // namespace chorale::comm
