// Parcels that are not copied when they are sent.
//
// Note [Lent parcels]
// A large parcel is copied twice on one host: by its sender, which may have its memory back at once, and by its
// receiver. One whose tag has this bit is lent instead: its receiver reads it where it is, through a mapping that
// cannot write, so its bytes must not be written before the receiver has them. The storage is kept until the receiver
// has given it back or is gone, however long that takes. A sender that wants to write waits for that (reclaim()), and
// takes fresh pages if it takes too long: the receiver still sees what was sent. Between hosts, among threads of one
// process, and where the memory cannot be shared, a lent parcel is like any other.
#pragma once

#include <cstdint>
#include <memory>

#include "chorale/base/deadline.h"
#include "chorale/tensor/storage.h"

namespace chorale::comm {

inline constexpr uint64_t kLentTag = uint64_t{1} << 63;

// Afterwards the storage may be written, though receivers still read what was lent. No thread may write it meanwhile.
void take_back(const Storage& storage);
// Waits until nobody reads the storage any more, or takes it back when the deadline has passed. True: nobody does.
bool reclaim(const Storage& storage, Deadline deadline);

// Inside comm: a storage that is lent, as long as this lives.
class Lent {
 public:
  Lent() = default;
  explicit Lent(base::Intrusive<Storage> storage);
  Lent(Lent&& other) noexcept = default;
  Lent& operator=(Lent&& other) noexcept;
  ~Lent() { end(); }
  // It is never given back.
  void leave() { storage_.release(); }

 private:
  void end();
  base::Intrusive<Storage> storage_;
  std::shared_ptr<int> readers_;  // of these pages
};

}  // namespace chorale::comm
