// Results whose bits do not depend on the number of threads.
#pragma once

namespace chorale {

// Off by default: products of matrices and gradients of convolutions' weights are cut as suits the number of threads
// best, and then rounded differently. On, they are cut by their shapes alone. CHORALE_SAME_BITS=1 turns it on from the
// start. For the whole process; not to be changed while ops run.
bool same_bits();
void set_same_bits(bool on);

}  // namespace chorale
