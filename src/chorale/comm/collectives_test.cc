// Broadcasts and reductions: the rows of sections 3.1 and 3.2 of the contract.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <tuple>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/comm/coalescing.h"
#include "chorale/comm/spec_test_util.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

template <class T>
void broadcast_value(Group& group, T value) {
  for (int src : group.members()) {
    const bool is_src = group.global_rank(group.rank()) == src;
    const int64_t k = src + 1;
    const Tensor x = filled<T>({k, k, k}, is_src ? value : static_cast<T>(-1));
    group.broadcast(x, src).wait();
    EXPECT_EQ(x.sizes(), (Shape{k, k, k}));
    for (int64_t i = 0; i < x.elems(); ++i) ASSERT_EQ(x.data<T>()[i], value);
  }
}

// spec: test_broadcast{,_group,_full_group}
TEST(Collectives, Broadcast) {
  in_all_groups([](Group& group) {
    broadcast_value<float>(group, -1e-10f);
    broadcast_value<double>(group, -1e-100);
    broadcast_value<int8_t>(group, -2);
    broadcast_value<uint8_t>(group, 129);
    broadcast_value<int32_t>(group, -100000);
    broadcast_value<int64_t>(group, -1000000000000000);
  });
}

struct ReduceRow {
  Reduce reduce;
  double root, others;
  double expected(int n) const {
    switch (reduce) {
      case Reduce::kSum:
        return root + others * (n - 1);
      case Reduce::kProduct:
        return root * std::pow(others, n - 1);
      case Reduce::kMin:
        return n > 1 ? std::min(root, others) : root;
      default:
        return n > 1 ? std::max(root, others) : root;
    }
  }
};
const ReduceRow kReduceRows[] = {
    {Reduce::kSum, 2, 10}, {Reduce::kProduct, 2, 10}, {Reduce::kMin, 1010, 1}, {Reduce::kMax, -1, 10}};

// spec: test_reduce_{,group_,full_group_}{sum,product,min,max}
TEST(Collectives, Reduce) {
  in_all_groups([](Group& group) {
    for (const ReduceRow& row : kReduceRows) {
      for (int root : group.members()) {
        const bool is_root = group.global_rank(group.rank()) == root;
        const Tensor x = cube(root + 1, is_root ? row.root : row.others);
        group.reduce(x, root, row.reduce).wait();
        if (is_root) {
          EXPECT_TRUE(is_cube(x, root + 1, row.expected(group.size())));
        }
      }
    }
  });
}

// spec: test_reduce_sum_twice
TEST(Collectives, TwoReducesInFlightAreTwoEvents) {
  for (int root = 0; root < kWorldRanks; ++root) {
    const auto events = traced(kWorldRanks, [root](Group& group) {
      const bool is_root = group.rank() == root;
      // The second one is larger by one, so that each root knows which it got.
      const Tensor x = cube(root + 1, is_root ? 2 : 10), y = cube(root + 2, is_root ? 2 : 10);
      const Work first = group.reduce(x, root), second = group.reduce(y, root);
      first.wait();
      second.wait();
      if (is_root) {
        EXPECT_TRUE(is_cube(x, root + 1, 2 + 10 * (group.size() - 1)));
        EXPECT_TRUE(is_cube(y, root + 2, 2 + 10 * (group.size() - 1)));
      }
    });
    for (int rank = 0; rank < kWorldRanks; ++rank) EXPECT_EQ(count_events(events, "shm:reduce", rank), 2);
  }
}

// spec: test_all_reduce_{,group_,full_group_}{sum,product,min,max}, test_all_reduce_sum_async
TEST(Collectives, AllReduce) {
  in_all_groups([](Group& group) {
    for (const ReduceRow& row : kReduceRows) {
      for (int src : group.members()) {
        const Tensor x = cube(src + 1, group.global_rank(group.rank()) == src ? row.root : row.others);
        group.all_reduce(x, row.reduce).wait();
        EXPECT_TRUE(is_cube(x, src + 1, row.expected(group.size())));
      }
    }
  });
}

