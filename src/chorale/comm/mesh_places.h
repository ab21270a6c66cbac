// Where ranks stand in a mesh, for messages.
#pragma once

#include <string>

#include "chorale/base/comm_error.h"
#include "chorale/comm/mesh.h"

namespace chorale::comm {

// "rank 3 at dp 1, tp 1" of the mesh that this one is a slice of; without names "rank 3 at 1, 1".
std::string place_of(const Mesh& mesh, int rank);

// Throws the error again, with the places of the rank that reports it and of the culprit.
[[noreturn]] void throw_with_places(const CommError& error, const Mesh& mesh);

// What f returns; its errors say where ranks stand in the mesh.
template <class F>
auto with_places(const Mesh& mesh, const F& f) {
  try {
    return f();
  } catch (const CommError& error) {
    throw_with_places(error, mesh);
  }
}

}  // namespace chorale::comm
