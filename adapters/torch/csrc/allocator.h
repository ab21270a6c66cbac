#pragma once

namespace chorale_torch {

// PyTorch's CPU allocator becomes ours: what is allocated from then on lies in memory that peers of the host can map.
void use_our_allocator();

}  // namespace chorale_torch
