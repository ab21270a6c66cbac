// Ranks arranged as a grid: replicas by shards, hosts by ranks of a host.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "chorale/comm/group.h"

namespace chorale::comm {

class Mesh {
 public:
  // The ranks of `group` in row-major order; every member calls it. The product of `shape` must be the group's size.
  // Names of dimensions may be left out.
  Mesh(const Group& group, std::vector<int> shape, std::vector<std::string> names = {});

  const std::vector<int>& shape() const { return shape_; }
  const std::vector<std::string>& names() const { return names_; }
  size_t dims() const { return shape_.size(); }  // the number of dimensions
  [[deprecated("call dims(): a rank is a process")]] size_t rank() const { return dims(); }
  // Global ranks, in row-major order.
  const std::vector<int>& ranks() const { return ranks_; }
  // Where this rank is along a dimension.
  int coordinate(size_t dimension) const { return coordinates_[dimension]; }
  // The ranks that differ from this one along that dimension only.
  const Group& group(size_t dimension) const;
  const Group& group(const std::string& name) const;

 private:
  std::vector<int> shape_;
  std::vector<std::string> names_;
  std::vector<int> ranks_;
  std::vector<int> coordinates_;
  std::vector<Group> groups_;
};

std::ostream& operator<<(std::ostream& out, const Mesh& mesh);  // mesh of 2 x 4 ranks (replica, shard)

}  // namespace chorale::comm
