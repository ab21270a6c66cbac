// Standard input, output and error may be closed when a process starts. The system would then give their numbers to the
// next things that are opened, and what the program prints would end up in shared memory or in a connection.
#pragma once

#include <vector>

namespace chorale {

// The same descriptor under a number above 2, closed on exec; others (and -1) as they are. Every descriptor that the
// library keeps goes through it.
int above_standard(int descriptor);

// Our programs call it first: whatever of 0, 1 and 2 is closed becomes /dev/null.
void open_standard_descriptors();

// While it lives, nothing is opened at 0, 1 or 2: for a part of somebody else's that cannot be told. What was closed is
// closed again afterwards.
class StandardDescriptorsHeld {
 public:
  StandardDescriptorsHeld();
  ~StandardDescriptorsHeld();
  StandardDescriptorsHeld(const StandardDescriptorsHeld&) = delete;
  StandardDescriptorsHeld& operator=(const StandardDescriptorsHeld&) = delete;

 private:
  std::vector<int> held_;
};

}  // namespace chorale
