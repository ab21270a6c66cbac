// Collectives as ops: values that depend on sender and place, gradients against finite differences of the sum of all
// ranks' losses (Note [Gradients over ranks] in op/defs/collective.cc), and the form that is begun and waited for.
#include "chorale/op/collective.h"

#include <gtest/gtest.h>

#include "chorale/api/api.h"
#include "chorale/comm/comm_counter.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/op/samples.h"

namespace chorale {
namespace {

using comm::run_ranks;

double value(int rank, int64_t at) { return 100 * (rank + 1) + static_cast<double>(at); }

Tensor numbered(int rank, const Shape& sizes) {
  std::vector<double> values;
  for (int64_t i = 0; i < count_elems(sizes); ++i) values.push_back(value(rank, i));
  return Tensor::from(values, sizes);
}

bool equal(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && a.to_vector<double>() == b.to_vector<double>();
}

using Function = std::function<Tensor(const Tensor& x, const Tensor& group)>;

// The loss of a rank: results weighted with numbers that differ from rank to rank, and squared so that the gradient
// depends on the values.
Tensor loss_of(const Tensor& y, int rank) { return sum(mul(mul(y, y), op::sample(y.sizes(), 40 + rank))); }

// d(sum of all losses) / d(each element of each rank's x), by central differences, against backward.
void expect_gradient(comm::Group& group, const Function& function, const Shape& sizes) {
  const Tensor ranks = group_tensor(group);
  const Tensor x = set_requires_grad(op::sample(sizes, group.rank()));
  backward(loss_of(function(x, ranks), group.rank()));
  const auto total_loss = [&](const Tensor& at) {
    const NoGrad quiet;
    const Tensor loss = clone(loss_of(function(at, ranks), group.rank()));
    group.all_reduce(loss).wait();
    return loss.item<double>();
  };
  std::vector<int64_t> elems(static_cast<size_t>(group.size()));
  const std::vector<int64_t> own{x.elems()};
  group.all_gather_into(std::span(elems), std::span(own)).wait();
  constexpr double kStep = 1e-5;
  for (int r = 0; r < group.size(); ++r) {
    for (int64_t i = 0; i < elems[static_cast<size_t>(r)]; ++i) {
      const auto moved = [&](double by) {
        const Tensor at = clone(detach(x));
        if (r == group.rank()) at.data<double>()[i] += by;
        return total_loss(at);
      };
      const double slope = (moved(kStep) - moved(-kStep)) / (2 * kStep);
      if (r == group.rank()) {
        EXPECT_NEAR(gradient(x).to_vector<double>()[static_cast<size_t>(i)], slope, 1e-6)
            << "rank " << r << " element " << i;
      }
    }
  }
}

TEST(CollectiveOps, GiveWhatEveryRankSent) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [&](comm::Group& group) {
      const int own = group.rank(), n = group.size();
      const Tensor all = group_tensor(group), x = numbered(own, {2, 3});
      const auto sum_at = [&](int64_t i) {
        double sum = 0;
        for (int r = 0; r < n; ++r) sum += value(r, i);
        return sum;
      };
      const auto summed = all_reduce(x, all).to_vector<double>(),
                 mean = all_reduce(x, all, Reduce::kAverage).to_vector<double>();
      const auto largest = all_reduce(x, all, Reduce::kMax).to_vector<double>();
      for (int64_t i = 0; i < 6; ++i) {
        EXPECT_EQ(summed[static_cast<size_t>(i)], sum_at(i));
        EXPECT_DOUBLE_EQ(mean[static_cast<size_t>(i)], sum_at(i) / n);
        EXPECT_EQ(largest[static_cast<size_t>(i)], value(n - 1, i));
      }
      EXPECT_EQ(x.to_vector<double>()[5], value(own, 5)) << "the input is not written";

      const Tensor rows = all_gather(x, all, 0), columns = all_gather(x, all, -1);
      ASSERT_EQ(rows.sizes(), (Shape{2 * n, 3}));
      ASSERT_EQ(columns.sizes(), (Shape{2, 3 * n}));
      for (int r = 0; r < n; ++r) {
        for (int64_t i = 0; i < 6; ++i) {
          EXPECT_EQ((rows.to_vector<double>()[static_cast<size_t>(6 * r + i)]), value(r, i));
          EXPECT_EQ((columns.to_vector<double>()[static_cast<size_t>(i / 3 * 3 * n + 3 * r + i % 3)]), value(r, i));
        }
      }

      // 5 rows over the ranks: 3 and 2, or 2, 2 and 1.
      const Tensor tall = numbered(own, {5, 2}), chunk = reduce_scatter(tall, all, 0);
      const int64_t each = (5 + n - 1) / n, first = each * own, count = std::min<int64_t>(each, 5 - first);
      ASSERT_EQ(chunk.sizes(), (Shape{count, 2}));
      for (int64_t i = 0; i < 2 * count; ++i)
        EXPECT_EQ((chunk.to_vector<double>()[static_cast<size_t>(i)]), sum_at(2 * first + i));
      EXPECT_TRUE(equal(all_gather(chunk, all, 0, 5), all_reduce(tall, all)));

      EXPECT_TRUE(equal(broadcast(x, all, n - 1), numbered(n - 1, {2, 3})));
      const Tensor at_root = reduce(x, all, 1);
      EXPECT_EQ(at_root.to_vector<double>()[4], own == 1 ? sum_at(4) : 0);

      // Rows of [5, 4] are cut, columns put together: [count, 4 n].
      const Tensor mine = numbered(own, {5, 4}), exchanged = all_to_all(mine, all, 0, 1);
      ASSERT_EQ(exchanged.sizes(), (Shape{count, 4 * n}));
      for (int64_t i = 0; i < count; ++i) {
        for (int64_t j = 0; j < 4 * n; ++j) {
          EXPECT_EQ((exchanged.to_vector<double>()[static_cast<size_t>(i * 4 * n + j)]),
                    value(static_cast<int>(j / 4), (first + i) * 4 + j % 4));
        }
      }
      EXPECT_TRUE(equal(all_to_all(exchanged, all, 1, 0, 5), mine)) << "there and back";
    });
  }
}

