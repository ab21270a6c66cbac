#include "chorale/comm/mesh_drawing.h"

#include <algorithm>
#include <set>

#include "chorale/base/error.h"

namespace chorale::comm {
namespace {

constexpr size_t kMostGroups = 8;  // shown of each dimension

std::string right(const std::string& text, size_t width) {
  return std::string(width - std::min(width, text.size()), ' ') + text;
}
std::string left(const std::string& text, size_t width) {
  return text + std::string(width - std::min(width, text.size()), ' ');
}
template <class Items>
std::string joined(const Items& items, const char* between) {
  std::string text;
  for (const auto& item : items) text += concat(text.empty() ? "" : between, item);
  return text;
}

struct Drawing {
  const std::vector<int>& shape;
  const std::vector<std::string>& names;
  const std::vector<std::string>& hosts;

  size_t dims() const { return shape.size(); }
  std::string name(size_t d) const { return names.empty() ? concat("dim ", d) : names[d]; }
  // How far ranks are apart that are neighbours along a dimension.
  int step(size_t d) const {
    int step = 1;
    for (size_t i = d + 1; i < dims(); ++i) step *= shape[i];
    return step;
  }

  std::string hosts_of(int first, int count) const {
    std::string text;
    for (int rank = first; rank < first + count; ++rank) {
      const std::string& host = hosts[static_cast<size_t>(rank)];
      if (rank == first || host != hosts[static_cast<size_t>(rank - 1)]) text += (text.empty() ? "" : ", ") + host;
    }
    return text;
  }

  // The last dimension across, the one before it downwards; a table for every place along the others.
  std::string table(int first) const {
    const size_t across = dims() - 1;
    const int columns = shape[across], rows = dims() > 1 ? shape[across - 1] : 1;
    const auto heading = [&](int column) { return concat(name(across), " ", column); };
    const auto label = [&](int row) { return dims() > 1 ? concat(name(across - 1), " ", row) : std::string(); };
    const size_t margin = label(rows - 1).size(),
                 wide = std::max(heading(columns - 1).size(), concat(hosts.size() - 1).size()) + 2;
    std::string text = left("", 2 + margin);
    for (int c = 0; c < columns; ++c) text += right(heading(c), wide);
    text += '\n';
    for (int r = 0; r < rows; ++r) {
      text += "  " + left(label(r), margin);
      for (int c = 0; c < columns; ++c) text += right(concat(first + r * columns + c), wide);
      text += concat("   ", hosts_of(first + r * columns, columns), "\n");
    }
    return text;
  }

  std::string tables() const {
    const int each = dims() > 1 ? shape[dims() - 1] * shape[dims() - 2] : shape[0];
    std::string text;
    for (int first = 0; first < static_cast<int>(hosts.size()); first += each) {
      for (size_t d = 0; d + 2 < dims(); ++d) text += concat(d ? ", " : "", name(d), " ", first / step(d) % shape[d]);
      text += (dims() > 2 ? "\n" : "") + table(first) + "\n";
    }
    return text;
  }

  std::string groups_along(size_t d) const {
    std::string lists;
    size_t count = 0;
    bool inside = true;
    for (int rank = 0; rank < static_cast<int>(hosts.size()); ++rank) {
      if (rank / step(d) % shape[d] != 0) continue;
      std::string list;
      for (int i = 0; i < shape[d]; ++i) {
        const int member = rank + i * step(d);
        list += concat(i ? ", " : "", member);
        inside = inside && hosts[static_cast<size_t>(member)] == hosts[static_cast<size_t>(rank)];
      }
      if (count++ < kMostGroups) lists += concat(" {", list, "}");
    }
    return concat(count, count == 1 ? " group" : " groups", " of ", shape[d], ", ",
                  inside ? "inside a host" : "between hosts", ":", lists, count > kMostGroups ? " …" : "", "\n");
  }
};

}  // namespace

std::string draw_mesh(const std::vector<int>& shape, const std::vector<std::string>& names,
                      const std::vector<std::string>& hosts) {
  int64_t ranks = 1;
  for (const int n : shape) {
    CHORALE_CHECK(n > 0, "[mesh] sizes must be positive, found ", n);
    ranks *= n;
    CHORALE_CHECK(ranks <= 1'000'000, "[mesh] more than a million ranks cannot be drawn");
  }
  CHORALE_CHECK(!shape.empty() && ranks == static_cast<int64_t>(hosts.size()), "[mesh] it has ", ranks,
                " ranks, but there are ", hosts.size());
  CHORALE_CHECK(names.empty() || names.size() == shape.size(), "[mesh] ", names.size(), " names for ", shape.size(),
                " dimensions");
  CHORALE_CHECK(std::set<std::string>(names.begin(), names.end()).size() == names.size(),
                "[mesh] two dimensions have one name");
  const Drawing drawing{shape, names, hosts};
  const size_t host_count = std::set<std::string>(hosts.begin(), hosts.end()).size();
  std::string text =
      concat("mesh of ", joined(shape, " x "), " ranks", names.empty() ? "" : concat(" (", joined(names, ", "), ")"),
             " on ", host_count, host_count == 1 ? " host" : " hosts", "\n\n");
  text += drawing.tables();
  size_t wide = 0;
  for (size_t d = 0; d < shape.size(); ++d) wide = std::max(wide, drawing.name(d).size());
  for (size_t d = 0; d < shape.size(); ++d) text += concat(left(drawing.name(d), wide), "   ", drawing.groups_along(d));
  return text;
}

}  // namespace chorale::comm
