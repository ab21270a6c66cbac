#include "chorale/launch/cores.h"

#include <hwloc.h>

#include <algorithm>
#include <climits>
#include <memory>

#include "chorale/base/error.h"
#include "chorale/base/host.h"

namespace chorale::launch {
namespace {

struct TopologyDeleter {
  void operator()(hwloc_topology* topology) const { hwloc_topology_destroy(topology); }
};
struct BitmapDeleter {
  void operator()(hwloc_bitmap_s* bitmap) const { hwloc_bitmap_free(bitmap); }
};
using Topology = std::unique_ptr<hwloc_topology, TopologyDeleter>;
using Bitmap = std::unique_ptr<hwloc_bitmap_s, BitmapDeleter>;

Topology load_topology() {
  hwloc_topology_t raw = nullptr;
  CHORALE_INVARIANT(hwloc_topology_init(&raw) == 0, "hwloc does not start");
  Topology topology(raw);
  CHORALE_INVARIANT(hwloc_topology_load(raw) == 0, "hwloc finds no processors");
  // Ours is what a scheduler or taskset left us. A described machine (HWLOC_SYNTHETIC) is taken whole.
  if (hwloc_topology_is_thissystem(raw)) {
    const Bitmap mine(hwloc_bitmap_alloc());
    if (hwloc_get_cpubind(raw, mine.get(), HWLOC_CPUBIND_THREAD) == 0) hwloc_topology_restrict(raw, mine.get(), 0);
  }
  return topology;
}

}  // namespace

std::vector<RankCores> share_cores(int ranks) {
  CHORALE_CHECK(ranks >= 1, "[launch] ", ranks, " ranks; at least one is needed");
  const Topology topology = load_topology();
  const int cores = std::max(1, hwloc_get_nbobjs_by_type(topology.get(), HWLOC_OBJ_CORE));
  const int processors = hwloc_get_nbobjs_by_type(topology.get(), HWLOC_OBJ_PU);
  std::vector<RankCores> shares(static_cast<size_t>(ranks));
  if (ranks > processors) return shares;

  std::vector<hwloc_cpuset_t> sets(shares.size());
  hwloc_obj_t whole = hwloc_get_root_obj(topology.get());
  // Down to cores where there are enough, so that a rank has both hyper-threads of each of its cores.
  const int until = ranks <= cores ? hwloc_get_type_or_below_depth(topology.get(), HWLOC_OBJ_CORE) : INT_MAX;
  CHORALE_INVARIANT(hwloc_distrib(topology.get(), &whole, 1, sets.data(), static_cast<unsigned>(ranks), until, 0) == 0,
                    "hwloc cannot share out ", processors, " processors");
  const int allowed = hwloc_topology_is_thissystem(topology.get()) ? std::max(1, usable_cores() / ranks) : INT_MAX;
  for (size_t rank = 0; rank < shares.size(); ++rank) {
    const Bitmap set(sets[rank]);
    for (int cpu = hwloc_bitmap_first(set.get()); cpu >= 0; cpu = hwloc_bitmap_next(set.get(), cpu)) {
      shares[rank].cpus.push_back(cpu);
    }
    const int own = hwloc_get_nbobjs_inside_cpuset_by_type(topology.get(), set.get(), HWLOC_OBJ_CORE);
    shares[rank].threads = std::max(1, std::min(own, allowed));
  }
  return shares;
}

}  // namespace chorale::launch