TEST(CollectiveOps, GradientsAreThoseOfTheSumOfAllLosses) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [](comm::Group& group) {
      const auto check = [&](const char* name, const Function& function, const Shape& sizes) {
        SCOPED_TRACE(name);
        expect_gradient(group, function, sizes);
      };
      check("all_reduce", [](auto& x, auto& g) { return all_reduce(x, g); }, {2, 3});
      check("average", [](auto& x, auto& g) { return all_reduce(x, g, Reduce::kAverage); }, {2, 3});
      check("all_gather", [](auto& x, auto& g) { return all_gather(x, g, 1); }, {2, 2});
      const int64_t own = op::chunk_of(5, group.size(), group.rank()).size;
      check("all_gather of 5", [](auto& x, auto& g) { return all_gather(x, g, 0, 5); }, {own, 2});
      check("reduce_scatter", [](auto& x, auto& g) { return reduce_scatter(x, g, 0); }, {5, 2});
      check("scattered average", [](auto& x, auto& g) { return reduce_scatter(x, g, 1, Reduce::kAverage); }, {2, 4});
      check("broadcast", [](auto& x, auto& g) { return broadcast(x, g, 1); }, {3});
      check("reduce", [](auto& x, auto& g) { return reduce(x, g, 0); }, {3});
      check("all_to_all", [](auto& x, auto& g) { return all_to_all(x, g, 0, 1); }, {5, 2});
      check("begun", [](auto& x, auto& g) { return wait_for(start_all_gather(x, g, 0)); }, {2, 2});
    });
  }
}

TEST(CollectiveOps, SecondDerivativesGoThroughTheTransposeAgain) {
  run_ranks(2, [](comm::Group& group) {
    const Tensor all = group_tensor(group);
    const Tensor x = set_requires_grad(numbered(group.rank(), {2}));
    const Tensor y = all_gather(x, all, 0);
    const Tensor dx = grad({sum(mul(mul(y, y), y))}, {x}, {.create_graph = true})[0];  // 3 x^2, once for each rank
    backward(sum(dx));
    for (int64_t i = 0; i < 2; ++i) {
      EXPECT_DOUBLE_EQ(dx.to_vector<double>()[static_cast<size_t>(i)], 2 * 3 * std::pow(value(group.rank(), i), 2));
      EXPECT_DOUBLE_EQ(gradient(x).to_vector<double>()[static_cast<size_t>(i)], 2 * 6 * value(group.rank(), i));
    }
  });
}

// In a ring of messages a rank has received y and `sent` x. The loss of each rank is y^2, that of the next one x^2.
void expect_gradients_come_back(const comm::Group& group, const Tensor& x, const Tensor& sent, const Tensor& y) {
  const int before = (group.rank() + group.size() - 1) % group.size();
  EXPECT_EQ(y.to_vector<double>(), numbered(before, {2}).to_vector<double>());
  EXPECT_EQ(sent.elems(), 0);
  if (group.rank() == 0) {
    // The gradient of what was received goes back first on rank 0; the others answer in the order of the ring.
    backward(sum(mul(y, y)));
    backward(sum(sent));
  } else {
    backward(sum(sent));
    backward(sum(mul(y, y)));
  }
  for (int64_t i = 0; i < 2; ++i)
    EXPECT_EQ(gradient(x).to_vector<double>()[static_cast<size_t>(i)], 2 * value(group.rank(), i));
}

