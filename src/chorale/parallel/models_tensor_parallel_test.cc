// GPT-2 and BERT in tensor parallel train as on one rank: with 2 and 4 ranks, with sequence parallel, with the loss
// over split classes, and as replicas of shards.
#include <gtest/gtest.h>

#include "chorale/api/api.h"
#include "chorale/comm/comm_counter.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/eager/sim_kernels.h"
#include "chorale/models/bert.h"
#include "chorale/models/gpt2.h"
#include "chorale/models/mlp.h"
#include "chorale/nn/nn.h"
#include "chorale/op/samples.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/ddp.h"
#include "chorale/parallel/plans.h"
#include "chorale/testing/soak_test_util.h"

namespace chorale::parallel {
namespace {

using comm::CommCounter;
using comm::run_ranks;

constexpr int kSteps = 10;
constexpr int64_t kBatch = 4, kTokens = 6;

models::Gpt2Config small(double dropout) {
  return {.vocab_size = 13,  // which nothing divides
          .n_positions = 8,
          .n_embd = 16,
          .n_layer = 2,
          .n_head = 4,
          .embd_pdrop = dropout,
          .resid_pdrop = dropout,
          .attn_pdrop = dropout};
}

models::Gpt2 make(DType dtype, double dropout) {
  models::Gpt2 model(small(dropout));
  model.to(dtype);
  const NoGrad quiet;
  int seed = 1;
  for (const Tensor& p : model.parameters()) copy_(p, mul(to(op::sample(p.sizes(), seed++), dtype), 0.3));
  return model;
}

Tensor ids(int step, int64_t rows = kBatch) {
  return to(op::sample_ints({rows, kTokens + 1}, 0, 13, 100 + step), DType::kI64);
}

Tensor loss_of(const Tensor& logits, const Tensor& batch) {
  const Tensor target = reshape(narrow(batch, 1, 1, kTokens), {-1});
  const Tensor flat = reshape(logits, {target.size(0), 13});
  return flat.is_sharded() ? to_local(loss_parallel(flat, target)) : cross_entropy(flat, target);
}

// Losses of ten steps of SGD. Parameters are updated by hand: each with its gradient, placed as it is.
template <class Model, class Prepare>
std::vector<double> train(Model& model, const Prepare& rows_of) {
  std::vector<double> losses;
  default_generator().reseed(3);
  for (int step = 0; step < kSteps; ++step) {
    const Tensor batch = rows_of(ids(step));
    const Tensor loss = loss_of(model(contiguous(narrow(batch, 1, 0, kTokens))), batch);
    losses.push_back(loss.template item<double>());
    backward(loss);
    const NoGrad quiet;
    for (const Tensor& p : model.parameters()) {
      sub_(p, mul(gradient(p), 0.5));
      set_gradient(p, {});
    }
  }
  return losses;
}
Tensor all_rows(const Tensor& batch) { return batch; }

void expect_losses(const std::vector<double>& found, const std::vector<double>& wanted, double tolerance) {
  ASSERT_EQ(found.size(), wanted.size());
  for (size_t i = 0; i < found.size(); ++i) ASSERT_NEAR(found[i], wanted[i], tolerance) << "step " << i;
}

void expect_parameters(models::Gpt2& model, models::Gpt2& one, double tolerance) {
  const auto p = model.named_parameters(), q = one.named_parameters();
  ASSERT_EQ(p.size(), q.size());
  for (size_t i = 0; i < p.size(); ++i) {
    const Tensor whole = full_tensor(detach(p[i].second));
    const double error = max(abs(sub(to(whole, DType::kF64), to(detach(q[i].second), DType::kF64)))).item<double>();
    EXPECT_LE(error, tolerance) << p[i].first;
  }
}

// A few of all combinations, unless there is time.
bool is_chosen(int ranks, bool sequence, bool split_loss, DType dtype) {
  return sequence == split_loss || (ranks == 2 && dtype == DType::kF64) || soaking();
}

// Calls f(ranks, sequence parallel, loss parallel).
template <class F>
void for_each_split(DType dtype, const F& f) {
  for (const int ranks : {2, 4}) {
    for (const bool sequence : {false, true}) {
      for (const bool split_loss : {false, true}) {
        if (testing::Test::HasFailure() || !is_chosen(ranks, sequence, split_loss, dtype)) continue;
        SCOPED_TRACE(
            concat(ranks, " ranks", sequence ? ", sequence parallel" : "", split_loss ? ", loss parallel" : ""));
        f(ranks, sequence, split_loss);
      }
    }
  }
}

void expect_gpt2_trains_as_one_rank(DType dtype) {
  models::Gpt2 one = make(dtype, 0);
  const std::vector<double> wanted = train(one, all_rows);
  const double tolerance = dtype == DType::kF64 ? 1e-9 : 1e-4;
  for_each_split(dtype, [&](int ranks, bool sequence, bool split_loss) {
    run_ranks(ranks, [&](comm::Group& group) {
      const Mesh mesh(group, {ranks}, {"tp"});
      models::Gpt2 model = make(dtype, 0);
      tensor_parallel(model, mesh, plan_for(model, {.sequence_parallel = sequence, .loss_parallel = split_loss}));
      EXPECT_TRUE(model.lm_head.weight.is(model.transformer.wte.weight)) << "tied";
      expect_losses(train(model, all_rows), wanted, tolerance);
      expect_parameters(model, one, tolerance);
    });
  });
}
TEST(Gpt2TensorParallel, TrainsAsOneRankDoes) { expect_gpt2_trains_as_one_rank(DType::kF64); }
TEST(Gpt2TensorParallel, TrainsAsOneRankDoesInF32) { expect_gpt2_trains_as_one_rank(DType::kF32); }

TEST(Gpt2TensorParallel, TrainsOnDevicesWithTheBitsOfTheCpu) {
  eager::add_sim_device({.most_delay = std::chrono::microseconds(20)});
  for (const bool split : {false, true}) {
    run_ranks(2, [&](comm::Group& group) {
      const Mesh here(group, {2}, {"tp"});
      const auto trained = [&](const Mesh& mesh) {
        models::Gpt2 model = make(DType::kF64, 0.1);
        model.to(mesh.device());
        tensor_parallel(model, mesh, plan_for(model, {.sequence_parallel = split, .loss_parallel = split}));
        return train(model, [&](const Tensor& batch) { return to(batch, mesh.device()); });
      };
      EXPECT_EQ(trained(here.on("sim")), trained(here)) << split;
    });
  }
}

// A plan of four lines: the projections say how their weights are laid out, and everything else is whole.
TEST(Gpt2TensorParallel, TakesAPlanThatNamesLayersOnly) {
  models::Gpt2 one = make(DType::kF64, 0);
  const std::vector<double> wanted = train(one, all_rows);
  run_ranks(2, [&](comm::Group& group) {
    const Mesh mesh(group, {1, 2}, {"dp", "tp"});
    models::Gpt2 model = make(DType::kF64, 0);
    tensor_parallel(model, mesh["tp"],
                    {{"transformer.h.*.attn.c_attn", Colwise{}},
                     {"transformer.h.*.attn.c_proj", Rowwise{}},
                     {"transformer.h.*.mlp.c_fc", Colwise{}},
                     {"transformer.h.*.mlp.c_proj", Rowwise{}}});
    const Tensor& qkv = model.transformer.h[0].attention_in.weight;
    EXPECT_EQ(placements_of(qkv), Placements{strided_shard(1, 3)}) << "[in, out], by heads";
    EXPECT_EQ(to_local(model.transformer.h[0].mlp_in.weight).sizes(), (Shape{16, 32}));
    EXPECT_FALSE(model.transformer.wte.weight.is_sharded());
    expect_losses(train(model, all_rows), wanted, 1e-9);
  });
}

models::BertForMaskedLM make_bert(DType dtype, double dropout) {
  models::BertForMaskedLM model({.vocab_size = 13,
                                 .hidden_size = 16,
                                 .num_hidden_layers = 2,
                                 .num_attention_heads = 4,
                                 .intermediate_size = 24,
                                 .max_position_embeddings = 8,
                                 .hidden_dropout_prob = dropout,
                                 .attention_probs_dropout_prob = dropout});
  model.to(dtype);
  const NoGrad quiet;
  int seed = 1;
  for (const Tensor& p : model.parameters()) copy_(p, mul(to(op::sample(p.sizes(), seed++), dtype), 0.3));
  return model;
}

template <class Model, class Prepare>
std::vector<double> train_bert(Model& model, const Prepare& rows_of) {
  std::vector<double> losses;
  default_generator().reseed(3);
  for (int step = 0; step < kSteps; ++step) {
    const Tensor batch = rows_of(ids(step));
    const Tensor tokens = contiguous(narrow(batch, 1, 0, kTokens));
    const Tensor mask = to(ne(tokens, 5), DType::kI64);
    const Tensor loss = loss_of(model(models::BertInput{.input_ids = tokens, .attention_mask = mask}), batch);
    losses.push_back(loss.template item<double>());
    backward(loss);
    const NoGrad quiet;
    for (const Tensor& p : model.parameters()) {
      sub_(p, mul(gradient(p), 0.2));
      set_gradient(p, {});
    }
  }
  return losses;
}

// Two all-reduces per layer in forward and two in backward, and the vocabulary's; with sequence parallel each is a
// reduce-scatter and an all-gather.
void expect_bert_sends(models::BertForMaskedLM& model, bool sequence) {
  CommCounter counter;
  const Tensor batch = ids(0);
  const Tensor y = model(models::BertInput{.input_ids = contiguous(narrow(batch, 1, 0, kTokens))});
  EXPECT_EQ(counter.all_reduces(), sequence ? 0 : 5) << counter;
  EXPECT_EQ(counter.reduce_scatters(), sequence ? 5 : 0) << counter;
  EXPECT_EQ(counter.all_gathers(), sequence ? 5 : 0) << counter;
  const Tensor loss = loss_of(y, batch);
  counter.reset();
  backward(loss);
  EXPECT_EQ(counter.all_reduces(), sequence ? 0 : 5) << counter;
  EXPECT_EQ(counter.reduce_scatters(), sequence ? 5 : 0) << counter;
  EXPECT_EQ(counter.all_gathers(), sequence ? 5 : 0) << counter;
}

void expect_bert_trains_as_one_rank(DType dtype) {
  models::BertForMaskedLM one = make_bert(dtype, 0);
  const std::vector<double> wanted = train_bert(one, all_rows);
  for_each_split(dtype, [&](int ranks, bool sequence, bool split_loss) {
    run_ranks(ranks, [&](comm::Group& group) {
      const Mesh mesh(group, {ranks}, {"tp"});
      models::BertForMaskedLM model = make_bert(dtype, 0);
      tensor_parallel(model, mesh, plan_for(model, {.sequence_parallel = sequence, .loss_parallel = split_loss}));
      expect_losses(train_bert(model, all_rows), wanted, dtype == DType::kF64 ? 1e-9 : 1e-4);
      // The same holds where parts have unequal lengths, and some are empty.
      if (split_loss) expect_bert_sends(model, sequence);
    });
  });
}
TEST(BertTensorParallel, TrainsAsOneRankDoes) { expect_bert_trains_as_one_rank(DType::kF64); }
TEST(BertTensorParallel, TrainsAsOneRankDoesInF32) { expect_bert_trains_as_one_rank(DType::kF32); }

// Ranks that are processes have generators of their own; those of one seed draw the numbers of one rank. Another bit of
// a mask would show in the first loss.
template <class Make, class Train>
void expect_drops_as_one_rank(const Make& make_model, const Train& train_model) {
  const std::vector<int> ended = comm::run_processes(4, [&](comm::Group& group) {
    const Mesh pairs(group, {2, 2}, {"twice", "tp"}), line(group, {4}, {"tp"});
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      auto one = make_model(dtype, 0.2), certain = make_model(dtype, 0);
      const std::vector<double> wanted = train_model(one);
      EXPECT_GT(std::abs(wanted[0] - train_model(certain)[0]), 1e-3) << "something is dropped";
      for (const Mesh& mesh : {pairs["tp"], line}) {
        for (const bool sequence : {false, true}) {
          SCOPED_TRACE(concat(dtype, ", ", mesh.size(), " ranks", sequence ? ", sequence parallel" : ""));
          auto model = make_model(dtype, 0.2);
          tensor_parallel(model, mesh, plan_for(model, {.sequence_parallel = sequence}));
          expect_losses(train_model(model), wanted, dtype == DType::kF64 ? 1e-9 : 1e-4);
        }
      }
    }
  });
  EXPECT_EQ(ended, (std::vector<int>{0, 0, 0, 0}));
}
TEST(Gpt2TensorParallel, DropsWhatOneRankDrops) {
  expect_drops_as_one_rank(make, [](models::Gpt2& model) { return train(model, all_rows); });
}
TEST(BertTensorParallel, DropsWhatOneRankDrops) {
  expect_drops_as_one_rank(make_bert, [](models::BertForMaskedLM& model) { return train_bert(model, all_rows); });
}

TEST(Gpt2TensorParallel, SendsWhatMegatronSends) {
  run_ranks(2, [](comm::Group& group) {
    const Mesh mesh(group, {2}, {"tp"});
    for (const bool sequence : {false, true}) {
      models::Gpt2 model = make(DType::kF64, 0);
      tensor_parallel(model, mesh, plan_for(model, {.sequence_parallel = sequence, .loss_parallel = true}));
      const Tensor batch = ids(0);
      CommCounter counter;
      const Tensor logits = model(contiguous(narrow(batch, 1, 0, kTokens)));
      // Two blocks with two each, and one for the vocabulary; with sequence parallel every all-reduce is a
      // reduce-scatter and an all-gather.
      if (sequence) {
        EXPECT_EQ(counter.reduce_scatters(), 5) << counter;
        EXPECT_EQ(counter.all_gathers(), 5) << counter;
        EXPECT_EQ(counter.total(), 10) << counter;
      } else {
        EXPECT_EQ(counter.all_reduces(), 5) << counter;
        EXPECT_EQ(counter.total(), 5) << counter;
      }
      const Tensor loss = loss_of(logits, batch);
      counter.reset();
      backward(loss);
      if (sequence) {
        EXPECT_EQ(counter.reduce_scatters(), 5) << counter;
        EXPECT_EQ(counter.all_gathers(), 5) << counter;
      } else {
        EXPECT_EQ(counter.all_reduces(), 5) << counter;
      }
    }
  });
}

// The rows of this replica.
auto share_of(const Mesh& mesh) {
  return [&mesh](const Tensor& batch) { return narrow(batch, 0, mesh.coordinate("dp") * kBatch / 2, kBatch / 2); };
}

TEST(ReplicasOfShards, TrainAsOneRank) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    models::Gpt2 one = make(dtype, 0);
    models::BertForMaskedLM one_bert = make_bert(dtype, 0);
    const std::vector<double> wanted = train(one, all_rows), wanted_bert = train_bert(one_bert, all_rows);
    const double tolerance = dtype == DType::kF64 ? 1e-9 : 1e-4;
    for (const bool sequence : {false, true}) {
      run_ranks(4, [&](comm::Group& group) {
        const Mesh mesh(group, {2, 2}, {"dp", "tp"});
        models::Gpt2 gpt = make(dtype, 0);
        tensor_parallel(gpt, mesh["tp"], plan_for(gpt, {.sequence_parallel = sequence}));
        DistributedDataParallel<models::Gpt2> ddp(std::move(gpt), {.mesh = mesh["dp"]});
        std::vector<double> losses = train(ddp, share_of(mesh));
        mesh.group("dp").all_reduce(std::span(losses), Reduce::kAverage).wait();
        expect_losses(losses, wanted, tolerance);

        models::BertForMaskedLM bert = make_bert(dtype, 0);
        tensor_parallel(bert, mesh["tp"], plan_for(bert, {.sequence_parallel = sequence}));
        DistributedDataParallel<models::BertForMaskedLM> ddp_bert(std::move(bert), {.mesh = mesh["dp"]});
        losses = train_bert(ddp_bert, share_of(mesh));
        mesh.group("dp").all_reduce(std::span(losses), Reduce::kAverage).wait();
        expect_losses(losses, wanted_bert, tolerance);
      });
    }
  }
}

