#include "chorale/codegen/fused.h"

#include <algorithm>
#include <array>
#include <functional>
#include <map>
#include <mutex>
#include <set>

#include "chorale/base/error.h"
#include "chorale/base/log.h"
#include "chorale/base/parallel_for.h"
#include "chorale/codegen/block.h"
#include "chorale/codegen/fuse.h"
#include "chorale/codegen/line_kernels.h"
#include "chorale/codegen/render.h"
#include "chorale/codegen/tune.h"
#include "chorale/device/stream.h"
#include "chorale/graph/blocks.h"
#include "chorale/graph/interpret.h"
#include "chorale/graph/passes/epilogues.h"
#include "chorale/graph/passes/join_casts.h"
#include "chorale/graph/passes/join_rows.h"
#include "chorale/graph/passes/simplify.h"
#include "chorale/graph/passes/spread_updates.h"
#include "chorale/graph/passes/stripe.h"
#include "chorale/graph/products.h"
#include "chorale/graph/stripes.h"
#include "chorale/io/checksum.h"
#include "chorale/op/copy.h"

namespace chorale::codegen {
namespace {

using graph::Graph;
using graph::Node;

// Below this much work another thread costs more than it saves.
constexpr int64_t kFusedGrain = 32 * 1024;
constexpr size_t kMostPointers = 32;

using Function = void (*)(char* const* p, const long* a, long begin, long end);

struct Launch {
  std::shared_ptr<const Code> code;
  Function function = nullptr;
  std::vector<long> sizes_and_strides;
  int64_t inner = 0;  // elements of a row; 0: elements are counted one by one
  int64_t grain = 1;

  // The results may have fewer lines than the kernel was made for: those of one stripe.
  void operator()(std::span<const Tensor> in, std::span<Tensor> out) const {
    std::array<char*, kMostPointers> p;
    size_t k = 0;
    for (const Tensor& x : in) p[k++] = static_cast<char*>(static_cast<void*>(x.impl()->data));
    for (const Tensor& y : out) p[k++] = static_cast<char*>(static_cast<void*>(y.impl()->data));
    const int64_t count = inner == 0 ? out[0].elems() : out[0].elems() / inner;
    if (count < 2 * grain) return function(p.data(), sizes_and_strides.data(), 0, count);
    parallel_for(count, grain,
                 [&](int64_t begin, int64_t end) { function(p.data(), sizes_and_strides.data(), begin, end); });
  }
};

// Runs a kernel over lines: as many as it was made for.
struct LinesLaunch {
  std::shared_ptr<const Code> code;
  Function function = nullptr;
  LineShape shape;
  int64_t grain = 1;

  void operator()(std::span<const Tensor> in, std::span<Tensor> out) const {
    std::array<char*, kMostPointers> p;
    size_t k = 0;
    for (const Tensor& x : in) p[k++] = static_cast<char*>(static_cast<void*>(x.impl()->data));
    for (const Tensor& y : out) p[k++] = static_cast<char*>(static_cast<void*>(y.impl()->data));
    const long length = shape.length;
    if (shape.lines < 2 * grain) return function(p.data(), &length, 0, shape.lines);
    parallel_for(shape.lines, grain, [&](int64_t begin, int64_t end) { function(p.data(), &length, begin, end); });
  }
};

Launch launch_of(const Graph& body, const LoadedKernel& kernel) {
  const Loops loops = loops_of(body);
  CHORALE_INVARIANT(loops.strides.size() <= kMostPointers, "[codegen] a kernel has too many operands");
  Launch launch;
  launch.function = reinterpret_cast<Function>(kernel.address);
  launch.code = kernel.code;
  launch.sizes_and_strides.assign(loops.sizes.begin(), loops.sizes.end());
  for (const std::vector<int64_t>& strides : loops.strides) {
    launch.sizes_and_strides.insert(launch.sizes_and_strides.end(), strides.begin(), strides.end());
  }
  launch.inner = loops.sizes.size() == 1 ? 0 : loops.sizes.back();
  launch.grain = launch.inner == 0 ? kFusedGrain : std::max<int64_t>(1, kFusedGrain / launch.inner);
  return launch;
}

// Runs a block; where it refuses its operands its nodes run one by one, and say what is wrong.
struct BlockLaunch {
  std::shared_ptr<const Code> code;
  long (*function)(char* const* p);
  std::shared_ptr<const Graph> body;

