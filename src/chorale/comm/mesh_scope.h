// A mesh for calls that are given none.
#pragma once

#include "chorale/comm/mesh.h"

namespace chorale::comm {

// While the scope lasts, calls on this thread that take a mesh and are given none take this one.
class MeshScope {
 public:
  explicit MeshScope(Mesh mesh);
  ~MeshScope();
  MeshScope(const MeshScope&) = delete;
  MeshScope& operator=(const MeshScope&) = delete;
  // The mesh of the innermost scope; StateError where there is none.
  static const Mesh& current();

 private:
  Mesh mesh_;
  const Mesh* outer_;
};

}  // namespace chorale::comm