TEST(MlpTensorParallel, TrainsAsOneRankDoes) {
  const auto make_mlp = [] {
    nn::Sequential model = models::mlp({6, 10, 7, 9, 5, 3});  // five layers: the last has no partner
    model.to(DType::kF64);
    const NoGrad quiet;
    int seed = 1;
    for (const Tensor& p : model.parameters()) copy_(p, op::sample(p.sizes(), seed++));
    return model;
  };
  const auto step = [](nn::Sequential& model, int seed) {
    const Tensor x = op::sample({8, 6}, 40 + seed);
    const Tensor loss = mean(square(model(x)));
    backward(loss);
    return loss.item<double>();
  };
  nn::Sequential one = make_mlp();
  std::vector<double> wanted, norms;
  optim::AdamW optimizer(one.named_parameters(), {.lr = 0.01});
  for (int i = 0; i < kSteps; ++i) {
    optimizer.zero_grad();
    wanted.push_back(step(one, i));
    norms.push_back(optim::clip_grad_norm(one.parameters(), 0.5));
    optimizer.step();
  }
  for (const int ranks : {2, 3, 4}) {
    run_ranks(ranks, [&](comm::Group& group) {
      nn::Sequential model = make_mlp();
      tensor_parallel(model, Mesh(group, {ranks}), plan_for(model));
      optim::AdamW many(model.named_parameters(), {.lr = 0.01});
      for (int i = 0; i < kSteps; ++i) {
        many.zero_grad();
        CommCounter counter;
        ASSERT_NEAR(step(model, i), wanted[static_cast<size_t>(i)], 1e-9) << "step " << i;
        EXPECT_EQ(counter.all_reduces(), 3)
            << "one per pair in forward; in backward one, between the pairs: " << counter;
        EXPECT_EQ(counter.total(), 3) << counter;
        ASSERT_NEAR(optim::clip_grad_norm(model.parameters(), 0.5), norms[static_cast<size_t>(i)], 1e-9)
            << "step " << i;
        many.step();
      }
    });
  }
  nn::Sequential small{nn::Linear(2, 2)};
  EXPECT_THROW(plan_for(small), InvalidArgument);
}

}  // namespace
}  // namespace chorale::parallel
