#include "chorale/comm/lent_parcels.h"

#include "chorale/device/pages.h"
#include "chorale/device/shared_pages.h"

namespace chorale::comm {

void take_back(const Storage& storage) {
  auto* pages = dynamic_cast<SharedPages*>(&cpu_allocator().source());
  // Memory without pages of its own is never lent.
  if (pages && storage.bytes() > 0 && owns_pages(storage.data(), storage.bytes()))
    pages->renew(storage.data(), storage.bytes());
}

}  // namespace chorale::comm
