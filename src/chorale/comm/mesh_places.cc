#include "chorale/comm/mesh_places.h"

#include <algorithm>

namespace chorale::comm {

std::string place_of(const Mesh& mesh, int rank) {
  const Mesh whole = mesh.root();
  const auto found = std::find(whole.ranks().begin(), whole.ranks().end(), rank);
  if (found == whole.ranks().end()) return concat("rank ", rank, " outside of it");
  auto at = static_cast<int>(found - whole.ranks().begin());
  std::string text;
  for (size_t d = whole.dims(); d-- > 0; at /= whole.shape()[d]) {
    text = concat(whole.names().empty() ? "" : whole.names()[d] + " ", at % whole.shape()[d], text.empty() ? "" : ", ",
                  text);
  }
  return concat("rank ", rank, " at ", text);
}

void throw_with_places(const CommError& error, const Mesh& mesh) {
  const CommFailure& failure = error.failure();
  std::string text = concat(error.what(), "; in the ", mesh.root(), " this is ", place_of(mesh, failure.rank));
  if (failure.peer >= 0)
    text += failure.peer == failure.rank ? ", which is the culprit"
                                         : concat(", and the culprit ", place_of(mesh, failure.peer));
  throw CommError(text, failure);
}

}  // namespace chorale::comm
