// Compiled functions around tensor parallel modules: graphs hold a rank's parts, and collectives between them as nodes.
#include <gmock/gmock.h>

#include <cmath>
#include <memory>
#include <optional>

#include "chorale/api/compile.h"
#include "chorale/models/gpt2.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/plans.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

struct Split : nn::Module {
  Linear a{64, 128}, b{128, 64}, c{64, 128}, d{128, 64};
  CHORALE_MODULE(Split, a, b, c, d)
  Tensor forward(const Tensor& x) {
    const Tensor h = x + b(relu(a(x)));
    return h * 2 + d(tanh(c(h)));
  }
};

void split(Split& model, comm::Group& group) {
  const Mesh mesh(group, {group.size()}, {"tp"});
  tensor_parallel(model, mesh["tp"], {{"[ac]", Colwise{}}, {"[bd]", Rowwise{}}});
}

std::vector<float> whole_values(const Tensor& x) {
  const NoGrad quiet;
  return (x.is_sharded() ? full_tensor(detach(x)) : x).to_vector<float>();
}

using Values = std::vector<std::vector<float>>;

void expect_close(const Values& found, const Values& expected, const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  for (size_t i = 0; i < found.size(); ++i) {
    ASSERT_EQ(found[i].size(), expected[i].size()) << what;
    for (size_t j = 0; j < found[i].size(); ++j)
      ASSERT_NEAR(found[i][j], expected[i][j], 1e-5 * (1 + std::abs(expected[i][j]))) << what << " " << i << " " << j;
  }
}

void append_parameters(Values& found, nn::Module& model) {
  for (const Tensor& p : model.parameters()) found.push_back(whole_values(p));
}

// What a rank begins to send is waited for in the graph, before it is read.
TEST(CompiledTensorParallel, WaitsForEveryCollectiveThatItBegins) {
  run_ranks(2, [](comm::Group& group) {
    manual_seed(3);
    Split model;
    split(model, group);
    const NoGrad quiet;
    const auto forward = [&](const Tensor& in) { return sum(square(model(in))); };
    auto f = compile(forward);
    for (int call = 0; call < 3; ++call) {
      const Tensor x = pattern({32, 64}, call);
      EXPECT_EQ(f(x).item<float>(), forward(x).item<float>()) << call;
    }
    const std::string text = explain(f).graphs[0].text;
    size_t begun = 0;
    for (size_t at = text.find(" = collective_start("); at != std::string::npos;
         at = text.find(" = collective_start(", at + 1)) {
      ++begun;
      const size_t start = text.rfind('%', at);  // "%16: f32[32, 64] = collective_start(…"
      const std::string name = text.substr(start, text.find(':', start) - start);
      EXPECT_NE(text.find("collective_wait(" + name + ")"), std::string::npos) << name << " in " << text;
    }
    EXPECT_EQ(begun, 2u);
  });
}

// The loss, and the gradients of the input and of every parameter, of a forward pass that is compiled. Groups that only
// a gradient talks to belong to the graph.
TEST(CompiledTensorParallel, AForwardPassHasTheGradientsOfAnEagerOne) {
  run_ranks(2, [](comm::Group& group) {
    manual_seed(3);
    Split model;
    split(model, group);
    const Tensor x = set_requires_grad(pattern({32, 64}, 1));
    const auto forward = [&](const Tensor& in) { return sum(square(model(in))); };
    const auto run = [&](const auto& function) {
      Values found;
      for (int call = 0; call < 3; ++call) {
        model.zero_grad();
        set_gradient(x, {});
        const Tensor loss = function(x);
        backward(loss);
        found.push_back({loss.item<float>()});
        found.push_back(gradient(x).to_vector<float>());
        for (const Tensor& p : model.parameters()) {
          EXPECT_EQ(placements_of(gradient(p)), placements_of(p));
          found.push_back(whole_values(gradient(p)));
        }
      }
      return found;
    };
    const Values expected = run(forward);
    for (const bool whole : {false, true}) {
      auto f = compile(forward, {.whole_graph = whole});
      EXPECT_EQ(run(f), expected) << whole;
      EXPECT_EQ(explain(f).compiles, 1) << explain(f).text();
      EXPECT_THAT(explain(f).breaks, testing::IsEmpty());
    }
  });
}

