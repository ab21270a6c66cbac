// Collectives that move chunks: the rows of sections 3.3 and 3.4 of the contract.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <tuple>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/comm/spec_test_util.h"

namespace chorale::comm {
namespace {

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
      const auto gather = [&](const Tensor& input) {
        std::fill_n(whole.data<float>(), whole.elems(), -1.0f);
        const Work work = group.all_gather(views, input);
        if (async) {
          while (!work.is_completed()) {
          }
        }
        work.wait();
      };
      gather(filled<float>({r + 1, l, l}, 2));
      EXPECT_TRUE(all_equal(whole, 2.0f));
      const auto rank = static_cast<int>(r);
      gather(numbered<float>({r + 1, l, l}, [&](int64_t i) { return sent_by<float>(rank, i); }));
      for (int sender = 0; sender < n; ++sender) {
        const Tensor& view = views[static_cast<size_t>(sender)];
        for (int64_t i = 0; i < view.elems(); ++i) ASSERT_EQ(view.data<float>()[i], sent_by<float>(sender, i));
      }
    }
    for (const Shape& sizes : {Shape{2 * n, 2}, Shape{n, 2, 2}}) {
      const Tensor all = filled<float>(sizes, -1);
      group.all_gather_into(all, filled<float>({2, 2}, static_cast<float>(r))).wait();
      for (int64_t i = 0; i < all.elems(); ++i) {
        const int64_t row = i / 4;
        EXPECT_EQ(all.data<float>()[i], static_cast<float>(row));
      }
      const auto rank = static_cast<int>(r);
      std::fill_n(all.data<float>(), all.elems(), -1.0f);
      group.all_gather_into(all, numbered<float>({2, 2}, [&](int64_t i) { return sent_by<float>(rank, i); })).wait();
      for (int64_t i = 0; i < all.elems(); ++i)
        EXPECT_EQ(all.data<float>()[i], sent_by<float>(static_cast<int>(i / 4), i % 4));
    }
  });
}

