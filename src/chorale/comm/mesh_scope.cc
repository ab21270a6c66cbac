#include "chorale/comm/mesh_scope.h"

#include <utility>

#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

constinit thread_local const Mesh* innermost_mesh = nullptr;

}  // namespace

MeshScope::MeshScope(Mesh mesh) : mesh_(std::move(mesh)), outer_(std::exchange(innermost_mesh, &mesh_)) {}
MeshScope::~MeshScope() { innermost_mesh = outer_; }

const Mesh& MeshScope::current() {
  CHORALE_CHECK_STATE(innermost_mesh, "[mesh] no mesh was given, and there is none in scope: pass one, or make a ",
                      "MeshScope first");
  return *innermost_mesh;
}

}  // namespace chorale::comm
