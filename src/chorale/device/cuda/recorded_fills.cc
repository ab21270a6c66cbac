#include "chorale/device/cuda/recorded_fills.h"

#include <vector>

#include "chorale/device/cuda/space.h"

namespace chorale::cuda {
namespace {

constexpr size_t kMostBytes = 4096;  // those of one block

std::vector<CUgraphNode> nodes_of(CUgraph graph) {
  size_t count = 0;
  check(driver().cuGraphGetNodes(graph, nullptr, &count), "looking at a recording");
  std::vector<CUgraphNode> nodes(count);
  if (count > 0) check(driver().cuGraphGetNodes(graph, nodes.data(), &count), "looking at a recording");
  return nodes;
}

// The nodes before a node, or behind it.
template <class Find>
std::vector<CUgraphNode> neighbours(CUgraphNode node, Find find) {
  size_t count = 0;
  check(find(node, nullptr, nullptr, &count), "looking at a recording");
  std::vector<CUgraphNode> found(count);
  if (count > 0) check(find(node, found.data(), nullptr, &count), "looking at a recording");
  return found;
}

void replace(CUgraph graph, CUgraphNode fill, const CUDA_MEMSET_NODE_PARAMS& what, Device device) {
  CUdeviceptr to = what.dst;
  unsigned value = what.value;
  int64_t count = static_cast<int64_t>(what.width);
  void* arguments[] = {&to, &value, &count};
  CUDA_KERNEL_NODE_PARAMS kernel{};
  kernel.func = prelude_kernel(device, concat("fill_few<", unit_in_text(what.elementSize), ">"));
  kernel.gridDimX = kernel.gridDimY = kernel.gridDimZ = kernel.blockDimY = kernel.blockDimZ = 1;
  kernel.blockDimX = 32;
  kernel.kernelParams = arguments;
  const std::vector<CUgraphNode> before = neighbours(fill, driver().cuGraphNodeGetDependencies);
  const std::vector<CUgraphNode> behind = neighbours(fill, driver().cuGraphNodeGetDependentNodes);
  CUgraphNode made = nullptr;
  check(driver().cuGraphAddKernelNode(&made, graph, before.data(), before.size(), &kernel), "changing a recording");
  const std::vector<CUgraphNode> from(behind.size(), made);
  if (!behind.empty()) {
    check(driver().cuGraphAddDependencies(graph, from.data(), behind.data(), nullptr, behind.size()),
          "changing a recording");
  }
  check(driver().cuGraphDestroyNode(fill), "changing a recording");
}

}  // namespace

void fill_by_kernels(CUgraph graph, Device device) {
  for (const CUgraphNode node : nodes_of(graph)) {
    CUgraphNodeType type{};
    check(driver().cuGraphNodeGetType(node, &type), "looking at a recording");
    if (type != CU_GRAPH_NODE_TYPE_MEMSET) continue;
    CUDA_MEMSET_NODE_PARAMS what{};
    check(driver().cuGraphMemsetNodeGetParams(node, &what), "looking at a recording");
    if (what.height == 1 && what.width * what.elementSize <= kMostBytes) replace(graph, node, what, device);
  }
}

}  // namespace chorale::cuda
