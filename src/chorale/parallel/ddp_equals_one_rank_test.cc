// The proof: N ranks that train on a part of each batch equal one rank that trains on the whole.
#include "chorale/base/parallel_for.h"
#include "chorale/models/cnn.h"
#include "chorale/models/encoder.h"
#include "chorale/models/formula_test_util.h"
#include "chorale/models/mlp.h"
#include "chorale/op/samples.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/sync_batch_norm.h"
#include "chorale/parallel/zoo_test_util.h"
#include "chorale/testing/soak_test_util.h"

namespace chorale::parallel {
namespace {

constexpr int kSteps = 20;

// A step's inputs and targets, the whole batch.
struct Batch {
  Tensor x, target;
};
using Batches = std::function<Batch(int step)>;

Batches features(const Shape& sizes, DType dtype) {
  return [=](int step) {
    std::vector<int64_t> classes(static_cast<size_t>(sizes[0]));
    for (size_t i = 0; i < classes.size(); ++i)
      classes[i] = static_cast<int64_t>(i * 7 + static_cast<size_t>(step)) % 10;
    return Batch{to(op::sample(sizes, 1000 + step, -1, 1), dtype), Tensor::from(classes, {sizes[0]})};
  };
}
Batches tokens(int64_t rows, int64_t length) {
  return [=](int step) {
    std::vector<int64_t> ids(static_cast<size_t>(rows * length));
    for (size_t i = 0; i < ids.size(); ++i)
      ids[i] = static_cast<int64_t>(i * i * 31 + i * 7 + static_cast<size_t>(step) * 101) % 8192;
    const Tensor x = Tensor::from(ids, {rows, length});
    return Batch{x, x};
  };
}

std::unique_ptr<optim::Optimizer> make_optimizer(bool adam, const nn::Module& module) {
  if (adam) return std::make_unique<optim::AdamW>(module.named_parameters(), optim::AdamWOptions{.lr = 1e-3});
  return std::make_unique<optim::Sgd>(module.named_parameters(), optim::SgdOptions{.lr = 0.01});
}

template <class Forward>
double train(Forward& forward, optim::Optimizer& optimizer, const Tensor& x, const Tensor& target) {
  optimizer.zero_grad();
  const Tensor y = forward(x);
  const Tensor loss = cross_entropy(y.dims() > 2 ? flatten(y, 0, -2) : y, flatten(target));
  backward(loss);
  optimizer.step();
  return loss.item<double>();
}

template <class M>
struct Reference {
  std::vector<double> losses;
  M end;
};
template <class M>
Reference<M> one_rank(const M& start, bool adam, const Batches& batches) {
  set_thread_count(1);  // as the ranks have it
  M model = nn::clone(start);
  const auto optimizer = make_optimizer(adam, model);
  std::vector<double> losses;
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = batches(step);
    losses.push_back(train(model, *optimizer, batch.x, batch.target));
  }
  return {std::move(losses), std::move(model)};
}

// Ranks that are threads, and ranks that are processes, which do the reference themselves.
enum class Kind { kThreads, kProcesses };

template <class M>
void equals_one_rank(const M& start, const std::vector<int>& sizes, const Batches& batches, bool adam,
                     Kind kind = Kind::kThreads) {
  if (sizes.empty()) return;
  const Reference<M> reference = one_rank(start, adam, batches);
  const bool wide = start.parameters()[0].dtype() == DType::kF64;
  const auto body = [&](comm::Group& group) {
    set_thread_count(1);
    M model = nn::clone(start);
    convert_sync_batchnorm(model, group);
    DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0.25});
    const auto optimizer = make_optimizer(adam, ddp);
    for (int step = 0; step < kSteps; ++step) {
      const Batch batch = batches(step);
      const int64_t rows = batch.x.size(0) / group.size(), first = rows * group.rank();
      double loss = train(ddp, *optimizer, narrow(batch.x, 0, first, rows), narrow(batch.target, 0, first, rows));
      group.all_reduce(std::span(&loss, 1), Reduce::kAverage).wait();
      const double expected = reference.losses[static_cast<size_t>(step)];
      ASSERT_NEAR(loss, expected, std::abs(expected) * (wide ? 1e-9 : 1e-4)) << group.size() << " ranks, step " << step;
      int64_t least = bits_of(ddp), most = least;
      group.all_reduce(std::span(&least, 1), Reduce::kMin).wait();
      group.all_reduce(std::span(&most, 1), Reduce::kMax).wait();
      ASSERT_EQ(least, most) << "parameters differ between ranks after step " << step;
    }
    if (adam) return;  // it amplifies rounding where a gradient is zero
    const auto own = ddp.module().named_parameters();
    const std::vector<Tensor> other = reference.end.parameters();
    const double tolerance = wide ? 1e-12 : 1e-4;
    for (size_t i = 0; i < own.size(); ++i) {
      expect_close(own[i].second, other[i], own[i].first, tolerance, tolerance);
    }
  };
  for (int size : sizes) {
    if (kind == Kind::kThreads) {
      if (!comm::is_rank_process()) run_ranks(size, body);
    } else {
      EXPECT_EQ(comm::run_processes(size, body), std::vector<int>(static_cast<size_t>(size), 0)) << size << " ranks";
    }
  }
}

