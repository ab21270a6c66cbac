// Where in memory parameters, buffers and modules are. A module can so find out which of those inside it its
// CHORALE_MODULE forgot: such a member would be neither trained nor saved, and nobody would say so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace chorale::nn::detail {

enum class PlaceKind : uint8_t { kParameter, kBuffer, kModule };
struct Place {
  const void* at;
  PlaceKind kind;
};

// The address as a number, since an object under construction must not be read through its pointer.
inline uintptr_t address(const void* at) { return reinterpret_cast<uintptr_t>(at); }

// Thread-safe. What lives is noted once, and forgotten by its destructor.
void note_place(uintptr_t at, PlaceKind kind) noexcept;
void forget_place(uintptr_t at) noexcept;
// The places in a stretch of memory, in the order of their addresses.
std::vector<Place> places_in(const void* begin, size_t bytes);

// Notes where a module lives. A base without members, so that a module is copied and moved as its members say.
class ModulePlace {
 protected:
  ModulePlace() noexcept { note_place(address(this), PlaceKind::kModule); }
  ModulePlace(const ModulePlace&) noexcept { note_place(address(this), PlaceKind::kModule); }
  ModulePlace(ModulePlace&&) noexcept { note_place(address(this), PlaceKind::kModule); }
  ModulePlace& operator=(const ModulePlace&) = default;
  ModulePlace& operator=(ModulePlace&&) = default;
  ~ModulePlace() { forget_place(address(this)); }
};

}  // namespace chorale::nn::detail