// spec: test_all_gather_coalesced_{simple,complex,group,full_group}, test_all_gather_coalesced_with_empty
TEST(Collectives, CoalescedAllGather) {
  trace::start();
  in_all_groups([](Group& group) {
    const int own = group.global_rank(group.rank());
    // One call for each c; tensor k of rank q holds value(q, k, place).
    const auto run = [&](const auto& value) {
      using T = decltype(value(0, int64_t{0}, int64_t{0}));
      for (int64_t c : {2, 3, 4}) {
        std::vector<Tensor> inputs;
        std::vector<std::vector<Tensor>> outputs;
        for (int64_t k = 1; k < c; ++k) {
          const Shape sizes(static_cast<size_t>(k), k);
          inputs.push_back(numbered<T>(sizes, [&](int64_t i) { return value(own, k, i); }));
          outputs.emplace_back();
          for (int r = 0; r < group.size(); ++r) outputs.back().push_back(filled<T>(sizes, T(-1)));
        }
        group.all_gather_coalesced(outputs, inputs).wait();
        for (int64_t k = 1; k < c; ++k) {
          for (int r = 0; r < group.size(); ++r) {
            const Tensor& found = outputs[static_cast<size_t>(k - 1)][static_cast<size_t>(r)];
            for (int64_t i = 0; i < found.elems(); ++i)
              ASSERT_EQ(found.data<T>()[i], value(group.global_rank(r), k, i)) << c << ' ' << k << ' ' << r << ' ' << i;
          }
        }
      }
    };
    run([](int q, int64_t k, int64_t) { return static_cast<float>(q + k); });
    run([](int q, int64_t k, int64_t i) {
      return complex64(static_cast<float>(q + k), static_cast<float>(100 * q + i + 1));
    });
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
      for (size_t i : {1u, 3u, 4u}) EXPECT_EQ(outputs[i][static_cast<size_t>(r)].sizes(), (Shape{0}));
    }
  });
  // One event per call, with the shapes of all its inputs; complex numbers as pairs. Rank 0 is in two of three groups.
  const auto events = trace::stop();
  EXPECT_EQ(count_events(events, "shm:all_gather", 0), 2 * (3 + 3 + 1));
  const auto count_shapes = [&](const std::vector<std::vector<int64_t>>& shapes) {
    return std::count_if(events.begin(), events.end(),
                         [&](const auto& event) { return event.rank == 0 && event.shapes == shapes; });
  };
  EXPECT_EQ(count_shapes({{1}, {2, 2}, {3, 3, 3}}), 2);
  EXPECT_EQ(count_shapes({{1, 2}, {2, 2, 2}, {3, 3, 3, 2}}), 2);
  EXPECT_EQ(count_shapes({{2, 2}, {0}, {3, 3}, {0}, {0}}), 2);
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
        EXPECT_THROW(std::ignore = group.gather({}, cube(1, 0), root), InvalidArgument);
      } else {
        EXPECT_THROW(std::ignore = group.gather({cube(1, 0)}, cube(1, 0), root), InvalidArgument);
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
        EXPECT_THROW(std::ignore = group.scatter(x, {}, root), InvalidArgument);
      } else {
        EXPECT_THROW(std::ignore = group.scatter(x, {x}, root), InvalidArgument);
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
    // Element i of what rank `sender` passes is value(sender, i).
    const auto run = [&](const auto& value) {
      using T = decltype(value(0, int64_t{0}));
      const auto mine = [&](int64_t i) { return value(own, i); };
      const Tensor in = numbered<T>({n, n}, mine), out = filled<T>({n, n}, T(-1));
      group.all_to_all_single(out, in).wait();
      for (int64_t i = 0; i < n * n; ++i)
        ASSERT_EQ(out.data<T>()[i], value(group.global_rank(static_cast<int>(i / n)), group.rank() * n + i % n)) << i;
      // Rank g gets g + 1 rows from every sender.
      std::vector<int64_t> in_splits, out_splits(static_cast<size_t>(n), own + 1);
      int64_t rows = 0, rows_before = 0;
      for (int member : group.members()) {
        in_splits.push_back(member + 1);
        rows += member + 1;
        if (member < own) rows_before += member + 1;
      }
      const Tensor from = numbered<T>({rows, n}, mine), to = filled<T>({(own + 1) * n, n}, T(-1));
      group.all_to_all_single(to, from, out_splits, in_splits).wait();
      const int64_t block = (own + 1) * n;
      for (int64_t i = 0; i < to.elems(); ++i)
        ASSERT_EQ(to.data<T>()[i], value(group.global_rank(static_cast<int>(i / block)), rows_before * n + i % block))
            << i;
    };
    run([](int sender, int64_t) { return static_cast<float>(sender); });
    run([](int sender, int64_t) { return complex64(static_cast<float>(sender), 9); });
    run(sent_by<float>);
    run(sent_by<complex64>);
  });
}

// spec: test_all_to_all{,_complex,_group,_full_group}
TEST(Collectives, AllToAllOfLists) {
  trace::start();
  in_all_groups([](Group& group) {
    const int64_t n = group.size();
    const int own = group.global_rank(group.rank());
    // Element i of what rank `sender` has for rank `receiver` is value(sender, receiver, i).
    const auto run = [&](const auto& value) {
      using T = decltype(value(0, 0, int64_t{0}));
      std::vector<Tensor> inputs, outputs;
      for (int member : group.members()) {
        inputs.push_back(numbered<T>({member + 1, n}, [&](int64_t i) { return value(own, member, i); }));
        outputs.push_back(filled<T>({own + 1, n}, T(-1)));
      }
      group.all_to_all(outputs, inputs).wait();
      for (int r = 0; r < n; ++r) {
        const Tensor& found = outputs[static_cast<size_t>(r)];
        for (int64_t i = 0; i < found.elems(); ++i)
          ASSERT_EQ(found.data<T>()[i], value(group.global_rank(r), own, i)) << r << ' ' << i;
      }
    };
    run([](int sender, int, int64_t) { return static_cast<float>(sender); });
    run([](int sender, int, int64_t) { return complex64(static_cast<float>(sender), 9); });
    run([](int sender, int receiver, int64_t i) { return sent_by<float>(sender, 100 * receiver + i); });
    run([](int sender, int receiver, int64_t i) { return sent_by<complex64>(sender, 100 * receiver + i); });
  });
  EXPECT_EQ(count_events(trace::stop(), "shm:all_to_all", 0), 2 * 4);
}

}  // namespace
}  // namespace chorale::comm
