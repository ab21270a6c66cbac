// Ranks arranged as a grid: replicas by shards, hosts by ranks of a host.
//
//   const Mesh mesh(world, {2, 4}, {"dp", "tp"});
//   mesh["tp"].group(0)  // the four ranks that share this rank's place along dp
#pragma once

#include <iosfwd>
#include <memory>
#include <string>
#include <vector>

#include "chorale/comm/group.h"
#include "chorale/device/device.h"

namespace chorale::comm {

// A cheap handle: copies and slices share their groups.
class Mesh {
 public:
  // The ranks of `group` in row-major order; every member calls it. The product of `shape` must be the group's size.
  // Names of dimensions may be left out.
  Mesh(const Group& group, std::vector<int> shape, std::vector<std::string> names = {});
  // The same over some ranks of `group` only (global, ascending); every member of `group` calls it. The other ranks
  // are outside: they have no place in it, and its groups do nothing there.
  Mesh(const Group& group, std::vector<int> shape, std::vector<std::string> names, std::vector<int> ranks);

  const std::vector<int>& shape() const;
  const std::vector<std::string>& names() const;
  size_t dims() const { return shape().size(); }  // the number of dimensions
  int size() const { return static_cast<int>(ranks().size()); }
  [[deprecated("call dims(): a rank is a process")]] size_t rank() const { return dims(); }
  // Global ranks, in row-major order: those of a slice share this rank's place along the dimensions that it lacks.
  const std::vector<int>& ranks() const;
  bool is_member() const { return !coordinates().empty(); }
  // Where this rank is, along each dimension; nowhere on a rank outside. The second form throws there.
  const std::vector<int>& coordinates() const;
  int coordinate(size_t dimension) const;
  int coordinate(const std::string& name) const { return coordinate(dimension(name)); }
  // The dimension of that name; InvalidArgument if there is none.
  size_t dimension(const std::string& name) const;
  // The ranks that differ from this one along that dimension only.
  const Group& group(size_t dimension) const { return *shared_group(dimension); }
  const Group& group(const std::string& name) const { return group(dimension(name)); }
  const std::shared_ptr<const Group>& shared_group(size_t dimension) const;

  // Whether some ranks that differ along that dimension only are on different hosts: the same answer on all members.
  bool spans_hosts(size_t dimension) const;

  // The same ranks and groups for another kind of device, "cuda" or "sim": tensors that are made over it (zeros(),
  // normal(), …) lie there. Which device of the kind follows from the rank, so a name with a number is refused.
  Mesh on(const std::string& device_type) const;
  DeviceType device_type() const;  // the CPU's unless said otherwise
  // This rank's: its place in the mesh, modulo the number of such devices.
  Device device() const;

  // Some dimensions of it, in its order, by name. Makes no group.
  Mesh operator[](const std::string& name) const { return slice({name}); }
  Mesh slice(const std::vector<std::string>& names) const;
  // All dimensions as one, under a name (by default theirs, joined by "_"). The group is made once, by all ranks of the
  // mesh that this is a slice of, which must all call it; that mesh then knows the name, too.
  Mesh flatten(std::string name = {}) const;
  // The mesh that this is a slice of, or itself.
  Mesh root() const;

  // Equal ranks, shape, names and kind of device.
  friend bool operator==(const Mesh& a, const Mesh& b);
  size_t hash() const;

 private:
  struct State;
  explicit Mesh(std::shared_ptr<State> state) : state_(std::move(state)) {}
  void make_groups(const Group& group);
  void find_hosts();

  std::shared_ptr<State> state_;
};

std::ostream& operator<<(std::ostream& out, const Mesh& mesh);  // mesh of 2 x 4 ranks (replica, shard)

}  // namespace chorale::comm
