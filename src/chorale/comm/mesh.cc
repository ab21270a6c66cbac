#include "chorale/comm/mesh.h"

#include <algorithm>
#include <numeric>
#include <ostream>

#include "chorale/base/error.h"

namespace chorale::comm {

Mesh::Mesh(const Group& group, std::vector<int> shape, std::vector<std::string> names)
    : shape_(std::move(shape)), names_(std::move(names)), ranks_(group.members()) {
  const int count = std::accumulate(shape_.begin(), shape_.end(), 1, std::multiplies<>());
  CHORALE_CHECK(!shape_.empty() && std::all_of(shape_.begin(), shape_.end(), [](int n) { return n > 0; }) &&
                    count == group.size(),
                "[mesh] its sizes must be positive with the group's ", group.size(), " as their product, not ", count);
  CHORALE_CHECK(names_.empty() || names_.size() == shape_.size(), "[mesh] ", names_.size(), " names for ",
                shape_.size(), " dimensions");
  int stride = count;
  for (size_t d = 0; d < shape_.size(); ++d) {
    stride /= shape_[d];
    coordinates_.push_back(group.rank() / stride % shape_[d]);
    std::vector<std::vector<int>> lines;
    for (int first = 0; first < count; ++first) {
      if (first / stride % shape_[d] != 0) continue;
      lines.emplace_back();
      for (int i = 0; i < shape_[d]; ++i) lines.back().push_back(ranks_[static_cast<size_t>(first + i * stride)]);
    }
    Group::Subgroups along = group.new_subgroups(lines);
    groups_.push_back(std::move(along.groups[static_cast<size_t>(along.own)]));
  }
}

const Group& Mesh::group(size_t dimension) const {
  CHORALE_CHECK(dimension < groups_.size(), "[mesh] no dimension ", dimension, " in a ", *this);
  return groups_[dimension];
}

const Group& Mesh::group(const std::string& name) const {
  const auto found = std::find(names_.begin(), names_.end(), name);
  CHORALE_CHECK(found != names_.end(), "[mesh] no dimension ", name, " in a ", *this);
  return groups_[static_cast<size_t>(found - names_.begin())];
}

std::ostream& operator<<(std::ostream& out, const Mesh& mesh) {
  const auto list = [&](const auto& items, const char* between) {
    for (size_t i = 0; i < items.size(); ++i) out << (i == 0 ? "" : between) << items[i];
  };
  out << "mesh of ";
  list(mesh.shape(), " x ");
  out << " ranks";
  if (mesh.names().empty()) return out;
  out << " (";
  list(mesh.names(), ", ");
  return out << ")";
}

}  // namespace chorale::comm
