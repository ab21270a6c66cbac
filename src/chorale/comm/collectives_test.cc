// Collectives: the rows of sections 3.1 to 3.4 of the contract.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/comm/coalescing.h"
#include "chorale/comm/spec_test_util.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

constexpr int kRanks = 4;

// Runs the row in the default group, in [1, 2] and in a new group of all.
void in_all_groups(const std::function<void(Group&)>& body) {
  run_ranks(kRanks, [&](Group& world) { in_every_group(world, body); });
}

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

// spec: test_reduce_{,group_,full_group_}{sum,product,min,max}, test_reduce_sum_twice
TEST(Collectives, Reduce) {
  in_all_groups([](Group& group) {
    for (const ReduceRow& row : kReduceRows) {
      for (int root : group.members()) {
        const bool is_root = group.global_rank(group.rank()) == root;
        const Tensor x = cube(root + 1, is_root ? row.root : row.others),
                     y = cube(root + 1, is_root ? row.root : row.others);
        const Work first = group.reduce(x, root, row.reduce), second = group.reduce(y, root, row.reduce);
        first.wait();
        second.wait();
        if (is_root) {
          EXPECT_TRUE(is_cube(x, root + 1, row.expected(group.size())));
          EXPECT_TRUE(is_cube(y, root + 1, row.expected(group.size())));
        }
      }
    }
  });
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
  run_ranks(kRanks, [](Group& group) {
    const Tensor x = filled<complex64>({2, 2, 2}, group.rank() == 0 ? complex64(2, 3) : complex64(10, 11));
    group.all_reduce(x).wait();
    const auto n = static_cast<float>(group.size() - 1);
    EXPECT_TRUE(all_equal(x, complex64(2, 3) + complex64(10, 11) * n));
  });
  const auto events = trace::stop();
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(count_events(events, "shm:all_reduce", rank), 1);
  for (const trace::Event& event : events) {
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
        // On one rank only: it is refused before anything is sent.
        if (group.rank() == 0) group.all_reduce(x, reduce);
        if (group.rank() == 0) ADD_FAILURE() << name_of(reduce);
      } catch (const InvalidArgument& error) {
        EXPECT_THAT(error.what(), HasSubstr("complex"));
        EXPECT_THAT(error.what(), HasSubstr(std::string(name_of(reduce))));
      }
    }
    EXPECT_THROW(group.all_reduce_coalesced({x}, Reduce::kMax), InvalidArgument);
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
  EXPECT_EQ(count_events(events, "shm:all_reduce", 0), 2 * kRanks * 4);
  EXPECT_EQ(std::count_if(events.begin(), events.end(), [](const auto& event) { return event.shapes.size() == 3; }),
            2 * kRanks * kRanks + 4);
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
  run_ranks(kRanks, [](Group& group) {
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
  run_ranks(kRanks, [](Group& group) {
    const auto n = static_cast<float>(group.size());
    const Tensor a = filled<float>({8}, 1), b = filled<float>({8}, 1), c = filled<float>({8}, 1),
                 d = filled<float>({8}, 1);
    const int64_t before = group.sequence_number();
    {
      Coalescing scope(group);
      EXPECT_TRUE(group.all_reduce(a).is_nothing());
      group.all_reduce(b);
      EXPECT_EQ(group.sequence_number(), before) << "nothing is sent before the scope ends";
      EXPECT_THROW(Coalescing inner(group), StateError);
      EXPECT_THROW(group.all_reduce(a, Reduce::kMax), StateError);
      EXPECT_THROW(group.barrier(), StateError);
    }
    EXPECT_TRUE(all_equal(a, n) && all_equal(b, n));
    Coalescing scope(group);
    group.all_reduce(c);
    group.all_reduce(d);
    const Work work = scope.end();
    work.wait();
    EXPECT_TRUE(all_equal(c, n) && all_equal(d, n));
  });
}

// spec: test_get_future
TEST(Collectives, FunctionsOfTheResult) {
  run_ranks(kRanks, [](Group& group) {
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
  run_ranks(kRanks, [](Group& group) {
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

// spec: collectives:test_all_gather, test_all_gather{_group,_full_group,_complex}
TEST(Collectives, AllGather) {
  in_all_groups([](Group& group) {
    const int own = group.global_rank(group.rank());
    for (int k : group.members()) {
      const Shape sizes{k + 1, k + 1, k + 1};
      std::vector<Tensor> outputs, pairs;
      for (int r = 0; r < group.size(); ++r) {
        outputs.push_back(cube(k + 1, -1));
        pairs.push_back(filled<complex64>(sizes, complex64(-1, -1)));
      }
      group.all_gather(outputs, cube(k + 1, own)).wait();
      group.all_gather(pairs, filled<complex64>(sizes, complex64(static_cast<float>(own), 7))).wait();
      for (int r = 0; r < group.size(); ++r) {
        const int member = group.global_rank(r);
        EXPECT_TRUE(is_cube(outputs[static_cast<size_t>(r)], k + 1, member));
        EXPECT_TRUE(all_equal(pairs[static_cast<size_t>(r)], complex64(static_cast<float>(member), 7)));
      }
    }
  });
}

// spec: test_all_gather_v_cuda, test_all_gather_into_cat_tensor_cuda, test_all_gather_into_stack_tensor_cuda
TEST(Collectives, AllGatherOfDifferentSizesAndIntoOneTensor) {
  run_ranks(kRanks, [](Group& group) {
    const int64_t n = group.size(), l = n * (n + 1) / 2, r = group.rank();
    for (bool async : {true, false}) {
      const Tensor whole = filled<float>({l, l, l}, -1);
      std::vector<Tensor> views;
      int64_t at = 0;
      for (int64_t i = 0; i < n; ++i) {
        views.push_back(whole.view_as({i + 1, l, l}, {l * l, l, 1}, at * l * l));
        at += i + 1;
      }
      const Work work = group.all_gather(views, filled<float>({r + 1, l, l}, 2));
      if (async) {
        while (!work.is_completed()) {
        }
      }
      work.wait();
      EXPECT_TRUE(all_equal(whole, 2.0f));
    }
    for (const Shape& sizes : {Shape{2 * n, 2}, Shape{n, 2, 2}}) {
      const Tensor all = filled<float>(sizes, -1);
      group.all_gather_into(all, filled<float>({2, 2}, static_cast<float>(r))).wait();
      for (int64_t i = 0; i < all.elems(); ++i) {
        const int64_t sender = i / 4;
        EXPECT_EQ(all.data<float>()[i], static_cast<float>(sender));
      }
    }
  });
}

// spec: test_all_gather_coalesced_{simple,complex,group,full_group}, test_all_gather_coalesced_with_empty
TEST(Collectives, CoalescedAllGather) {
  in_all_groups([](Group& group) {
    const int own = group.global_rank(group.rank());
    const auto tensor = [](int64_t k, double value) {
      return filled<complex64>(Shape(static_cast<size_t>(k), k), complex64(static_cast<float>(value), 0));
    };
    for (int64_t c : {2, 3, 4}) {
      std::vector<Tensor> inputs;
      std::vector<std::vector<Tensor>> outputs;
      for (int64_t k = 1; k < c; ++k) {
        inputs.push_back(tensor(k, static_cast<double>(own + k)));
        outputs.emplace_back();
        for (int r = 0; r < group.size(); ++r) outputs.back().push_back(tensor(k, -1));
      }
      group.all_gather_coalesced(outputs, inputs).wait();
      for (int64_t k = 1; k < c; ++k) {
        for (int r = 0; r < group.size(); ++r)
          EXPECT_TRUE(all_equal(outputs[static_cast<size_t>(k - 1)][static_cast<size_t>(r)],
                                complex64(static_cast<float>(group.global_rank(r) + k), 0)));
      }
    }
    const auto five = [](int rank) {
      const auto v = static_cast<float>(rank);
      return std::vector<Tensor>{filled<float>({2, 2}, v), filled<float>({0}, 0), filled<float>({3, 3}, v + 1),
                                 filled<float>({0}, 0), filled<float>({0}, 0)};
    };
    std::vector<std::vector<Tensor>> outputs(5);
    for (int r = 0; r < group.size(); ++r) {
      const auto empty = five(-7);
      for (size_t i = 0; i < 5; ++i) outputs[i].push_back(empty[i]);
    }
    group.all_gather_coalesced(outputs, five(own)).wait();
    for (int r = 0; r < group.size(); ++r) {
      EXPECT_TRUE(all_equal(outputs[0][static_cast<size_t>(r)], static_cast<float>(group.global_rank(r))));
      EXPECT_TRUE(all_equal(outputs[2][static_cast<size_t>(r)], static_cast<float>(group.global_rank(r) + 1)));
    }
  });
}

// spec: test_nccl_backend_bool_allgather, test_nccl_backend_bool_broadcast
TEST(Collectives, BoolIsGatheredAndBroadcast) {
  run_ranks(kRanks, [](Group& group) {
    const bool even = group.rank() % 2 == 0;
    const Tensor x = bools(even, true);
    std::vector<Tensor> outputs(static_cast<size_t>(group.size()));
    for (Tensor& output : outputs) output = bools(false, false);
    group.all_gather(outputs, x).wait();
    for (int r = 0; r < group.size(); ++r) EXPECT_TRUE(holds(outputs[static_cast<size_t>(r)], r % 2 == 0, true));
    EXPECT_TRUE(holds(x, even, true)) << "the input stays";
    const Tensor y = bools(group.rank() == 0, false);
    group.broadcast(y, 0).wait();
    group.all_gather(outputs, y).wait();
    for (const Tensor& output : outputs) EXPECT_TRUE(holds(output, true, false));
  });
}

// spec: test_gather{,_group,_full_group}, test_gather_checks
TEST(Collectives, Gather) {
  in_all_groups([](Group& group) {
    const int own = group.global_rank(group.rank());
    for (int root : group.members()) {
      std::vector<Tensor> outputs;
      for (int r = 0; r < group.size() && own == root; ++r) outputs.push_back(cube(root + 1, -1));
      group.gather(outputs, cube(root + 1, own), root).wait();
      for (size_t r = 0; r < outputs.size(); ++r)
        EXPECT_TRUE(is_cube(outputs[r], root + 1, group.global_rank(static_cast<int>(r))));
      // A list where none belongs, and none where one does.
      if (own == root) {
        EXPECT_THROW(group.gather({}, cube(1, 0), root), InvalidArgument);
      } else {
        EXPECT_THROW(group.gather({cube(1, 0)}, cube(1, 0), root), InvalidArgument);
      }
    }
  });
  run_ranks(kRanks, [](Group& group) {
    std::vector<Tensor> outputs;
    for (int r = 0; r < group.size() && group.rank() == 0; ++r) outputs.push_back(cube(1, -1));
    group.gather(outputs, cube(1, group.rank())).wait();  // to rank 0 unless told otherwise
    for (size_t r = 0; r < outputs.size(); ++r) EXPECT_TRUE(is_cube(outputs[r], 1, static_cast<double>(r)));
  });
}

// spec: test_scatter{,_group,_full_group,_complex}, test_scatter_checks
TEST(Collectives, Scatter) {
  in_all_groups([](Group& group) {
    const int own = group.global_rank(group.rank());
    for (int root : group.members()) {
      std::vector<Tensor> inputs, pairs;
      const Shape sizes{root + 1, root + 1, root + 1};
      for (int r = 0; r < group.size() && own == root; ++r) {
        inputs.push_back(cube(root + 1, group.global_rank(r)));
        pairs.push_back(filled<complex64>(sizes, complex64(static_cast<float>(group.global_rank(r)), 3)));
      }
      const Tensor x = cube(root + 1, -1), y = filled<complex64>(sizes, complex64(-1, -1));
      group.scatter(x, inputs, root).wait();
      group.scatter(y, pairs, root).wait();
      EXPECT_TRUE(is_cube(x, root + 1, own));
      EXPECT_TRUE(all_equal(y, complex64(static_cast<float>(own), 3)));
      if (own == root) {
        EXPECT_THROW(group.scatter(x, {}, root), InvalidArgument);
      } else {
        EXPECT_THROW(group.scatter(x, {x}, root), InvalidArgument);
      }
    }
  });
  run_ranks(kRanks, [](Group& group) {
    std::vector<Tensor> inputs;
    for (int r = 0; r < group.size() && group.rank() == 0; ++r) inputs.push_back(cube(1, r));
    const Tensor x = cube(1, -1);
    group.scatter(x, inputs).wait();
    EXPECT_TRUE(is_cube(x, 1, group.rank()));
  });
}

// spec: test_reduce_scatter_tensor_cuda, test_reduce_scatter_v_cuda
TEST(Collectives, ReduceScatter) {
  run_ranks(kRanks, [](Group& group) {
    const int64_t n = group.size(), r = group.rank(), l = n * (n + 1) / 2;
    for (const Shape& sizes : {Shape{2 * n}, Shape{n, 2}}) {
      const Tensor in = Tensor::empty(sizes, DType::kI64), out = filled<int64_t>({2}, 0);
      for (int64_t i = 0; i < 2 * n; ++i) in.data<int64_t>()[i] = i;
      group.reduce_scatter_from(out, in).wait();
      EXPECT_EQ(out.to_vector<int64_t>(), (std::vector<int64_t>{2 * r * n, (2 * r + 1) * n}));
    }
    const Tensor whole = filled<float>({l, l, l}, 10), out = filled<float>({r + 1, l, l}, 0);
    std::vector<Tensor> slices;
    int64_t at = 0;
    for (int64_t i = 0; i < n; ++i) {
      slices.push_back(whole.view_as({i + 1, l, l}, {l * l, l, 1}, at * l * l));
      at += i + 1;
    }
    std::fill_n(slices[static_cast<size_t>(r)].data<float>(), (r + 1) * l * l, 2.0f);
    group.reduce_scatter(out, slices).wait();
    EXPECT_TRUE(all_equal(out, static_cast<float>(2 + 10 * (n - 1))));
  });
}

// spec: test_all_to_all_single_equal_split{,_complex,_group,_full_group}
// spec: test_all_to_all_single_unequal_split{,_complex,_group,_full_group}
TEST(Collectives, AllToAllOfOneTensor) {
  in_all_groups([](Group& group) {
    const int64_t n = group.size();
    const int own = group.global_rank(group.rank());
    const auto run = [&](auto value) {
      using T = decltype(value(0));
      const Tensor in = filled<T>({n, n}, value(own)), out = filled<T>({n, n}, value(-1));
      group.all_to_all_single(out, in).wait();
      for (int64_t i = 0; i < n * n; ++i)
        EXPECT_EQ(out.data<T>()[i], value(group.global_rank(static_cast<int>(i / n))));
      std::vector<int64_t> in_splits, out_splits(static_cast<size_t>(n), own + 1);
      int64_t rows = 0;
      for (int member : group.members()) {
        in_splits.push_back(member + 1);
        rows += member + 1;
      }
      const Tensor from = filled<T>({rows, n}, value(own)), to = filled<T>({(own + 1) * n, n}, value(-1));
      group.all_to_all_single(to, from, out_splits, in_splits).wait();
      for (int64_t i = 0; i < to.elems(); ++i)
        EXPECT_EQ(to.data<T>()[i], value(group.global_rank(static_cast<int>(i / n / (own + 1)))));
    };
    run([](int x) { return static_cast<float>(x); });
    run([](int x) { return complex64(static_cast<float>(x), 9); });
  });
}

// spec: test_all_to_all{,_complex,_group,_full_group}
TEST(Collectives, AllToAllOfLists) {
  trace::start();
  in_all_groups([](Group& group) {
    const int64_t n = group.size();
    const int own = group.global_rank(group.rank());
    const auto run = [&](auto value) {
      using T = decltype(value(0));
      std::vector<Tensor> inputs, outputs;
      for (int member : group.members()) {
        inputs.push_back(filled<T>({member + 1, n}, value(own)));
        outputs.push_back(filled<T>({own + 1, n}, value(-1)));
      }
      group.all_to_all(outputs, inputs).wait();
      for (int r = 0; r < n; ++r) EXPECT_TRUE(all_equal(outputs[static_cast<size_t>(r)], value(group.global_rank(r))));
    };
    run([](int x) { return static_cast<float>(x); });
    run([](int x) { return complex64(static_cast<float>(x), 9); });
  });
  EXPECT_EQ(count_events(trace::stop(), "shm:all_to_all", 0), 2 * 2);
}

TEST(Collectives, AveragesAndFactors) {
  run_ranks(kRanks, [](Group& group) {
    const Tensor mean = cube(2, group.rank()), sum = cube(2, group.rank());
    group.all_reduce(mean, Reduce::kAverage).wait();
    EXPECT_TRUE(is_cube(mean, 2, 1.5));
    group.all_reduce(sum, premultiplied_sum(0.5)).wait();
    EXPECT_TRUE(is_cube(sum, 2, 3));
    EXPECT_THROW(group.all_reduce(filled<int32_t>({2}, 1), Reduce::kAverage), InvalidArgument);
    EXPECT_THROW(group.all_reduce(filled<int32_t>({2}, 1), premultiplied_sum(2)), InvalidArgument);
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