TEST(CollectiveOps, MessagesCarryGradientsBack) {
  run_ranks(3, [](comm::Group& group) {
    const Tensor all = group_tensor(group);
    const int next = (group.rank() + 1) % 3, before = (group.rank() + 2) % 3;
    const Tensor x = set_requires_grad(numbered(group.rank(), {2}));
    // Rank 0 sends first, so that the ring does not wait for itself.
    Tensor sent, y;
    if (group.rank() == 0) sent = send(x, all, next, 7);
    y = receive(x, all, before, {2}, DType::kF64, 7);
    if (group.rank() != 0) sent = send(x, all, next, 7);
    expect_gradients_come_back(group, x, sent, y);
  });
}

// All begin before anyone waits, so no order is needed to keep the ring from waiting for itself.
TEST(CollectiveOps, MessagesThatAreBegunArriveAndCarryGradientsBack) {
  run_ranks(3, [](comm::Group& group) {
    const Tensor all = group_tensor(group);
    const int next = (group.rank() + 1) % 3, before = (group.rank() + 2) % 3;
    const Tensor x = set_requires_grad(numbered(group.rank(), {2}));
    const Tensor coming = start_receive(x, all, before, {2}, DType::kF64, 7), going = start_send(x, all, next, 7);
    EXPECT_TRUE(is_pending(coming) && is_pending(going));
    EXPECT_THROW(mul(coming, coming), StateError);
    const Tensor y = wait_for(coming), sent = wait_for(going);
    expect_gradients_come_back(group, x, sent, y);
  });
}

TEST(CollectiveOps, WhatIsBegunIsReadAfterWaiting) {
  for (const int ranks : {2, 3}) {
    run_ranks(ranks, [](comm::Group& group) {
      const Tensor all = group_tensor(group);
      const Tensor x = numbered(group.rank(), {4, 3});
      const comm::CommCounter counter;
      const Tensor a = start_all_reduce(x, all), b = start_all_gather(x, all, 1), c = start_reduce_scatter(x, all, 0),
                   d = start_all_to_all(x, all, 1, 0), e = start_broadcast(x, all, 1);
      EXPECT_TRUE(is_pending(a));
      EXPECT_EQ(counter.total(), 5);
      for (const Tensor* begun : {&a, &b, &c, &d, &e})
        EXPECT_EQ(begun->use_count(), 1) << "the call keeps the tensor that keeps the call: neither is ever freed";
      try {
        a.to_vector<double>();
        ADD_FAILURE() << "bytes of a pending result were shown";
      } catch (const StateError& error) {
        EXPECT_NE(std::string(error.what()).find("wait_for()"), std::string::npos) << error.what();
      }
      EXPECT_THROW(add(a, a), StateError);
      EXPECT_TRUE(equal(wait_for(e), numbered(1, {4, 3})));
      EXPECT_TRUE(equal(wait_for(d), all_to_all(x, all, 1, 0)));
      EXPECT_TRUE(equal(wait_for(c), reduce_scatter(x, all, 0)));
      EXPECT_TRUE(equal(wait_for(a), all_reduce(x, all)));
      EXPECT_TRUE(equal(wait_for(b), all_gather(x, all, 1)));
      EXPECT_FALSE(is_pending(wait_for(a)));
      EXPECT_TRUE(equal(wait_for(x), x)) << "of any other tensor, the tensor";
    });
  }
}

TEST(CollectiveOps, RefuseWhatDoesNotFit) {
  run_ranks(2, [](comm::Group& group) {
    const Tensor all = group_tensor(group), x = numbered(group.rank(), {2, 3});
    EXPECT_THROW(all_reduce(x, clone(all)), InvalidArgument) << "a copy is no group";
    EXPECT_THROW(all_reduce(x, x), InvalidArgument);
    EXPECT_THROW(all_gather(x, all, 2), InvalidArgument);
    EXPECT_THROW(all_gather(x, all, 0, 9), InvalidArgument);
    EXPECT_THROW(broadcast(x, all, 2), InvalidArgument);
    EXPECT_THROW(group_tensor(comm::Group()), InvalidArgument);
    const Tensor leaf = set_requires_grad(x);
    EXPECT_THROW(backward(sum(all_reduce(leaf, all, Reduce::kMax))), InvalidArgument) << "no gradient of a maximum";
  });
  const Tensor alone = Tensor::from<int64_t>({0, 1}, {2}), x = numbered(0, {2});
  EXPECT_TRUE(equal(all_gather(x, alone), x));
  EXPECT_THROW(send(x, alone, 0), InvalidArgument);
  EXPECT_THROW(receive(x, alone, 0, {2}, DType::kF64), InvalidArgument);
}

}  // namespace
}  // namespace chorale