  void operator()(std::span<const Tensor> in, std::span<Tensor> out) const {
    std::array<char*, kMostBlockOperands> p;
    size_t k = 0;
    for (const Tensor& x : in) p[k++] = static_cast<char*>(static_cast<void*>(x.impl()->data));
    for (const Tensor& y : out) p[k++] = static_cast<char*>(static_cast<void*>(y.impl()->data));
    if (function(p.data()) == 0) return;
    std::vector<Tensor> made(out.size());
    graph::interpret(*body, in, {}, made);
    for (size_t i = 0; i < out.size(); ++i) copy_(out[i], made[i]);
  }
};

const Device& device_of(const Node& fused) { return fused.body->values[fused.body->outputs[0].value].device; }
bool is_on_host(const Node& fused) { return device_of(fused).type == DeviceType::kCpu; }

// What the device compiles itself, when it is first run.
graph::FusedKernel device_kernel(const Node& node) {
  return [loop = render_loop(*node.body), device = device_of(node),
          loops = kernel::find_element_loops(device_of(node).type)](std::span<const Tensor> in, std::span<Tensor> out) {
    loops->run(loop, in, out, current_stream(device));
  };
}

// Forms of products that are not those that shapes say, by the text of the fused node's body.
using Forms = std::map<std::string, kernel::cpu::ProductForm>;

// Finds the kernel of a fused node: generated, a product, or one that runs its nodes in stripes.
graph::FusedKernels kernels_from(std::map<std::string, LoadedKernel> by_name, Forms forms) {
  const graph::FusedKernels blocks = [by_name](const Node& node) {
    const LoadedKernel& kernel = by_name.at(render_block(*node.body).name);
    return graph::FusedKernel(
        BlockLaunch{kernel.code, reinterpret_cast<long (*)(char* const*)>(kernel.address), node.body});
  };
  const graph::FusedKernels lines = [by_name](const Node& node) {
    const LoadedKernel& kernel = by_name.at(render_lines(*node.body).name);
    const LineShape shape = lines_of(*node.body);
    return graph::FusedKernel(LinesLaunch{kernel.code, reinterpret_cast<Function>(kernel.address), shape,
                                          std::max<int64_t>(1, kFusedGrain / shape.length)});
  };
  const graph::FusedKernels generated = [by_name = std::move(by_name)](const Node& node) {
    if (!is_on_host(node)) return device_kernel(node);
    return graph::FusedKernel(launch_of(*node.body, by_name.at(render(*node.body).name)));
  };
  return [generated, blocks, lines, forms = std::move(forms)](const Node& node) {
    if (node.kind == Node::Kind::kBlock) return blocks(node);
    if (graph::is_elementwise(node)) return generated(node);
    if (graph::works_line_by_line(node)) return lines(node);
    if (!graph::is_product(node)) return graph::striped_kernel(node, generated);
    const auto form = forms.find(graph::print(*node.body));
    return graph::product_kernel(node, form == forms.end() ? kernel::cpu::ProductForm::kByShape : form->second);
  };
}

// Makes fused nodes of the products that have a form of their own.
Forms take_forms(Graph& graph, const Tuned& tuned) {
  Forms forms;
  const std::vector<size_t> nodes = tunable(graph);
  for (size_t i = 0; i < nodes.size(); ++i) {
    Node& node = graph.nodes[nodes[i]];
    if (tuned[i] == kernel::cpu::ProductForm::kByShape) continue;
    if (node.kind == Node::Kind::kRow) {
      Node fused = graph::fuse_product(graph, {&node});
      node = std::move(fused);
    }
    forms.emplace(graph::print(*node.body), tuned[i]);
  }
  return forms;
}

bool has_block(const Graph& graph) {
  return std::any_of(graph.nodes.begin(), graph.nodes.end(),
                     [](const Node& node) { return node.kind == Node::Kind::kBlock; });
}

// A reason for running without generated code: said once each.
void say_once(const std::string& why) {
  static std::mutex mutex;
  static std::set<std::string> said;
  const std::lock_guard lock(mutex);
  if (said.insert(why).second) log_warning(concat("[compile] graphs run op by op, without generated kernels: ", why));
}

}  // namespace

Graph simplify_and_fuse(Graph graph, bool with_blocks) {
  graph::simplify(graph);
  graph::join_rows(graph);
  graph::join_casts(graph);
  graph::spread_updates(graph);
  Graph fused = fuse(graph);
  if (with_blocks) fused = make_blocks(fused);
  graph::run_in_stripes(fused);
  graph::join_epilogues(fused);
  graph::verify(fused);
  return fused;
}

std::vector<KernelText> kernels_of(const Graph& fused) {
  std::vector<KernelText> kernels;
  std::set<std::string> names;
  const std::function<void(const Graph&)> add = [&](const Graph& at) {
    for (const Node& node : at.nodes) {
      if (!node.body) continue;
      if (node.kind != Node::Kind::kBlock && !graph::is_elementwise(node) && !graph::works_line_by_line(node)) {
        add(*node.body);
        continue;
      }
      if (node.kind != Node::Kind::kBlock && !is_on_host(node)) continue;
      KernelText kernel = node.kind == Node::Kind::kBlock   ? render_block(*node.body)
                          : graph::works_line_by_line(node) ? render_lines(*node.body)
                                                            : render(*node.body);
      if (names.insert(kernel.name).second) kernels.push_back(std::move(kernel));
    }
  };
  add(fused);
  return kernels;
}

static std::shared_ptr<const graph::Program> fuse_and_compile(Graph graph, const FusedOptions& options,
                                                              bool with_blocks,
                                                              const std::shared_ptr<const Tuned>& known) {
  Graph fused = simplify_and_fuse(graph, with_blocks);
  std::shared_ptr<const Tuned> tuned = known;
  if (options.autotune && !known) tuned = std::make_shared<const Tuned>(tune(fused, options.tune_with));
  // Blocks hide products, so that there may be fewer of them than at other sizes: then all are as their shapes say.
  const bool fits = tuned && tuned->size() == tunable(fused).size();
  const Forms forms = fits ? take_forms(fused, *tuned) : Forms{};
  std::string form_numbers;
  if (fits) {
    for (const auto form : *tuned) form_numbers += static_cast<char>('0' + static_cast<int>(form));
  }
  // Kernels are functions of sizes: at others the cache has them already. Blocks are not; what stands in for them there
  // is compiled with them.
  const graph::Program::Resize resize = [options, tuned](Graph other) {
    return fuse_and_compile(std::move(other), options, false, tuned);
  };
  std::vector<KernelText> kernels = kernels_of(fused);
  if (has_block(fused)) {
    for (KernelText& kernel : kernels_of(simplify_and_fuse(graph, false))) {
      if (std::none_of(kernels.begin(), kernels.end(), [&](const KernelText& k) { return k.name == kernel.name; }))
        kernels.push_back(std::move(kernel));
    }
  }
  if (kernels.empty()) {
    auto program = std::make_shared<graph::Program>(std::move(fused), kernels_from({}, forms), resize);
    if (!forms.empty()) program->set_maker(concat("products of the forms ", form_numbers));
    return program;
  }
  Toolchain toolchain = find_toolchain(options.compiler);
  std::replace(toolchain.flags.begin(), toolchain.flags.end(), std::string("-O3"), options.optimize);
  std::string why;
  CodeCache& cache = options.cache ? *options.cache : CodeCache::shared();
  const std::vector<LoadedKernel> loaded = cache.get(toolchain, prelude(), kernels, why);
  if (loaded.empty()) {
    say_once(why);
    return std::make_shared<const graph::Program>(std::move(graph));
  }
  std::map<std::string, LoadedKernel> by_name;
  for (size_t i = 0; i < kernels.size(); ++i) by_name[kernels[i].name] = loaded[i];
  auto program = std::make_shared<graph::Program>(std::move(fused), kernels_from(std::move(by_name), forms), resize);
  std::string texts = concat(toolchain.identity(), "\n", prelude());
  for (const KernelText& kernel : kernels) texts += kernel.text;
  if (!forms.empty()) texts += form_numbers;
  program->set_maker(concat("generated code ", io::sha256(texts), " of ", toolchain.compiler.string()));
  return program;
}

std::shared_ptr<const graph::Program> fuse_and_compile(Graph graph, const FusedOptions& options) {
  return fuse_and_compile(std::move(graph), options, options.blocks, nullptr);
}

}  // namespace chorale::codegen
