// Parts of a job's state: what ranks have of it, and how it is put together again for other ranks.
#pragma once

#include <compare>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "chorale/comm/group.h"
#include "chorale/snapshot/plan.h"
#include "chorale/snapshot/snapshot.h"

namespace chorale::elastic {

// A state that the job has had. In an epoch each step is committed once, so what two ranks have of one moment are parts
// of one state, also where steps were done again by other ranks.
struct Moment {
  int64_t step = 0;   // so many are applied
  int64_t epoch = 0;  // in which the last of them was committed; 0: none was
  friend auto operator<=>(const Moment&, const Moment&) = default;  // NOLINT(modernize-use-nullptr): not one here
};

// The same state, cut into the parts of one epoch's ranks.
struct Cut {
  Moment moment;
  int64_t split = 0;                                          // the epoch
  friend auto operator<=>(const Cut&, const Cut&) = default;  // NOLINT(modernize-use-nullptr): not one here
};

// Parts that a rank can give.
struct Source {
  Cut cut;
  bool is_own = true;  // false: those of its neighbour
  snapshot::State state;
};

// A state in one piece of memory, which is `room` where that has the size.
Tensor packed(const snapshot::State& state, const Tensor& room = {});
// Views of it.
snapshot::State unpacked(const Tensor& bytes);

// What a tensor is like, whoever has parts of it.
struct Outline {
  DType dtype;
  Shape sizes;
};
using Outlines = std::map<std::string, Outline>;

// What all ranks of a group can give.
class Holdings {
 public:
  // All ranks call it.
  Holdings(const comm::Group& group, std::vector<Source> sources);

  // The newest one of which every tensor is there as a whole, these among them.
  std::optional<Cut> newest_whole(const std::vector<std::string>& keys) const;
  Outlines outlines(const Cut& cut) const;
  // The ranks that have own parts of this moment, and this rank's; null where it has none.
  std::vector<int> owners(const Moment& moment) const;
  const snapshot::State* own(const Moment& moment) const;
  // Fills the tensors of `wanted`. All ranks call it, each with what it needs.
  void fill(const Cut& cut, const snapshot::State& wanted) const;

 private:
  struct Listed {
    Cut cut;
    bool is_own;
    std::vector<snapshot::WriteItem> items;
  };
  // The parts of the cut that each rank has.
  std::vector<std::vector<snapshot::WriteItem>> items_of(const Cut& cut) const;

  const comm::Group& group_;
  const std::vector<Source> sources_;
  std::vector<std::vector<Listed>> listed_;  // by rank
};

}  // namespace chorale::elastic