// spec: test_all_reduce_sum_complex
TEST(Collectives, AllReduceOfComplexNumbersIsOneEventWithTheShapeOfPairs) {
  trace::start();
  run_ranks(kWorldRanks, [](Group& group) {
    const Tensor x = filled<complex64>({2, 2, 2}, group.rank() == 0 ? complex64(2, 3) : complex64(10, 11));
    group.all_reduce(x).wait();
    const auto n = static_cast<float>(group.size() - 1);
    EXPECT_TRUE(all_equal(x, complex64(2, 3) + complex64(10, 11) * n));
  });
  const auto events = trace::stop();
  for (int rank = 0; rank < kWorldRanks; ++rank) EXPECT_EQ(count_events(events, "shm:all_reduce", rank), 1);
  for (const trace::Event& event : events) {
    if (event.kind != trace::Kind::kCall) continue;
    EXPECT_TRUE(event.async);
    EXPECT_GE(event.end, event.start);
    EXPECT_EQ(event.shapes, (std::vector<std::vector<int64_t>>{{2, 2, 2, 2}}));
  }
}

// spec: test_all_reduce_complex_unsupported_ops, test_all_reduce_coalesced_max_complex_unsupported
TEST(Collectives, ComplexNumbersHaveNoOrder) {
  run_ranks(2, [](Group& group) {
    const Tensor x = filled<complex64>({1, 1, 1}, complex64(1, 2));
    for (Reduce reduce :
         {Reduce::kMax, Reduce::kMin, Reduce::kProduct, Reduce::kBitAnd, Reduce::kBitOr, Reduce::kBitXor}) {
      try {
        // Only one rank calls: it is refused before anything is sent.
        if (group.rank() == 0) std::ignore = group.all_reduce(x, reduce);
        if (group.rank() == 0) ADD_FAILURE() << name_of(reduce);
      } catch (const InvalidArgument& error) {
        EXPECT_THAT(error.what(), HasSubstr("complex"));
        EXPECT_THAT(error.what(), HasSubstr(std::string(name_of(reduce))));
      }
    }
    EXPECT_THROW(std::ignore = group.all_reduce_coalesced({x}, Reduce::kMax), InvalidArgument);
    group.barrier().wait();
  });
}

// spec: test_all_reduce_coalesced_{,group_,full_group_}{sum,product,min,max}
TEST(Collectives, CoalescedAllReduce) {
  trace::start();
  in_all_groups([](Group& group) {
    const auto n = group.size();
    for (int src : group.members()) {
      const bool is_src = group.global_rank(group.rank()) == src;
      const int64_t k = src + 1;
      const auto pair = [&](double a, double b, double c, double d) {
        return std::vector<Tensor>{cube(k, is_src ? a : c), cube(k, is_src ? b : d)};
      };
      auto sums = pair(2, 3, 10, 11);
      sums.push_back(filled<complex64>({k, k, k}, is_src ? complex64(2, 3) : complex64(10, 11)));
      group.all_reduce_coalesced(sums).wait();
      EXPECT_TRUE(is_cube(sums[0], k, 2 + 10 * (n - 1)));
      EXPECT_TRUE(is_cube(sums[1], k, 3 + 11 * (n - 1)));
      EXPECT_TRUE(all_equal(sums[2], complex64(2, 3) + complex64(10, 11) * static_cast<float>(n - 1)));
      const auto products = pair(1, 2, 3, 4), minima = pair(1, 4, 2, 3), maxima = pair(1, 4, 2, 3);
      group.all_reduce_coalesced(products, Reduce::kProduct).wait();
      EXPECT_TRUE(is_cube(products[0], k, std::pow(3, n - 1)));
      EXPECT_TRUE(is_cube(products[1], k, 2 * std::pow(4, n - 1)));
      group.all_reduce_coalesced(minima, Reduce::kMin).wait();
      EXPECT_TRUE(is_cube(minima[0], k, 1) && is_cube(minima[1], k, 3));
      group.all_reduce_coalesced(maxima, Reduce::kMax).wait();
      EXPECT_TRUE(is_cube(maxima[0], k, 2) && is_cube(maxima[1], k, 4));
    }
  });
  // One event per call, with the shapes of all its tensors. Rank 0 is in two of the three groups.
  const auto events = trace::stop();
  EXPECT_EQ(count_events(events, "shm:all_reduce", 0), 2 * kWorldRanks * 4);
  EXPECT_EQ(std::count_if(events.begin(), events.end(), [](const auto& event) { return event.shapes.size() == 3; }),
            2 * kWorldRanks * kWorldRanks + 4);
}