// Losses and parameters of six steps, which are forward, backward and update in one function.
Values train_split(comm::Group& group, bool adam, const std::optional<CompileOptions>& options) {
  manual_seed(3);
  Split model;
  split(model, group);
  std::unique_ptr<optim::Optimizer> optimizer;
  if (adam) {
    optimizer = std::make_unique<optim::AdamW>(model.named_parameters(), optim::AdamWOptions{.lr = 0.01});
  } else {
    optimizer = std::make_unique<optim::Sgd>(model.named_parameters(), optim::SgdOptions{.lr = 0.001, .momentum = 0.9});
  }
  const auto step = [&](const Tensor& x) {
    optimizer->zero_grad();
    const Tensor loss = sum(square(model(x)));
    backward(loss);
    optim::clip_grad_norm(model.parameters(), 100);
    optimizer->step();
    return loss;
  };
  auto f = compile(step, options.value_or(CompileOptions()));
  Values found;
  for (int at = 0; at < 6; ++at) {
    const Tensor x = pattern({32, 64}, at);
    found.push_back({(options ? f(x) : step(x)).item<float>()});
  }
  append_parameters(found, model);
  if (options && options->whole_graph) {
    EXPECT_EQ(explain(f).compiles, 2) << "the first call makes the states";
    EXPECT_EQ(explain(f).runs, 6);
  }
  return found;
}

TEST(CompiledTensorParallel, StepsHaveTheBitsOfEagerOnes) {
  run_ranks(2, [](comm::Group& group) {
    for (const bool adam : {false, true}) {
      const Values expected = train_split(group, adam, {});
      for (const bool whole : {false, true}) {
        EXPECT_EQ(train_split(group, adam, CompileOptions{.whole_graph = whole}), expected) << adam << whole;
      }
    }
  });
}

// Micro-batches add to gradients that are there: two graphs, whatever memory the gradients have.
TEST(CompiledTensorParallel, GradientsAddUp) {
  run_ranks(2, [](comm::Group& group) {
    const auto train = [&](bool compiled) {
      manual_seed(3);
      Split model;
      split(model, group);
      const auto micro_batch = [&](const Tensor& x) {
        const Tensor loss = sum(square(model(x)));
        backward(loss);
        return loss;
      };
      auto f = compile(micro_batch, {.whole_graph = true});
      Values found;
      for (int step = 0; step < 3; ++step) {
        model.zero_grad();
        for (int part = 0; part < 3; ++part) {
          const Tensor x = pattern({32, 64}, 3 * step + part);
          compiled ? f(x) : micro_batch(x);
        }
        for (const Tensor& p : model.parameters()) found.push_back(whole_values(gradient(p)));
      }
      EXPECT_EQ(explain(f).compiles, compiled ? 2 : 0) << explain(f).text();
      return found;
    };
    EXPECT_EQ(train(true), train(false));
  });
}

// Arguments, results and what is between two segments may be sharded: gradients come as the tensors are placed.
TEST(CompiledTensorParallel, ShardedTensorsGoInAndOut) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh(group, {2});
    const auto function = [](const Tensor& x, const Tensor& w) {
      const Tensor y = matmul(x, w);
      return std::pair(y, sum(y * y));
    };
    const auto broken = [&](const Tensor& x, const Tensor& w) {
      const Tensor y = matmul(x, w);
      break_graph("looked at");
      return std::pair(y * 2, sum(y));
    };
    const auto check = [&](const auto& called, bool whole) {
      for (const auto& [of_x, of_w] :
           {std::pair(replicate(), shard(1)), std::pair(shard(1), shard(0)), std::pair(shard(0), replicate())}) {
        auto f = compile(called, {.whole_graph = whole});
        const auto run = [&](const auto& g) {
          Values found;
          for (int call = 0; call < 3; ++call) {
            const Tensor x = set_requires_grad(distribute(pattern({6, 8}, call), mesh, {of_x}));
            const Tensor w = set_requires_grad(distribute(pattern({8, 4}, call + 7), mesh, {of_w}));
            const auto [y, total] = g(x, w);
            const Tensor loss = full_tensor(sum(square(y))) + full_tensor(total);
            backward(loss);
            found.push_back(whole_values(y));
            found.push_back({loss.template item<float>()});
            for (const Tensor& leaf : {x, w}) found.push_back(whole_values(gradient(leaf)));
          }
          return found;
        };
        const Values expected = run(called);
        expect_close(run(f), expected, concat(of_x, of_w, whole));
        EXPECT_EQ(explain(f).compiles, explain(f).breaks.empty() ? 1 : 2) << explain(f).text();
      }
    };
    check(function, false);
    check(function, true);
    check(broken, false);
  });
}

