// Longer deadlines for a while: of a rank that waits for one that compiles.
//
// Note [Extended timeouts] Ranks do not compile equally long: one finds the code in its cache, another has to make it.
// A rank that was quick adds the time that it has saved to the timeouts of the calls that its thread makes from then
// on, in any group, unless they name one of their own. Extensions add up; they end when a collective that has one is
// done: in a group of all ranks that compile, the slow one has come then. Messages take an extension and leave it to
// the next call, for they may be done before their receiver has come. Calls that were made before keep theirs.
#pragma once

#include <chrono>

namespace chorale::comm {

struct Operation;

// Lets this thread's calls take longer by so much.
void extend_timeouts(std::chrono::milliseconds by);
// How much more than its group's timeout the next call would have.
std::chrono::milliseconds timeout_extension();

// Inside comm: gives a new call the extension, if there is one.
void take_extension(Operation& operation);

}  // namespace chorale::comm