Tensor dense_of(const Tensor& sparse) {
  const SparseParts& parts = sparse.sparse();
  const Tensor dense = filled<float>(sparse.sizes(), 0);
  const int64_t dims = parts.indices.size(0), count = parts.indices.size(1);
  const int64_t width = parts.values.elems() / std::max<int64_t>(count, 1);
  const auto indices = parts.indices.to_vector<int64_t>();
  const auto values = parts.values.to_vector<float>();
  for (int64_t e = 0; e < count; ++e) {
    int64_t at = 0;
    for (int64_t d = 0; d < dims; ++d) at = at * sparse.size(d) + indices[static_cast<size_t>(d * count + e)];
    for (int64_t i = 0; i < width; ++i)
      dense.data<float>()[at * width + i] += values[static_cast<size_t>(e * width + i)];
  }
  return dense;
}

// spec: test_sparse_all_reduce_sum
TEST(Collectives, SparseAllReduce) {
  run_ranks(kWorldRanks, [](Group& group) {
    const auto check = [&](int sparse_dims, int dense_dims) {
      const int64_t count = group.rank() + 1;
      Shape sizes, value_sizes{count};
      for (int d = 0; d < sparse_dims; ++d) sizes.push_back(group.size());
      for (int d = 0; d < dense_dims; ++d) {
        sizes.push_back(2);
        value_sizes.push_back(2);
      }
      const Tensor indices = filled<int64_t>({sparse_dims, count}, 0);
      for (int64_t e = 0; e < count; ++e) indices.data<int64_t>()[e] = e;
      const Tensor sum = group.sparse_all_reduce(Tensor::sparse_coo(indices, filled<float>(value_sizes, 1), sizes));
      EXPECT_EQ(sum.sizes(), sizes);
      EXPECT_TRUE(sum.sparse().coalesced);
      EXPECT_EQ(sum.sparse().indices.size(1), group.size());
      const Tensor dense = dense_of(sum);
      const int64_t rows = dense.elems() / group.size();
      for (int64_t i = 0; i < group.size(); ++i) {
        const bool wide = dense_dims > 0;
        for (int64_t j = 0; j < rows; ++j)
          ASSERT_EQ(dense.data<float>()[i * rows + j], wide || j == 0 ? static_cast<float>(group.size() - i) : 0.0f);
      }
    };
    for (int dims : {1, 2, 3}) check(dims, 0);
    for (int dims : {1, 2, 3}) check(1, dims);
  });
}

// spec: test_coalescing_manager, test_coalescing_manager_async
TEST(Collectives, CoalescingScope) {
  run_ranks(kWorldRanks, [](Group& group) {
    const auto n = static_cast<float>(group.size());
    const Tensor a = filled<float>({8}, 1), b = filled<float>({8}, 1), c = filled<float>({8}, 1),
                 d = filled<float>({8}, 1);
    const int64_t before = group.sequence_number();
    {
      Coalescing scope(group);
      EXPECT_TRUE(group.all_reduce(a).is_nothing());
      std::ignore = group.all_reduce(b);
      EXPECT_EQ(group.sequence_number(), before) << "nothing is sent before the scope ends";
      EXPECT_THROW(Coalescing inner(group), StateError);
      EXPECT_THROW(std::ignore = group.all_reduce(a, Reduce::kMax), StateError);
      EXPECT_THROW(std::ignore = group.barrier(), StateError);
    }
    EXPECT_TRUE(all_equal(a, n) && all_equal(b, n));
    Coalescing scope(group);
    std::ignore = group.all_reduce(c);
    std::ignore = group.all_reduce(d);
    const Work work = scope.end();
    work.wait();
    EXPECT_TRUE(all_equal(c, n) && all_equal(d, n));
  });
}

// spec: test_get_future
TEST(Collectives, FunctionsOfTheResult) {
  run_ranks(kWorldRanks, [](Group& group) {
    const Tensor x = cube(3, 2);
    const auto mapped = [](float factor, float offset) {
      return [=](const Tensors& in) -> Tensors {
        const Tensor out = cube(3, 0);
        for (int64_t i = 0; i < out.elems(); ++i) out.data<float>()[i] = in[0].data<float>()[i] * factor + offset;
        return {out};
      };
    };
    const Work work = group.all_reduce(x);
    const Future future = work.future().then(mapped(3, 0)).then(mapped(1, 1));
    EXPECT_TRUE(is_cube(future.wait()[0], 3, 6 * group.size() + 1));
    // One that is attached late still fires.
    EXPECT_TRUE(is_cube(work.future().then(mapped(2, 0)).wait()[0], 3, 4 * group.size()));
    int order = 0;
    work.then([&] { EXPECT_EQ(order++, 0); });
    work.then([&] { EXPECT_EQ(order++, 1); });
    EXPECT_EQ(order, 2);
  });
}

