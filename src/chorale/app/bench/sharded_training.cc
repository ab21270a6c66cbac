#include "chorale/app/bench/sharded_training.h"

#include <algorithm>
#include <memory>
#include <optional>

#include "chorale/app/bench/bench.h"
#include "chorale/app/bench/models.h"
#include "chorale/base/error.h"
#include "chorale/device/allocator.h"
#include "chorale/fsdp/fully_shard.h"
#include "chorale/nn/nn.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/ddp.h"
#include "chorale/sharding/sharded.h"
#include "chorale/snapshot/async_saver.h"
#include "chorale/zero/zero_optimizer.h"

namespace chorale::app::bench_sharded {
namespace {

using ZeroAdamW = zero::ZeroOptimizer<optim::AdamW, optim::AdamWOptions>;

std::vector<std::string> words_of(const std::string& name) {
  std::vector<std::string> words;
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('/', begin), name.size());
    words.push_back(name.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

// Shards what the peer shards: every block of the encoder, every linear layer of the other models, and the whole.
void shard_blocks(nn::Module& model, const Mesh& mesh) {
  const bool has_blocks = dynamic_cast<models::Encoder*>(&model) != nullptr;
  for (const auto& [name, module] : model.named_modules()) {
    const bool is_block = has_blocks ? dynamic_cast<models::EncoderBlock*>(module) != nullptr
                                     : dynamic_cast<nn::Linear*>(module) != nullptr;
    if (is_block) fsdp::fully_shard(*module, {.mesh = mesh});
  }
  fsdp::fully_shard(model, {.mesh = mesh});
}

// Calls use(forward, zero_grad, update) for one way of training.
template <class Model, class Use>
void with_way(const std::string& way, Model model, const Mesh& mesh, const Use& use) {
  const comm::Group& group = mesh.group(size_t{0});
  if (way == "fsdp") {
    shard_blocks(model, mesh);
    optim::AdamW optimizer(model.named_parameters(), {.lr = 1e-3});
    return use(
        model, [&] { optimizer.zero_grad(); }, [&] { optimizer.step(); });
  }
  parallel::DistributedDataParallel<Model> ddp(std::move(model), group);
  if (way == "zero" || way == "zero2") {
    ZeroAdamW optimizer({{ddp.named_parameters(), {.lr = 1e-3}}}, group);
    if (way == "zero2") optimizer.shard_gradients(ddp);
    return use(
        ddp, [&] { optimizer.zero_grad(); }, [&] { optimizer.step(); });
  }
  CHORALE_CHECK(way == "ddp", "[bench] no way of training '", way, "'");
  optim::AdamW optimizer(ddp.named_parameters(), {.lr = 1e-3});
  use(
      ddp, [&] { optimizer.zero_grad(); }, [&] { optimizer.step(); });
}

// 256 MiB of parameters, of which each rank has rows.
NamedTensors checkpointed(const Mesh& mesh) {
  NamedTensors all;
  for (int i = 0; i < 16; ++i)
    all.emplace_back(concat("weight", i), distribute(full({4096, 1024}, i + 1.0), mesh, {shard(0)}));
  return all;
}

void with_checkpoint(const std::string& what, const Mesh& mesh, const std::filesystem::path& folder,
                     const std::function<void(const TimedCall&)>& use) {
  const NoGrad quiet;
  const comm::Group& group = mesh.group(size_t{0});
  const NamedTensors tensors = checkpointed(mesh);
  snapshot::State state = snapshot::state_of(tensors);
  if (what == "save") return use({[&] { snapshot::save(group, folder, state); }});
  if (what == "save anew")
    return use({[&] { snapshot::save(group, folder, state, {.replaced = snapshot::Replaced::kRemoved}); }});
  if (what == "load" || what == "load checked first") {
    snapshot::save(group, folder, state);
    snapshot::LoadOptions options;
    if (what != "load") options.verify = snapshot::Verify::kFirst;
    return use({[&] { snapshot::load(group, folder, state, options); }});
  }
  if (what == "copy") {
    NamedTensors copies;
    for (const auto& [name, x] : tensors) copies.emplace_back(name, clone(to_local(x)));
    return use({[&] {
      for (size_t i = 0; i < tensors.size(); ++i) copy_(copies[i].second, sharding::local_of(tensors[i].second));
    }});
  }
  CHORALE_CHECK(what == "held up", "[bench] nothing is known of 'checkpoint/", what, "'");
  snapshot::AsyncSaver saver(group);
  use({[&] { saver.start(folder, state); }, [&] { saver.wait(); }});
}

// Bytes of the two largest groups of parameters: of the whole ones, and of this rank's parts.
struct Blocks {
  double whole = 0, parts = 0;
};
Blocks two_largest_blocks(nn::Module& model) {
  std::vector<Blocks> all(2);
  for (const auto& [name, module] : model.named_modules()) {
    if (!fsdp::is_fully_sharded(*module)) continue;
    Blocks& block = all.emplace_back();
    for (const auto& [key, p] : fsdp::own_parameters(*module)) {
      const auto bytes = static_cast<double>(size_of(p.dtype()));
      block.whole += static_cast<double>(p.elems()) * bytes;
      block.parts += static_cast<double>(sharding::local_of(p).elems()) * bytes;
    }
  }
  std::sort(all.begin(), all.end(), [](const Blocks& a, const Blocks& b) { return a.whole > b.whole; });
  return {all[0].whole + all[1].whole, all[0].parts + all[1].parts};
}

}  // namespace

bool is_training_case(const std::string& name) {
  const std::vector<std::string> words = words_of(name);
  return words[0] == "checkpoint" || (words[0] == "step" && (words.back() == "fsdp" || words.back() == "zero" ||
                                                             words.back() == "zero2" || words.back() == "ddp"));
}

void with_training_case(const std::string& name, const Mesh& mesh, const std::filesystem::path& folder,
                        const std::function<void(const TimedCall&)>& use) {
  const std::vector<std::string> words = words_of(name);
  if (words[0] == "checkpoint") return with_checkpoint(words[1], mesh, folder, use);
  with_bench_model(words[1], [&](auto model, const Tensor& x, const Tensor& target) {
    with_way(words[2], std::move(model), mesh, [&](auto& forward, const auto& zero_grad, const auto& update) {
      use({[&] {
        zero_grad();
        backward(bench_loss(forward, x, target));
        update();
      }});
    });
  });
}

bool is_memory_case(const std::string& name) { return words_of(name)[0] == "memory"; }

// Note [Peak of a fully sharded step] A rank has its parts of parameters, gradients and two moments all the time. Most
// is there when backward begins, with all activations, or later, when one block's gradients are reduced while the next
// one's are made: the two largest gathered blocks, and the whole gradients of two. A block that is still gathered has
// no parts of gradients yet.
PeakMemory peak_memory(const std::string& name, const Mesh& mesh) {
  const std::vector<std::string> words = words_of(name);
  PeakMemory result;
  const auto current = [] { return static_cast<double>(cpu_allocator().stats().current_bytes); };
  const double start = current();
  with_bench_model(words[1], [&](auto model, const Tensor& x, const Tensor& target) {
    const double inputs = static_cast<double>(x.elems()) * static_cast<double>(x.elem_bytes()) +
                          static_cast<double>(target.elems()) * static_cast<double>(target.elem_bytes());
    with_way(words[2], std::move(model), mesh, [&](auto& forward, const auto& zero_grad, const auto& update) {
      double activations = 0;
      const auto step = [&] {
        zero_grad();
        const double before = current();
        const Tensor loss = bench_loss(forward, x, target);
        activations = current() - before - static_cast<double>(fsdp::sizes_of(forward).gathered);
        backward(loss);
        update();
      };
      step();
      step();
      cpu_allocator().reset_peak();
      step();
      result.measured = static_cast<double>(cpu_allocator().stats().peak_bytes) - start;
      if (words[2] != "fsdp") return;
      const fsdp::Sizes sizes = fsdp::sizes_of(forward);
      constexpr double kMoments = 2;  // of AdamW
      const Blocks largest = two_largest_blocks(forward);
      result.expected = inputs + (1 + kMoments) * static_cast<double>(sizes.parts) +
                        static_cast<double>(sizes.gradients) - largest.parts + 2 * largest.whole + activations;
    });
  });
  return result;
}

}  // namespace chorale::app::bench_sharded
