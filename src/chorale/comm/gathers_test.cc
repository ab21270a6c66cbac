// Collectives that move chunks: the rows of sections 3.3 and 3.4 of the contract.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/comm/spec_test_util.h"

namespace chorale::comm {
namespace {

using testing::HasSubstr;

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
  run_ranks(kWorldRanks, [](Group& group) {
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
  run_ranks(kWorldRanks, [](Group& group) {
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
  run_ranks(kWorldRanks, [](Group& group) {
    std::vector<Tensor> inputs;
    for (int r = 0; r < group.size() && group.rank() == 0; ++r) inputs.push_back(cube(1, r));
    const Tensor x = cube(1, -1);
    group.scatter(x, inputs).wait();
    EXPECT_TRUE(is_cube(x, 1, group.rank()));
  });
}

// spec: test_reduce_scatter_tensor_cuda, test_reduce_scatter_v_cuda
TEST(Collectives, ReduceScatter) {
  run_ranks(kWorldRanks, [](Group& group) {
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

}  // namespace
}  // namespace chorale::comm
