// Parcels that are not copied when they are sent.
//
// Note [Lent parcels]
// A large parcel is copied twice on one host: by its sender, which may have its memory back at once, and by its
// receiver. One whose tag has this bit is lent instead: its receiver reads it where it is, so its bytes must not be
// written before the receiver has them, which only an answer shows. The storage is kept until the receiver has given it
// back or is gone, however long that takes. A sender that cannot wait takes fresh pages (take_back()): the receiver
// still sees what was sent. Between hosts, among threads of one process, and where the memory cannot be shared, a lent
// parcel is like any other.
#pragma once

#include <cstdint>

#include "chorale/tensor/storage.h"

namespace chorale::comm {

inline constexpr uint64_t kLentTag = uint64_t{1} << 63;

// Afterwards the storage may be written, though receivers still read what was lent. No thread may write it meanwhile.
void take_back(const Storage& storage);

}  // namespace chorale::comm
