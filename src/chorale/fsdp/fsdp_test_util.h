// Models of the catalogue, and how a fully sharded one is compared with data-parallel training.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "chorale/api/api.h"
#include "chorale/comm/comm_counter.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/device/stream.h"
#include "chorale/fsdp/fully_shard.h"
#include "chorale/nn/nn.h"
#include "chorale/op/device_scope.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/ddp.h"

namespace chorale::fsdp {

using comm::CommCounter;
using comm::run_ranks;
using parallel::DistributedDataParallel;

// Numbers in [-1, 1] that depend on `seed` and the place only.
inline Tensor pattern(const Shape& sizes, double seed, DType dtype = DType::kF32) {
  std::vector<double> values(static_cast<size_t>(count_elems(sizes)));
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(1.7 * static_cast<double>(i) + 12.9898 * seed + 0.3);
  return to(Tensor::from(values, sizes), dtype);
}
template <class M>
M seeded(M module, double seed = 1) {
  const NoGrad quiet;
  for (const auto& [name, parameter] : module.named_parameters()) {
    // Biases are positive, so that most units are in the steeper half of leaky_relu.
    const double offset = parameter.dims() == 1 ? 0.3 : 0;
    if (is_floating(parameter.dtype())) copy_(parameter, add(mul(pattern(parameter.sizes(), seed += 1), 0.2), offset));
  }
  return module;
}

struct Mlp : nn::Module {
  nn::Linear in_proj, out_proj;
  CHORALE_MODULE(Mlp, in_proj, out_proj)
  explicit Mlp(int64_t dim, int64_t multiplier = 4) : in_proj(dim, dim * multiplier), out_proj(dim * multiplier, dim) {}
  Tensor forward(const Tensor& x) { return leaky_relu(out_proj(leaky_relu(in_proj(x), 0.25)), 0.25); }
};

struct MlpStack : nn::Module {
  std::vector<Mlp> layers;
  CHORALE_MODULE(MlpStack, layers)
  MlpStack(size_t count, int64_t dim, int64_t multiplier = 4) {
    for (size_t i = 0; i < count; ++i) layers.emplace_back(dim, multiplier);
  }
  Tensor forward(const Tensor& x) {
    Tensor y = x;
    for (Mlp& layer : layers) y = layer(y);
    return y;
  }
};

// A small transformer: ids in, logits out, the output weight tied to the table.
struct Block : nn::Module {
  nn::LayerNorm norm1, norm2;
  nn::Linear qkv, out, up, down;
  int64_t heads;
  CHORALE_MODULE(Block, norm1, norm2, qkv, out, up, down)
  Block(int64_t dim, int64_t with_heads)
      : norm1(dim),
        norm2(dim),
        qkv(dim, 3 * dim),
        out(dim, dim),
        up(dim, 4 * dim),
        down(4 * dim, dim),
        heads(with_heads) {}
  Tensor forward(const Tensor& x) {
    const int64_t n = x.size(0), t = x.size(1), d = x.size(2);
    const Tensor all = permute(reshape(qkv(norm1(x)), {n, t, 3, heads, d / heads}), {2, 0, 3, 1, 4});
    const Tensor q = select(all, 0, 0), k = select(all, 0, 1), v = select(all, 0, 2);
    const Tensor weights = softmax(
        mul(matmul(q, transpose(k, -2, -1)), 1 / std::sqrt(static_cast<double>(d) / static_cast<double>(heads))), -1);
    const Tensor mixed = reshape(permute(matmul(weights, v), {0, 2, 1, 3}), {n, t, d});
    const Tensor y = add(x, out(mixed));
    return add(y, down(leaky_relu(up(norm2(y)), 0.25)));
  }
};
struct Transformer : nn::Module {
  nn::Embedding tokens, positions;
  std::vector<Block> layers;
  nn::LayerNorm norm;
  nn::Linear output;
  bool recomputes = false;
  CHORALE_MODULE(Transformer, tokens, positions, layers, norm, output)
  explicit Transformer(size_t depth = 2, int64_t vocabulary = 8, int64_t length = 16, int64_t dim = 16,
                       bool tied = true)
      : tokens(vocabulary, dim), positions(length, dim), norm(dim), output(dim, vocabulary, {.bias = false}) {
    for (size_t i = 0; i < depth; ++i) layers.emplace_back(dim, 4);
    if (tied) output.weight = tokens.weight;
  }
  Tensor forward(const Tensor& ids) {
    Tensor x = add(tokens(ids), positions(arange(ids.size(1))));
    for (Block& layer : layers) {
      x = recomputes ? checkpoint([&](const std::vector<Tensor>& in) { return std::vector{layer(in[0])}; }, {x})[0]
                     : layer(x);
    }
    return output(norm(x));
  }
};
inline Tensor ids(const Shape& sizes, int seed, int64_t vocabulary) {
  std::vector<int64_t> values(static_cast<size_t>(count_elems(sizes)));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] =
        static_cast<int64_t>((i * 7 + static_cast<size_t>(seed) * 13 + i * i % 5) % static_cast<size_t>(vocabulary));
  }
  return Tensor::from(values, sizes);
}

inline Mesh line(const comm::Group& group) { return Mesh(group, {group.size()}, {"shard"}); }

template <class Layers>
void shard_layers_and_root(nn::Module& root, Layers& layers, const Options& options) {
  for (auto& layer : layers) fully_shard(layer, options);
  fully_shard(root, options);
}

inline std::vector<double> numbers(const Tensor& x) { return x.to_vector<double>(); }

