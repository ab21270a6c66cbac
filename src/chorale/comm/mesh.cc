#include "chorale/comm/mesh.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <ostream>
#include <set>

#include "chorale/base/error.h"
#include "chorale/comm/engine.h"
#include "chorale/device/runtime.h"

namespace chorale::comm {

struct Mesh::State {
  std::vector<int> shape;
  std::vector<std::string> names;
  std::vector<int> ranks;
  std::vector<int> coordinates;
  std::vector<std::shared_ptr<const Group>> groups;  // by dimension
  std::vector<int32_t> spans_hosts;                  // by dimension
  DeviceType device = DeviceType::kCpu;
  std::shared_ptr<State> root;  // null: this is one
  std::vector<size_t> dims_of_root;
  // A root has these:
  std::shared_ptr<const Group> everyone;  // makes groups for flatten()
  std::vector<Mesh> flattened;
};

namespace {

// The lines along some dimensions: for every place along the others, the ranks that share it. `own`: the coordinates of
// this rank, or nothing.
std::vector<std::vector<int>> lines_along(const std::vector<int>& shape, const std::vector<int>& ranks,
                                          const std::vector<size_t>& dims) {
  std::vector<std::vector<int>> lines;
  std::vector<int> place(shape.size(), 0);
  std::vector<std::pair<std::vector<int>, size_t>> known;
  for (const int rank : ranks) {
    std::vector<int> others = place;
    for (const size_t d : dims) others[d] = 0;
    auto found = std::find_if(known.begin(), known.end(), [&](const auto& entry) { return entry.first == others; });
    if (found == known.end()) {
      known.emplace_back(others, lines.size());
      lines.emplace_back();
      found = known.end() - 1;
    }
    lines[found->second].push_back(rank);
    for (size_t d = shape.size(); d-- > 0;) {
      if (++place[d] < shape[d]) break;
      place[d] = 0;
    }
  }
  return lines;
}

Group own_line(const Group& group, const std::vector<std::vector<int>>& lines) {
  Group::Subgroups made = group.new_subgroups(lines);
  return made.own >= 0 ? std::move(made.groups[static_cast<size_t>(made.own)]) : Group();
}

template <class State>
const State& whole(const std::shared_ptr<State>& state) {
  CHORALE_CHECK(state, "[mesh] the mesh was moved from");
  return *state;
}

}  // namespace

Mesh::Mesh(const Group& group, std::vector<int> shape, std::vector<std::string> names)
    : Mesh(group, std::move(shape), std::move(names), group.members()) {}

Mesh::Mesh(const Group& group, std::vector<int> shape, std::vector<std::string> names, std::vector<int> ranks)
    : state_(std::make_shared<State>()) {
  State& mesh = *state_;
  mesh.shape = std::move(shape);
  mesh.names = std::move(names);
  mesh.ranks = std::move(ranks);
  const int count = std::accumulate(mesh.shape.begin(), mesh.shape.end(), 1, std::multiplies<>());
  CHORALE_CHECK(!mesh.shape.empty() && std::all_of(mesh.shape.begin(), mesh.shape.end(), [](int n) { return n > 0; }) &&
                    count == size(),
                "[mesh] its sizes must be positive with the number of ranks, ", size(), ", as their product, not ",
                count);
  CHORALE_CHECK(mesh.names.empty() || mesh.names.size() == mesh.shape.size(), "[mesh] ", mesh.names.size(),
                " names for ", mesh.shape.size(), " dimensions");
  CHORALE_CHECK(std::set<std::string>(mesh.names.begin(), mesh.names.end()).size() == mesh.names.size(),
                "[mesh] two dimensions have one name in ", *this);
  for (size_t i = 1; i < mesh.ranks.size(); ++i) {
    CHORALE_CHECK(mesh.ranks[i - 1] < mesh.ranks[i], "[mesh] its ranks must ascend: found ", mesh.ranks[i], " behind ",
                  mesh.ranks[i - 1]);
  }
  make_groups(group);
}

void Mesh::make_groups(const Group& group) {
  State& mesh = *state_;
  const int own = group.global_rank(group.rank());
  const auto found = std::find(mesh.ranks.begin(), mesh.ranks.end(), own);
  if (found != mesh.ranks.end()) {
    auto at = static_cast<int>(found - mesh.ranks.begin());
    mesh.coordinates.resize(mesh.shape.size());
    for (size_t d = mesh.shape.size(); d-- > 0; at /= mesh.shape[d]) mesh.coordinates[d] = at % mesh.shape[d];
  }
  for (size_t d = 0; d < mesh.shape.size(); ++d) {
    mesh.groups.push_back(std::make_shared<const Group>(own_line(group, lines_along(mesh.shape, mesh.ranks, {d}))));
  }
  mesh.everyone =
      mesh.shape.size() == 1 ? mesh.groups[0] : std::make_shared<const Group>(own_line(group, {mesh.ranks}));
  find_hosts();
}

// Where one line along a dimension leaves a host, the dimension counts as leaving it: every rank must come to the same
// answer.
void Mesh::find_hosts() {
  State& mesh = *state_;
  mesh.spans_hosts.assign(mesh.shape.size(), 0);
  if (!is_member() || mesh.everyone->is_on_one_host()) return;
  for (size_t d = 0; d < mesh.shape.size(); ++d) mesh.spans_hosts[d] = mesh.groups[d]->is_on_one_host() ? 0 : 1;
  mesh.everyone->all_reduce(std::span(mesh.spans_hosts), Reduce::kMax).wait();
}

bool Mesh::spans_hosts(size_t dimension) const {
  CHORALE_CHECK(dimension < dims(), "[mesh] no dimension ", dimension, " in a ", *this);
  return state_->spans_hosts[dimension] != 0;
}

Mesh Mesh::on(const std::string& device_type) const {
  CHORALE_CHECK(device_type.find(':') == std::string::npos, "[mesh] takes a kind of device, found ", device_type,
                ": which one of that kind follows from the rank; leave the number out");
  DeviceType type = DeviceType::kCpu;
  bool known = false;
  for (size_t i = 0; i < kDeviceTypes && !known; ++i) {
    type = static_cast<DeviceType>(i);
    known = device_type == type_name(type);
  }
  CHORALE_CHECK(known, "[mesh] no kind of device is called ", device_type, ": there are cpu, null, cuda and sim");
  auto other = std::make_shared<State>(whole(state_));
  other->device = type;
  return Mesh(std::move(other));
}

DeviceType Mesh::device_type() const { return whole(state_).device; }

Device Mesh::device() const {
  if (device_type() == DeviceType::kCpu || device_type() == DeviceType::kNull || !is_member()) return {device_type()};
  const State& mesh = *state_;
  int place = 0;
  for (size_t d = 0; d < dims(); ++d) place = place * mesh.shape[d] + mesh.coordinates[d];
  const int count = runtime_of({device_type()}).count();
  CHORALE_CHECK_STATE(count > 0, "[mesh] this host has no device of kind ", type_name(device_type()));
  return {device_type(), static_cast<int16_t>(place % count)};
}

const std::vector<int>& Mesh::shape() const { return whole(state_).shape; }
const std::vector<std::string>& Mesh::names() const { return whole(state_).names; }
const std::vector<int>& Mesh::ranks() const { return whole(state_).ranks; }
const std::vector<int>& Mesh::coordinates() const { return whole(state_).coordinates; }

int Mesh::coordinate(size_t dimension) const {
  CHORALE_CHECK(dimension < dims(), "[mesh] no dimension ", dimension, " in a ", *this);
  CHORALE_CHECK(is_member(), "[mesh] this rank is outside the ", *this, ", so it has no place in it");
  return coordinates()[dimension];
}

size_t Mesh::dimension(const std::string& name) const {
  const auto found = std::find(names().begin(), names().end(), name);
  CHORALE_CHECK(found != names().end(), "[mesh] no dimension ", name, " in a ", *this,
                names().empty() ? "; give its dimensions names" : "");
  return static_cast<size_t>(found - names().begin());
}

const std::shared_ptr<const Group>& Mesh::shared_group(size_t dimension) const {
  CHORALE_CHECK(dimension < dims(), "[mesh] no dimension ", dimension, " in a ", *this);
  return state_->groups[dimension];
}

Mesh Mesh::root() const { return whole(state_).root ? Mesh(state_->root) : *this; }

Mesh Mesh::slice(const std::vector<std::string>& wanted) const {
  CHORALE_CHECK(!wanted.empty(), "[mesh] a slice needs at least one name");
  if (wanted == names()) return *this;
  if (wanted.size() == 1) {
    for (const Mesh& known : root().state_->flattened) {
      if (known.names() != wanted) continue;
      auto flat = std::make_shared<State>(*known.state_);
      flat->root = root().state_;
      flat->device = state_->device;
      return Mesh(std::move(flat));
    }
  }
  auto part = std::make_shared<State>();
  part->root = root().state_;
  part->device = state_->device;
  std::vector<size_t> dims;
  for (const std::string& name : wanted) {
    dims.push_back(dimension(name));
    CHORALE_CHECK(dims.size() == 1 || dims[dims.size() - 2] < dims.back(), "[mesh] a slice names dimensions in the ",
                  "order of the mesh: ", name, " stands before ", wanted[dims.size() - 2], " in a ", *this);
  }
  for (const size_t d : dims) {
    part->shape.push_back(shape()[d]);
    part->names.push_back(names()[d]);
    part->groups.push_back(state_->groups[d]);
    part->spans_hosts.push_back(state_->spans_hosts[d]);
    if (is_member()) part->coordinates.push_back(coordinates()[d]);
    part->dims_of_root.push_back(state_->root ? state_->dims_of_root[d] : d);
  }
  if (is_member()) {
    // The line through this rank.
    size_t at = 0;
    for (size_t d = 0; d < this->dims(); ++d)
      at = at * static_cast<size_t>(shape()[d]) + static_cast<size_t>(coordinates()[d]);
    for (std::vector<int>& line : lines_along(shape(), ranks(), dims)) {
      if (std::find(line.begin(), line.end(), ranks()[at]) != line.end()) part->ranks = std::move(line);
    }
  }
  return Mesh(std::move(part));
}

Mesh Mesh::flatten(std::string name) const {
  if (name.empty()) {
    CHORALE_CHECK(!names().empty(), "[mesh] a ", *this, " has no names to make one of: give one to flatten()");
    for (const std::string& part : names()) name += (name.empty() ? "" : "_") + part;
  }
  const Mesh whole = root();
  std::vector<size_t> dims = state_->dims_of_root;
  if (!state_->root) {
    dims.resize(this->dims());
    std::iota(dims.begin(), dims.end(), size_t{0});
  }
  if (dims.size() == 1 && names() == std::vector<std::string>{name}) return *this;
  CHORALE_CHECK(std::find(whole.names().begin(), whole.names().end(), name) == whole.names().end(),
                "[mesh] flatten: ", name, " is the name of a dimension of the ", whole, " already");
  for (const Mesh& known : whole.state_->flattened) {
    if (known.names()[0] != name) continue;
    CHORALE_CHECK(known.state_->dims_of_root == dims, "[mesh] flatten: ", name, " stands for other dimensions of the ",
                  whole, " already");
    return whole.slice({name});
  }
  auto flat = std::make_shared<State>();
  flat->shape = {size()};
  flat->names = {name};
  flat->ranks = ranks();
  flat->root = whole.state_;
  flat->dims_of_root = dims;
  flat->device = state_->device;
  flat->spans_hosts = {0};
  for (const size_t d : dims) flat->spans_hosts[0] = std::max(flat->spans_hosts[0], whole.state_->spans_hosts[d]);
  if (is_member()) {
    flat->groups.push_back(std::make_shared<const Group>(
        own_line(*whole.state_->everyone, lines_along(whole.shape(), whole.ranks(), dims))));
    flat->coordinates = {flat->groups[0]->rank()};
  } else {
    flat->groups.push_back(std::make_shared<const Group>());
  }
  // What the root keeps does not hold on to the root.
  auto kept = std::make_shared<State>(*flat);
  kept->root = nullptr;
  whole.state_->flattened.push_back(Mesh(std::move(kept)));
  return Mesh(std::move(flat));
}

// Ranks are numbers in a world: those of another one, such as of another epoch of an elastic job, are others.
bool operator==(const Mesh& a, const Mesh& b) {
  if (a.state_ == b.state_) return true;
  if (a.ranks() != b.ranks() || a.shape() != b.shape() || a.names() != b.names() || a.device_type() != b.device_type())
    return false;
  const auto world = [](const Mesh& mesh) -> const RankContext* {  // null on a rank outside
    for (const auto& group : mesh.state_->groups) {
      if (group->is_member()) return &group->engine()->context();
    }
    return nullptr;
  };
  const RankContext *of_a = world(a), *of_b = world(b);
  return !of_a || !of_b || of_a == of_b;
}

size_t Mesh::hash() const {
  size_t hash = 0;
  const auto mix = [&](size_t value) { hash = (hash ^ value) * 0x9e3779b97f4a7c15u; };
  for (const int rank : ranks()) mix(static_cast<size_t>(rank));
  for (const int n : shape()) mix(static_cast<size_t>(n));
  for (const std::string& name : names()) mix(std::hash<std::string>()(name));
  mix(static_cast<size_t>(device_type()));
  return hash;
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
