// Tables with sparse gradients.
#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/device/stream.h"
#include "chorale/eager/sim_kernels.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

// Two tables with an ordinary layer between them in the order of parameters.
struct TwoTables : nn::Module {
  nn::Embedding first, second;
  Linear lin{3, 2};
  CHORALE_MODULE(TwoTables, first, lin, second)
  explicit TwoTables(bool sparse) : first(8, 3, {.sparse = sparse}), second(5, 2, {.sparse = sparse}) {}
  Tensor forward(const Tensor& ids, bool with_second) {
    const Tensor y = lin(first(ids));
    return with_second ? mul(y, second(remainder(ids, 5))) : y;
  }
};

// Ranks use different rows, and different numbers of them, some twice.
Tensor ids_of(int rank, int step) {
  std::vector<int64_t> ids;
  for (int i = 0; i <= 2 * rank + step % 2; ++i) ids.push_back((rank + i * i + step) % 8);
  return Tensor::from(ids, {static_cast<int64_t>(ids.size())});
}

void expect_equal_to_dense(const nn::Module& sparse, const nn::Module& dense, double rtol = 1.3e-6) {
  const auto own = sparse.named_parameters(), other = dense.named_parameters();
  for (size_t i = 0; i < own.size(); ++i) {
    const Tensor g = gradient(own[i].second);
    ASSERT_EQ(g.defined(), gradient(other[i].second).defined()) << own[i].first;
    if (g.defined()) expect_close(to_dense(g), gradient(other[i].second), own[i].first, rtol);
  }
}

class SparseGradients : public testing::TestWithParam<std::tuple<FindUnused, bool>> {};
INSTANTIATE_TEST_SUITE_P(Ddp, SparseGradients,
                         testing::Combine(testing::Values(FindUnused::kOn, FindUnused::kAuto), testing::Bool()));

TEST_P(SparseGradients, AreAveragedAsDenseOnesAreAndStaySparse) {
  const auto [search, views] = GetParam();
  run_ranks(3, [search = search, views = views](comm::Group& group) {
    const DdpOptions options{.find_unused_parameters = search, .gradient_as_bucket_view = views, .bucket_cap_mb = 1e-5};
    DistributedDataParallel ddp(seeded(TwoTables(true), 1), group, options);
    DistributedDataParallel dense(seeded(TwoTables(false), 1), group, options);
    optim::Sgd optimizer(ddp.named_parameters(), {.lr = 0.1}), dense_optimizer(dense.named_parameters(), {.lr = 0.1});
    for (int step = 0; step < 5; ++step) {
      const auto pass = [&](auto& model) {
        // Step 2 leaves the second table out everywhere, step 3 on all ranks but one.
        const bool with_second = step < 2 || step == 4 || (step == 3 && group.rank() == 1);
        backward(sum(model(ids_of(group.rank(), step), with_second)));
      };
      if (step == 1) {
        const auto own = ddp.no_sync(), other = dense.no_sync();
        pass(ddp);
        pass(dense);
      }
      pass(ddp);
      pass(dense);
      EXPECT_TRUE(gradient(ddp.module().first.weight).is_sparse());
      EXPECT_EQ(gradient(ddp.module().second.weight).defined(), step != 2);
      expect_equal_to_dense(ddp.module(), dense.module());
      expect_same_on_all_ranks(group, to_dense(gradient(ddp.module().first.weight)));
      optimizer.step();
      dense_optimizer.step();
      expect_equal_parameters(ddp.module(), dense.module());
      optimizer.zero_grad();
      dense_optimizer.zero_grad();
    }
    // Each has a bucket of its own.
    for (size_t b = 0; b < ddp.reducer().bucket_count(); ++b) {
      for (size_t i : ddp.reducer().bucket(b)) {
        EXPECT_TRUE(!ddp.reducer().gradients()[i].sparse || ddp.reducer().bucket(b).size() == 1);
      }
    }
  });
}

TEST(SparseGradients, AccumulateOverStepsThatAreReduced) {
  for (bool views : {false, true}) {
    run_ranks(2, [views](comm::Group& group) {
      DistributedDataParallel ddp(nn::Embedding(4, 2, {.sparse = true}), group, {.gradient_as_bucket_view = views});
      for (int step = 1; step <= 3; ++step) {
        backward(sum(ddp(full({3}, group.rank(), DType::kI64))));
        const Tensor g = gradient(ddp.module().weight);
        EXPECT_TRUE(g.is_sparse());
        const float each = 1.5f * static_cast<float>(step);
        EXPECT_EQ(to_dense(g).to_vector<float>(), (std::vector<float>{each, each, each, each, 0, 0, 0, 0}));
      }
    });
  }
}

struct Tied : nn::Module {
  nn::Embedding table;
  CHORALE_MODULE(Tied, table)
  explicit Tied(bool sparse) : table(6, 4, {.sparse = sparse}) {}
  Tensor forward(const Tensor& ids, bool as_matrix) {
    const Tensor x = table(ids);
    return as_matrix ? matmul(x, transpose(table.weight, 0, 1)) : x;
  }
};

TEST(SparseGradients, MayBeDenseOnARankThatUsesTheTableAsAMatrixToo) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(Tied(true), 1), group), dense(seeded(Tied(false), 1), group);
    const auto pass = [&](auto& model) { backward(sum(model(ids_of(group.rank(), 0), group.rank() == 1))); };
    pass(ddp);
    pass(dense);
    expect_equal_to_dense(ddp.module(), dense.module());
  });
}

