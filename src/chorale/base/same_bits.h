// Results whose bits do not depend on the number of threads.
#pragma once

namespace chorale {

// Off by default: products of matrices and gradients of convolutions' weights are cut as suits the number of threads
// best, and then rounded differently. When it is on, they are cut by their shapes alone. CHORALE_SAME_BITS=1 turns it
// on from the start. It holds for the whole process, and must not be changed while ops run.
bool same_bits();
void set_same_bits(bool on);

}  // namespace chorale
