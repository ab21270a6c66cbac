// CHORALE_LIST_FIELDS(Type, a, b, …), inside a struct, makes functions that find these fields:
// - visit_fields(value, visit) calls visit(value.a), visit(value.b), …;
// - names_of_fields(&value) gives {"a", "b", …}.
// What such a list promises, each user of it says by a macro of its own: CHORALE_TENSORS lists the fields with tensors
// (nn/visit_tensors.h), CHORALE_MESSAGE all of them (rpc/codec.h).
#pragma once

#include <type_traits>
#include <vector>

#include "chorale/base/for_each.h"

#define CHORALE_LIST_FIELDS(Type, ...)                                                  \
  template <class Self, class Visit>                                                    \
  requires std::is_same_v<std::remove_const_t<Self>, Type>                              \
  friend void visit_fields([[maybe_unused]] Self& self, [[maybe_unused]] Visit visit) { \
    CHORALE_FOR_EACH(CHORALE_VISIT_FIELD, __VA_ARGS__)                                  \
  }                                                                                     \
  friend std::vector<const char*> names_of_fields(const Type*) {                        \
    return {CHORALE_FOR_EACH(CHORALE_NAME_FIELD, __VA_ARGS__)};                         \
  }
#define CHORALE_VISIT_FIELD(field) visit(self.field);
#define CHORALE_NAME_FIELD(field) #field,