TEST(SparseGradients, OfARankWithoutInputsAreEmpty) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(TwoTables(true), 1), group), dense(seeded(TwoTables(false), 1), group);
    const auto train = [&](auto& model) {
      join({&model}, {}, [&] {
        for (int step = 0; step < 2 + group.rank(); ++step) {
          model.zero_grad();
          backward(sum(model(ids_of(1, step), true)));
        }
      });
    };
    train(ddp);
    train(dense);
    expect_equal_to_dense(ddp.module(), dense.module());
  });
}

// The forward uses shadows of the tables, whose gradients come back through a cast.
TEST(SparseGradients, AreThoseOfDenseTablesInMixedPrecisionToo) {
  run_ranks(3, [](comm::Group& group) {
    const DdpOptions options{.mixed_precision = MixedPrecision{.parameters = DType::kF16, .reduce = DType::kF32}};
    DistributedDataParallel ddp(seeded(TwoTables(true), 1), group, options);
    DistributedDataParallel dense(seeded(TwoTables(false), 1), group, options);
    optim::Sgd optimizer(ddp.named_parameters(), {.lr = 0.1}), dense_optimizer(dense.named_parameters(), {.lr = 0.1});
    for (int step = 0; step < 4; ++step) {
      backward(sum(ddp(ids_of(group.rank(), step), step != 2)));
      backward(sum(dense(ids_of(group.rank(), step), step != 2)));
      EXPECT_EQ(gradient(ddp.module().second.weight).defined(), step != 2);
      const Tensor g = gradient(ddp.module().first.weight);
      EXPECT_EQ(g.dtype(), DType::kF32);
      EXPECT_TRUE(g.is_sparse());
      // A row that is used twice is summed in f16 for the dense table, in f32 for the sparse one.
      expect_equal_to_dense(ddp.module(), dense.module(), 1e-3);
      expect_same_on_all_ranks(group, to_dense(g));
      optimizer.step();
      dense_optimizer.step();
      optimizer.zero_grad();
      dense_optimizer.zero_grad();
    }
  });
}

TEST(SparseGradients, AndAHookExcludeEachOther) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel ddp(TwoTables(true), group);
    const std::string error = message_of<StateError>([&] {
      ddp.register_comm_hook({"mine", [](GradBucket& bucket) { return reducer::ready_future(bucket.buffer()); }});
    });
    EXPECT_TRUE(has(error, "first.weight is sparse"));
  });
}

// Only embeddings are known to have them.
struct Surprise : nn::Module {
  // GCC takes a list in the initialiser of a member for one that is gone when it is read.
  static Tensor four_rows() { return ones({4, 2}); }
  nn::Parameter table{four_rows()};
  CHORALE_MODULE(Surprise, table)
  Tensor forward(const Tensor& ids) { return embedding(remainder(ids, 4), table, {}, true); }
};

TEST(SparseGradients, ThatNobodyAnnouncedAreMadeDenseInBucketsAndElseNamed) {
  run_ranks(2, [](comm::Group& group) {
    DistributedDataParallel views(Surprise(), group);
    backward(sum(views(ids_of(group.rank(), 0))));
    const Tensor g = gradient(views.module().table);
    EXPECT_FALSE(g.is_sparse());
    // Rank 0 uses row 0, rank 1 rows 1, 2 and 5 % 4 = 1.
    EXPECT_EQ(g.to_vector<float>(), (std::vector<float>{0.5, 0.5, 1, 1, 0.5, 0.5, 0, 0}));

    DistributedDataParallel copies(Surprise(), group, {.gradient_as_bucket_view = false});
    const Tensor loss = sum(copies(ids_of(group.rank(), 0)));
    EXPECT_TRUE(has(message_of<StateError>([&] { backward(loss); }), "0 (table)"));
  });
}

// As above, one table is used in some steps only, and in one of them on one rank only.
TEST(SparseGradientsOnADevice, StayWhereTheTableIsWithTheBitsOfTheCpu) {
  constexpr Device sim{DeviceType::kSim, 0};
  eager::add_sim_device({.most_delay = std::chrono::microseconds(20)});
  run_ranks(2, [&](comm::Group& group) {
    const StreamScope own(make_stream(sim));  // these ranks are threads, which share the default one
    const auto trained = [&](Device device) {
      TwoTables model = seeded(TwoTables(true), 1);
      model.to(device);
      DistributedDataParallel ddp(std::move(model), group);
      optim::Sgd optimizer(ddp.named_parameters(), {.lr = 0.1});
      std::vector<std::vector<double>> values;
      for (int step = 0; step < 3; ++step) {
        backward(sum(ddp(to(ids_of(group.rank(), step), device), step == 0 || (step == 1 && group.rank() == 1))));
        for (const nn::Embedding* table : {&ddp.module().first, &ddp.module().second}) {
          const Tensor g = gradient(table->weight);
          if (!g.defined()) continue;
          EXPECT_TRUE(g.is_sparse());
          EXPECT_EQ(g.sparse().values.device(), device);
          values.push_back(to_dense(g).to_vector<double>());
        }
        optimizer.step();
        optimizer.zero_grad();
      }
      for (const Tensor& parameter : ddp.parameters()) values.push_back(parameter.to_vector<double>());
      return values;
    };
    EXPECT_EQ(trained(sim), trained(kCpu));
    const auto summed = [&](Device device) {
      const Tensor rows = Tensor::sparse_coo(Tensor::from<int64_t>({1, group.rank()}, {1, 2}, device),
                                             Tensor::from<float>({1, 2}, {2}, device), {4});
      const Tensor all = group.sparse_all_reduce(rows);
      EXPECT_EQ(all.sparse().values.device(), device);
      return to_dense(all).to_vector<float>();
    };
    EXPECT_EQ(summed(sim), summed(kCpu));
  });
}

}  // namespace
}  // namespace chorale::parallel
