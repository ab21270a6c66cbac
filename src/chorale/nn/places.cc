#include "chorale/nn/places.h"

#include <map>
#include <mutex>

namespace chorale::nn::detail {
namespace {

struct Places {
  std::mutex mutex;
  std::map<uintptr_t, PlaceKind> known;
};
// Never destroyed: modules in static storage may outlive anything else in it.
Places& all_places() {
  static auto* places = new Places;
  return *places;
}

}  // namespace

void note_place(uintptr_t at, PlaceKind kind) noexcept {
  Places& places = all_places();
  const std::lock_guard lock(places.mutex);
  places.known.insert_or_assign(at, kind);
}

void forget_place(uintptr_t at) noexcept {
  Places& places = all_places();
  const std::lock_guard lock(places.mutex);
  places.known.erase(at);
}

std::vector<Place> places_in(const void* begin, size_t bytes) {
  Places& places = all_places();
  const std::lock_guard lock(places.mutex);
  std::vector<Place> found;
  for (auto at = places.known.lower_bound(address(begin));
       at != places.known.end() && at->first < address(begin) + bytes; ++at) {
    found.push_back({reinterpret_cast<const void*>(at->first), at->second});  // NOLINT(performance-no-int-to-ptr)
  }
  return found;
}

}  // namespace chorale::nn::detail