// The same calls on parts that are placed otherwise, or on another mesh, are another graph.
TEST(CompiledTensorParallel, PlacementsAreCompared) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh(group, {2}), mirrored(group, {2}, std::vector<std::string>{"other"});
    const auto function = [](const Tensor& x) { return full_tensor(sum(mul(x, x), {0})); };
    for (const bool whole : {false, true}) {
      auto f = compile(function, {.whole_graph = whole});
      for (const Placement& placed : {shard(0), shard(1), replicate(), shard(0)}) {
        for (const Mesh* over : {&mesh, &mirrored}) {
          const Tensor x = set_requires_grad(distribute(pattern({4, 4}, 1), *over, {placed}));
          const Tensor y = f(x);
          EXPECT_EQ(y.to_vector<float>(), function(detach(x)).to_vector<float>());
          backward(sum(y));
          EXPECT_EQ(whole_values(gradient(x)), mul(pattern({4, 4}, 1), 2).to_vector<float>());
        }
      }
    }
  });
}

// Replicas of split models: parts are averaged over the replicas inside of the graph.
TEST(CompiledTensorParallel, ReplicasTrainAsInEager) {
  run_ranks(4, [](comm::Group& group) {
    const Mesh mesh(group, {2, 2}, {"dp", "tp"});
    const auto train = [&](const std::optional<CompileOptions>& options) {
      Split inner = seeded(Split(), 3);
      tensor_parallel(inner, mesh["tp"], {{"[ac]", Colwise{}}, {"[bd]", Rowwise{}}});
      DistributedDataParallel<Split> ddp(std::move(inner), {.mesh = mesh["dp"]});
      optim::AdamW optimizer(ddp.module().named_parameters(), {.lr = 0.01});
      const auto step = [&](const Tensor& x) {
        optimizer.zero_grad();
        const Tensor loss = sum(square(ddp(x)));
        backward(loss);
        optimizer.step();
        return loss;
      };
      auto f = compile(step, options.value_or(CompileOptions()));
      Values found;
      for (int at = 0; at < 5; ++at) {
        const Tensor x = pattern({8, 64}, 2 * at + mesh.coordinates()[0]);
        found.push_back({(options ? f(x) : step(x)).item<float>()});
      }
      append_parameters(found, ddp.module());
      return found;
    };
    const Values expected = train({});
    for (const bool whole : {false, true})
      expect_close(train(CompileOptions{.whole_graph = whole}), expected, concat(whole));
  });
}

// GPT-2 with dropout and the loss over split classes, in sequence parallel and without.
TEST(CompiledTensorParallel, Gpt2TrainsAsInEager) {
  run_ranks(2, [](comm::Group& group) {
    const models::Gpt2Config config{.vocab_size = 13,
                                    .n_positions = 8,
                                    .n_embd = 16,
                                    .n_layer = 2,
                                    .n_head = 4,
                                    .embd_pdrop = 0.1,
                                    .resid_pdrop = 0.1,
                                    .attn_pdrop = 0.1};
    const auto train = [&](bool sequence, const std::optional<CompileOptions>& options) {
      models::Gpt2 model = seeded(models::Gpt2(config), 1);
      const Mesh mesh(group, {2});
      tensor_parallel(model, mesh, plan_for(model, {.sequence_parallel = sequence}));
      optim::AdamW optimizer(model.named_parameters(), {.lr = 0.01});
      const auto step = [&](const Tensor& ids, const Tensor& target) {
        optimizer.zero_grad();
        const Tensor logits = reshape(model(ids), {target.size(0), 13});
        const Tensor loss =
            logits.is_sharded() ? to_local(loss_parallel(logits, target)) : cross_entropy(logits, target);
        backward(loss);
        optimizer.step();
        return loss;
      };
      auto f = compile(step, options.value_or(CompileOptions()));
      manual_seed(5);
      Values found;
      for (int at = 0; at < 4; ++at) {
        const Tensor ids = randint(0, 13, {4, 6}), target = randint(0, 13, {24});
        found.push_back({(options ? f(ids, target) : step(ids, target)).item<float>()});
      }
      append_parameters(found, model);
      return found;
    };
    for (const bool sequence : {false, true}) {
      const Values expected = train(sequence, {});
      for (const bool whole : {false, true}) {
        EXPECT_EQ(train(sequence, CompileOptions{.whole_graph = whole}), expected) << sequence << whole;
      }
    }
  });
}

}  // namespace
}  // namespace chorale::parallel