template <class M>
M made(M model, DType dtype = DType::kF32) {
  model.to(dtype);
  models::fill_by_formula(model);
  return model;
}

// What a test does in every run; a long run does all of it.
struct Part {
  DType dtype;
  bool adam;
  std::vector<int> threads, processes;
};
// Where `pools`, the model chooses maxima. In f32 it may choose the other of two that are nearly equal, and AdamW makes
// full steps of what follows: one rank in f32 is then further from one rank in f64 (1e-3 after 18 steps of the CNN)
// than ranks may be from each other. So AdamW is compared in f64 there, and SGD in both.
template <class Make, class Data>
void equals_one_rank(const Make& make, const Data& data, const std::vector<Part>& parts, bool pools = false) {
  if (!soaking()) {
    for (const Part& part : parts) {
      equals_one_rank(make(part.dtype), part.threads, data(part.dtype), part.adam);
      equals_one_rank(make(part.dtype), part.processes, data(part.dtype), part.adam, Kind::kProcesses);
    }
    return;
  }
  for (DType dtype : {DType::kF32, DType::kF64}) {
    for (bool adam : {false, true}) {
      if (pools && adam && dtype == DType::kF32) continue;
      for (Kind kind : {Kind::kThreads, Kind::kProcesses}) {
        equals_one_rank(make(dtype), {2, 3, 4, 8}, data(dtype), adam, kind);
      }
    }
  }
}

TEST(NRanksEqualOne, TinyMlp) {
  equals_one_rank(
      [](DType dtype) {
        return made(models::mlp({20, 32, 10}), dtype);
      },
      [](DType dtype) {
        return features({24, 20}, dtype);
      },
      {{DType::kF32, false, {2, 3, 4, 8}, {3}},
       {DType::kF32, true, {2, 3, 4, 8}, {}},
       {DType::kF64, false, {2, 3, 4, 8}, {4}},
       {DType::kF64, true, {2, 3, 4, 8}, {}}});
}

TEST(NRanksEqualOne, Mlp512x4) {
  equals_one_rank(
      [](DType dtype) {
        return made(models::mlp({512, 512, 512, 512, 512, 10}), dtype);
      },
      [](DType dtype) {
        return features({24, 512}, dtype);
      },
      {{DType::kF32, false, {2, 8}, {}}, {DType::kF64, true, {3}, {}}, {DType::kF64, false, {4}, {}}});
}

TEST(NRanksEqualOne, CnnWithBatchNormOverAllRanks) {
  equals_one_rank([](DType dtype) { return made(models::fashion_cnn(), dtype); },
                  [](DType dtype) {
                    return features({24, 1, 28, 28}, dtype);
                  },
                  {{DType::kF32, false, {2, 3}, {}}, {DType::kF64, false, {4}, {}}}, /*pools=*/true);
}

TEST(NRanksEqualOne, Encoder) {
  equals_one_rank([](DType dtype) { return made(models::Encoder(), dtype); }, [](DType) { return tokens(24, 4); },
                  {{DType::kF32, false, {2}, {}}});
}

}  // namespace
}  // namespace chorale::parallel