// tolerance 0: the same bits.
inline void expect_close(const Tensor& a, const Tensor& b, double tolerance, const std::string& what) {
  ASSERT_EQ(a.sizes(), b.sizes()) << what;
  const auto x = numbers(a), y = numbers(b);
  for (size_t i = 0; i < x.size(); ++i) {
    if (tolerance == 0) {
      ASSERT_EQ(x[i], y[i]) << what << " element " << i;
    } else {
      ASSERT_NEAR(x[i], y[i], tolerance * (1 + std::abs(y[i]))) << what << " element " << i;
    }
  }
}

// Every parameter of `sharded` is the chunk of the same one of `reference`, and so is its gradient.
inline void expect_sharded_parity(const NamedTensors& sharded, const NamedTensors& reference, double tolerance,
                                  const std::string& what) {
  ASSERT_EQ(sharded.size(), reference.size());
  const NoGrad quiet;
  bool none = true, zero = true;
  for (size_t i = 0; i < sharded.size(); ++i) {
    const std::string& name = sharded[i].first;
    const Tensor& tensor = sharded[i].second;
    ASSERT_TRUE(reference[i].first.ends_with(name))
        << name << " beside " << reference[i].first;  // DDP's begin with "module."
    ASSERT_TRUE(tensor.is_sharded()) << name;
    const Tensor& whole = reference[i].second;
    const auto part = [&](const Tensor& of) {
      return to_local(distribute(detach(of), mesh_of(tensor), placements_of(tensor), std::nullopt));
    };
    expect_close(to_local(detach(tensor)), part(whole), tolerance, concat(what, " ", name));
    const Tensor mine = gradient(tensor), theirs = gradient(whole);
    ASSERT_EQ(mine.defined(), theirs.defined()) << what << " gradient of " << name;
    if (!mine.defined()) continue;
    expect_close(to_local(mine), part(theirs), tolerance, concat(what, " gradient of ", name));
    none = false;
    zero = zero && sum(abs(theirs)).item<double>() == 0;
  }
  EXPECT_TRUE(none || !zero) << what << ": all gradients are zero, which proves nothing";
}

// A fully sharded model and a data-parallel one, both made of `model`, train alike.
template <class Optimizer, class M, class Shard, class Input>
void expect_parity(comm::Group& group, const M& model, const Shard& shard, const Input& input, int steps, double lr,
                   double tolerance = 0) {
  DistributedDataParallel<M> reference(clone(model), group);
  M mine = clone(model);
  shard(mine);
  Optimizer one(reference.named_parameters(), {.lr = lr}), two(mine.named_parameters(), {.lr = lr});
  for (int step = 0; step < steps; ++step) {
    // Both ways of clearing gradients.
    reference.zero_grad(step % 2 == 0);
    two.zero_grad(step % 2 == 0 ? optim::ZeroGrad::kToNone : optim::ZeroGrad::kInPlace);
    const Tensor x = input(step);
    const Tensor loss = sum(reference(x)), other = sum(mine(x));
    expect_close(other, loss, tolerance, concat("loss of step ", step));
    backward(loss);
    backward(other);
    one.step();
    two.step();
    expect_sharded_parity(mine.named_parameters(), reference.named_parameters(), tolerance, concat("step ", step));
    if (testing::Test::HasFatalFailure()) return;
  }
}

// Ranks are late at any place; parameters are gathered as they are needed, stay on the host, or are gathered by hand
// ahead of each forward.
enum class LateRanks { kPlain, kOffload, kByHand };
inline void expect_parity_of_late_ranks(Device device, LateRanks how, double tolerance = 0) {
  run_ranks(8, [&](comm::Group& group) {
    const DeviceScope made_there(device);
    std::optional<StreamScope> own;
    if (device != kCpu) own.emplace(make_stream(device));  // ranks that are threads would share the default one
    const Mesh mesh = line(group);
    Transformer model = seeded(Transformer(3, 1024, 64));
    model.to(device);
    int late = 0;  // which place a rank is late at, in turn
    const auto wait_at = [&](int place) {
      if (late++ % 5 == (place + group.rank()) % 5) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    };
    const auto input = [&](int step) {
      wait_at(0);  // before the optimizer's values are used
      return to(ids({3, 64}, group.rank() + 10 * step, 1024), device);
    };
    for (const ReshardAfterForward policy : {ReshardAfterForward(true), {false}, {2}}) {
      expect_parity<optim::Adam>(
          group, model,
          [&](Transformer& m) {
            // Ranks wait before its parameters are gathered, after its forward, and before its gradients are reduced.
            for (Block& layer : m.layers) {
              layer.before_forward([&](nn::Module&, std::vector<Tensor>&) { wait_at(1); });
              layer.after_forward([&](nn::Module&, const std::vector<Tensor>&, std::vector<Tensor>&) { wait_at(2); });
              layer.after_backward([&](std::vector<Tensor>&, const std::vector<Tensor>&) { wait_at(3); });
            }
            shard_layers_and_root(
                m, m.layers, {.mesh = mesh, .reshard_after_forward = policy, .offload = how == LateRanks::kOffload});
            if (how != LateRanks::kByHand) return;
            m.before_forward([&m](nn::Module&, std::vector<Tensor>&) {
              for (Block& layer : m.layers) unshard(layer, true);
            });
          },
          input, 10, 1e-2, tolerance);
      if (testing::Test::HasFatalFailure()) return;
    }
  });
}

}  // namespace chorale::fsdp