Tensor bools(bool a, bool b) { return Tensor::from({a, b}, {2}); }
bool holds(const Tensor& x, bool a, bool b) {
  return x.dtype() == DType::kBool && x.data<bool>()[0] == a && x.data<bool>()[1] == b;
}

// spec: test_nccl_backend_bool_allreduce, test_nccl_backend_bool_reduce
TEST(Collectives, BoolStaysBool) {
  run_ranks(kWorldRanks, [](Group& group) {
    const bool even = group.rank() % 2 == 0;
    for (Reduce reduce : {Reduce::kProduct, Reduce::kMin, Reduce::kSum, Reduce::kMax}) {
      const bool any = reduce == Reduce::kSum || reduce == Reduce::kMax;
      const Tensor mixed = bools(even, even), same = bools(true, true), x = bools(even, even), y = bools(true, true);
      group.reduce(x, 0, reduce).wait();
      group.reduce(y, 0, reduce).wait();
      if (group.rank() == 0) {
        EXPECT_TRUE(holds(x, any, any));
        EXPECT_TRUE(holds(y, true, true));
      }
      group.all_reduce(mixed, reduce).wait();
      EXPECT_TRUE(holds(mixed, any, any));
      group.all_reduce(same, reduce).wait();
      EXPECT_TRUE(holds(same, true, true));
    }
  });
}

// spec: test_nccl_backend_bool_allgather, test_nccl_backend_bool_broadcast
TEST(Collectives, BoolIsGatheredAndBroadcast) {
  run_ranks(kWorldRanks, [](Group& group) {
    const bool even = group.rank() % 2 == 0;
    const Tensor x = bools(even, true);
    std::vector<Tensor> outputs(static_cast<size_t>(group.size()));
    for (Tensor& output : outputs) output = bools(false, false);
    group.all_gather(outputs, x).wait();
    for (int r = 0; r < group.size(); ++r) EXPECT_TRUE(holds(outputs[static_cast<size_t>(r)], r % 2 == 0, true));
    EXPECT_TRUE(holds(x, even, true)) << "the input stays";
    const Tensor y = bools(group.rank() == 0, false);
    group.broadcast(y, 0).wait();
    for (Tensor& output : outputs) output = bools(false, true);  // the opposite of what comes
    group.all_gather(outputs, y).wait();
    for (const Tensor& output : outputs) EXPECT_TRUE(holds(output, true, false));
  });
}

TEST(Collectives, AveragesAndFactors) {
  run_ranks(kWorldRanks, [](Group& group) {
    const Tensor mean = cube(2, group.rank()), sum = cube(2, group.rank());
    group.all_reduce(mean, Reduce::kAverage).wait();
    EXPECT_TRUE(is_cube(mean, 2, 1.5));
    group.all_reduce(sum, premultiplied_sum(0.5)).wait();
    EXPECT_TRUE(is_cube(sum, 2, 3));
    EXPECT_THROW(std::ignore = group.all_reduce(filled<int32_t>({2}, 1), Reduce::kAverage), InvalidArgument);
    EXPECT_THROW(std::ignore = group.all_reduce(filled<int32_t>({2}, 1), premultiplied_sum(2)), InvalidArgument);
  });
  // Another factor is another call.
  run_ranks(2, [](Group& group) {
    EXPECT_THROW(group.all_reduce(cube(2, 1), premultiplied_sum(1 + group.rank())).wait(), CommError);
  });
}

TEST(Collectives, ATagIsPartOfTheCall) {
  run_ranks(2, [](Group& group) {
    group.all_reduce(cube(1, 1), Reduce::kSum, {.tag = 5, .timeout = {}}).wait();
    try {
      group.all_reduce(cube(1, 1), Reduce::kSum, {.tag = 6 + static_cast<uint64_t>(group.rank()), .timeout = {}})
          .wait();
      ADD_FAILURE();
    } catch (const CommError& error) {
      EXPECT_THAT(error.what(), HasSubstr("tag 6"));
      EXPECT_THAT(error.what(), HasSubstr("tag 7"));
      EXPECT_EQ(error.failure().collective, "all_reduce");
      EXPECT_EQ(error.failure().sequence_number, 2);
    }
    EXPECT_THAT(group.flight_record(), HasSubstr("\"kind\": \"all_reduce\""));
    EXPECT_THAT(group.flight_record(), HasSubstr("\"state\": \"failed\""));
  });
}

}  // namespace
}  // namespace chorale::comm
