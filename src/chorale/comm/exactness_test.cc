// Every collective for dtypes, sizes and numbers of ranks, on values whose results are the same in every order: bitwise
// equal on all ranks, whatever path the data took. A sample by default; CHORALE_EXACTNESS=all runs everything.
#include <gtest/gtest.h>

#include <map>
#include <random>

#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/base/shared_object.h"
#include "chorale/comm/run_ranks_test_util.h"
#include "chorale/transport/fabric/fabric_name.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;

enum class Where { kOurs, kForeign, kStrided };
// The plain form; sizes that differ from rank to rank; several tensors in one call; one tensor that is cut.
enum class Form { kPlain, kUneven, kCoalesced, kSingle, kUnevenSingle };

struct Case {
  CallKind kind;
  Form form;
  DType dtype;
  int64_t count;
  Reduce reduce;
  Where where;
  int root;
};
const char* word_for(Form form) {
  constexpr const char* kNames[] = {"", " (uneven)", " (coalesced)", " (single)", " (uneven, single)"};
  return kNames[static_cast<size_t>(form)];
}
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << name_of(c.kind) << word_for(c.form) << ' ' << c.dtype << ' ' << c.count << ' ' << name_of(c.reduce)
             << " root " << c.root
             << (c.where == Where::kOurs      ? " ours"
                 : c.where == Where::kForeign ? " foreign"
                                              : " strided");
}

using Value = std::function<int64_t(int64_t index)>;

template <class T>
T convert(int64_t value) {
  if constexpr (std::is_same_v<T, bool>) {
    return value != 0;
  } else if constexpr (std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>) {
    return T(static_cast<float>(value));
  } else if constexpr (std::is_same_v<T, complex64>) {
    return T(static_cast<float>(value), static_cast<float>(-value));
  } else if constexpr (std::is_same_v<T, complex128>) {
    return T(static_cast<double>(value), static_cast<double>(-value));
  } else {
    return static_cast<T>(value);
  }
}

Tensor make(const Case& c, int64_t count, const Value& value) {
  return visit_dtype(c.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    if (c.where == Where::kForeign) {
      auto memory = std::make_shared<std::unique_ptr<T[]>>(new T[static_cast<size_t>(count)]);
      const Tensor tensor =
          Tensor::borrow(std::span<T>(memory->get(), static_cast<size_t>(count)), {count}, [memory] {});
      for (int64_t i = 0; i < count; ++i) (*memory)[static_cast<size_t>(i)] = convert<T>(value(i));
      return tensor;
    }
    const int64_t stride = c.where == Where::kStrided ? 3 : 1;
    const Tensor whole = Tensor::empty({count * stride}, c.dtype);
    for (int64_t i = 0; i < count; ++i) whole.data<T>()[i * stride] = convert<T>(value(i));
    return stride == 1 ? whole : whole.view_as({count}, {stride}, 0);
  });
}

template <class T>
bool same(const T& a, const T& b) {
  if constexpr (std::is_same_v<T, float16> || std::is_same_v<T, bfloat16>) {
    return a.bits == b.bits;
  } else {
    return a == b;
  }
}

void expect(const Tensor& tensor, const Value& value, const char* what = "") {
  visit_dtype(tensor.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t stride = tensor.elems() > 1 ? tensor.stride(0) : 1;
    for (int64_t i = 0; i < tensor.elems(); ++i) {
      const T found = tensor.data<T>()[i * stride], wanted = convert<T>(value(i));
      if (!same(found, wanted)) {
        ADD_FAILURE() << what << " element " << i << " of " << tensor.elems() << " is wrong";
        return;
      }
    }
  });
}

bool reduces(CallKind kind) {
  return kind == CallKind::kReduce || kind == CallKind::kAllReduce || kind == CallKind::kReduceScatter;
}

// What rank r holds at index i: as good as random, so that an element at a wrong place, or of a wrong rank, shows.
// Never 0, which is what outputs hold before, but for bool. What is moved fits every dtype; what is reduced is small,
// so that sums, and mostly ones, so that products fit, too.
int64_t held(const Case& c, int rank, int64_t i) {
  uint64_t hash = (static_cast<uint64_t>(i) * 1009 + static_cast<uint64_t>(rank) + 1) * 0x9e3779b97f4a7c15u;
  hash ^= hash >> 29;
  hash *= 0xbf58476d1ce4e5b9u;
  const auto below = [&](uint64_t limit) { return static_cast<int64_t>((hash >> 32) % limit); };
  if (c.dtype == DType::kBool) return below(2);
  if (!reduces(c.kind)) return below(120) + 1;
  if (c.reduce == Reduce::kProduct) return below(5) == 0 ? 2 : 1;
  return below(5) + 1;
}

int64_t reduced(const Case& c, int size, int64_t i) {
  int64_t result = held(c, 0, i);
  if (c.dtype == DType::kBool) result = result != 0;
  for (int rank = 1; rank < size; ++rank) {
    int64_t x = held(c, rank, i);
    if (c.dtype == DType::kBool) x = x != 0;
    switch (c.reduce) {
      case Reduce::kProduct:
        result *= x;
        break;
      case Reduce::kMin:
        result = std::min(result, x);
        break;
      case Reduce::kMax:
        result = std::max(result, x);
        break;
      case Reduce::kBitAnd:
        result &= x;
        break;
      case Reduce::kBitOr:
        result |= x;
        break;
      case Reduce::kBitXor:
        result ^= x;
        break;
      default:
        result += x;
    }
  }
  return result;
}

// Where rank r's part begins, and how much it is, of something that ranks share unevenly.
int64_t part_of(const Case& c, int rank) { return c.count + 3 * rank; }
int64_t begin_of(const Case& c, int rank) { return c.count * rank + 3 * rank * (rank - 1) / 2; }

void run_uneven_case(const Group& group, const Case& c, const CallOptions& soon) {
  const int rank = group.rank(), size = group.size();
  const auto nothing = [](int64_t) { return int64_t{0}; };
  std::vector<Tensor> list(static_cast<size_t>(size));
  if (c.kind == CallKind::kAllGather) {
    const Tensor x = make(c, part_of(c, rank), [&](int64_t i) { return held(c, rank, i); });
    for (int r = 0; r < size; ++r) list[static_cast<size_t>(r)] = make(c, part_of(c, r), nothing);
    group.all_gather(list, x, soon).wait();
    for (int r = 0; r < size; ++r) expect(list[static_cast<size_t>(r)], [&](int64_t i) { return held(c, r, i); });
    return expect(
        x, [&](int64_t i) { return held(c, rank, i); }, "input");
  }
  const Tensor y = make(c, part_of(c, rank), nothing);
  for (int r = 0; r < size; ++r) {
    list[static_cast<size_t>(r)] = make(c, part_of(c, r), [&](int64_t i) { return held(c, rank, begin_of(c, r) + i); });
  }
  group.reduce_scatter(y, list, c.reduce, soon).wait();
  expect(y, [&](int64_t i) { return reduced(c, size, begin_of(c, rank) + i); });
}

void run_coalesced_case(const Group& group, const Case& c, const CallOptions& soon) {
  const int rank = group.rank(), size = group.size();
  const auto nothing = [](int64_t) { return int64_t{0}; };
  // Tensor k of rank r: its values go on where those of tensor k - 1 end.
  const int64_t counts[] = {c.count, 1, c.count / 2, 0, 5}, begins[] = {0, c.count, c.count + 1, 0, 2 * c.count};
  std::vector<Tensor> tensors;
  std::vector<std::vector<Tensor>> outputs;
  for (size_t k = 0; k < std::size(counts); ++k) {
    tensors.push_back(make(c, counts[k], [&](int64_t i) { return held(c, rank, begins[k] + i); }));
    outputs.emplace_back();
    for (int r = 0; r < size; ++r) outputs.back().push_back(make(c, counts[k], nothing));
  }
  if (c.kind == CallKind::kAllReduce) {
    group.all_reduce_coalesced(tensors, c.reduce, soon).wait();
    for (size_t k = 0; k < std::size(counts); ++k)
      expect(tensors[k], [&](int64_t i) { return reduced(c, size, begins[k] + i); });
    return;
  }
  group.all_gather_coalesced(outputs, tensors, soon).wait();
  for (size_t k = 0; k < std::size(counts); ++k) {
    for (int r = 0; r < size; ++r)
      expect(outputs[k][static_cast<size_t>(r)], [&](int64_t i) { return held(c, r, begins[k] + i); });
  }
}

// Rows of two elements. Evenly, or rank s gives n + s + 2r rows to rank r.
void run_single_case(const Group& group, const Case& c, const CallOptions& soon) {
  const int rank = group.rank(), size = group.size();
  const auto rows = [&](int from, int to) { return c.form == Form::kSingle ? c.count : c.count + from + 2 * to; };
  std::vector<int64_t> in, out;
  int64_t given = 0, taken = 0;
  for (int r = 0; r < size; ++r) {
    in.push_back(rows(rank, r));
    out.push_back(rows(r, rank));
    given += in.back();
    taken += out.back();
  }
  const auto as_rows = [](const Tensor& x) {
    const int64_t stride = x.elems() > 1 ? x.stride(0) : 1;
    return x.view_as({x.elems() / 2, 2}, {2 * stride, stride}, 0);
  };
  const Tensor x = make(c, 2 * given, [&](int64_t i) { return held(c, rank, i); });
  const Tensor y = make(c, 2 * taken, [](int64_t) { return int64_t{0}; });
  if (c.form == Form::kSingle) {
    group.all_to_all_single(as_rows(y), as_rows(x), {}, {}, soon).wait();
  } else {
    group.all_to_all_single(as_rows(y), as_rows(x), out, in, soon).wait();
  }
  expect(y, [&](int64_t i) {
    int from = 0;
    for (; i >= 2 * rows(from, rank); ++from) i -= 2 * rows(from, rank);
    int64_t before = 0;
    for (int r = 0; r < rank; ++r) before += 2 * rows(from, r);
    return held(c, from, before + i);
  });
}

void run_case(Group& group, const Case& c) {
  const CallOptions soon{.tag = 0, .timeout = 20s};
  if (c.form == Form::kUneven) return run_uneven_case(group, c, soon);
  if (c.form == Form::kCoalesced) return run_coalesced_case(group, c, soon);
  if (c.form != Form::kPlain) return run_single_case(group, c, soon);
  const int rank = group.rank(), size = group.size(), root = c.root % size;
  const int64_t n = c.count;
  const auto own = [&](int64_t i) { return held(c, rank, i); };
  const auto of = [&](int r, int64_t first = 0) { return [&c, r, first](int64_t i) { return held(c, r, first + i); }; };
  const auto sum = [&](int64_t first = 0) {
    return [&c, size, first](int64_t i) { return reduced(c, size, first + i); };
  };
  const auto nothing = [](int64_t) { return int64_t{0}; };
  const auto list = [&](const Value& value) {
    std::vector<Tensor> tensors(static_cast<size_t>(size));
    for (Tensor& tensor : tensors) tensor = make(c, n, value);
    return tensors;
  };
  switch (c.kind) {
    case CallKind::kBroadcast: {
      const Tensor x = make(c, n, own);
      group.broadcast(x, root, soon).wait();
      return expect(x, of(root));
    }
    case CallKind::kReduce: {
      const Tensor x = make(c, n, own);
      group.reduce(x, root, c.reduce, soon).wait();
      if (rank == root) expect(x, sum());
      return;
    }
    case CallKind::kAllReduce: {
      const Tensor x = make(c, n, own);
      group.all_reduce(x, c.reduce, soon).wait();
      return expect(x, sum());
    }
    case CallKind::kAllGather: {
      const Tensor x = make(c, n, own), all = make(c, n * size, nothing);
      const auto outputs = list(nothing);
      group.all_gather(outputs, x, soon).wait();
      group.all_gather_into(all, x, soon).wait();
      for (int r = 0; r < size; ++r) expect(outputs[static_cast<size_t>(r)], of(r));
      expect(all, [&](int64_t i) { return held(c, static_cast<int>(i / n), i % n); });
      return expect(x, own, "input");
    }
    case CallKind::kGather: {
      const Tensor x = make(c, n, own);
      const auto outputs = rank == root ? list(nothing) : std::vector<Tensor>();
      group.gather(outputs, x, root, soon).wait();
      for (int r = 0; r < static_cast<int>(outputs.size()); ++r) expect(outputs[static_cast<size_t>(r)], of(r));
      return expect(x, own, "input");
    }
    case CallKind::kScatter: {
      const Tensor x = make(c, n, nothing);
      std::vector<Tensor> inputs;
      for (int r = 0; r < size && rank == root; ++r) inputs.push_back(make(c, n, of(r, 11)));
      group.scatter(x, inputs, root, soon).wait();
      return expect(x, of(rank, 11));
    }
    case CallKind::kReduceScatter: {
      const Tensor x = make(c, n, nothing), from = make(c, n * size, own), y = make(c, n, nothing);
      std::vector<Tensor> inputs(static_cast<size_t>(size));
      for (int r = 0; r < size; ++r) inputs[static_cast<size_t>(r)] = make(c, n, of(rank, 13 * r));
      group.reduce_scatter(x, inputs, c.reduce, soon).wait();
      expect(x, sum(13 * rank));
      group.reduce_scatter_from(y, from, c.reduce, soon).wait();
      return expect(y, sum(n * rank));
    }
    case CallKind::kAllToAll: {
      std::vector<Tensor> inputs, outputs;
      // Rank s gives rank r so many: n + s + r. What it gives begins with its own number and the receiver's.
      for (int r = 0; r < size; ++r) {
        inputs.push_back(make(c, n + rank + r, of(rank, 17 * r)));
        outputs.push_back(make(c, n + rank + r, nothing));
      }
      group.all_to_all(outputs, inputs, soon).wait();
      for (int r = 0; r < size; ++r) expect(outputs[static_cast<size_t>(r)], of(r, 17 * rank));
      return;
    }
    case CallKind::kSend: {
      const Tensor x = make(c, n, own), y = make(c, n, nothing);
      const int right = (rank + 1) % size, left = (rank + size - 1) % size;
      const auto works = batch_isend_irecv({P2POp::send(group, x, right, 5), P2POp::recv(group, y, left, 5)});
      for (const Work& work : works) work.wait();
      EXPECT_EQ(works[1].source_rank(), left);
      return expect(y, of(left));
    }
    default:
      return;
  }
}

const CallKind kKinds[] = {CallKind::kBroadcast, CallKind::kReduce,        CallKind::kAllReduce,
                           CallKind::kAllGather, CallKind::kGather,        CallKind::kScatter,
                           CallKind::kSend,      CallKind::kReduceScatter, CallKind::kAllToAll};
const int64_t kCounts[] = {0, 1, 3, 17, 1000, 65537, (1 << 20) + 3};
const Reduce kReductions[] = {Reduce::kSum,    Reduce::kProduct, Reduce::kMin,   Reduce::kMax,
                              Reduce::kBitAnd, Reduce::kBitOr,   Reduce::kBitXor};

std::vector<Form> forms_of(CallKind kind) {
  switch (kind) {
    case CallKind::kAllReduce:
      return {Form::kPlain, Form::kCoalesced};
    case CallKind::kAllGather:
      return {Form::kPlain, Form::kUneven, Form::kCoalesced};
    case CallKind::kReduceScatter:
      return {Form::kPlain, Form::kUneven};
    case CallKind::kAllToAll:
      return {Form::kPlain, Form::kSingle, Form::kUnevenSingle};
    default:
      return {Form::kPlain};
  }
}
bool makes_sense(const Case& c) {
  if (!reduces(c.kind)) return c.reduce == Reduce::kSum;
  if (is_complex(c.dtype)) return c.reduce == Reduce::kSum;
  const bool bits = c.reduce >= Reduce::kBitAnd;
  return !bits || c.dtype == DType::kBool || is_integral(c.dtype);
}

std::vector<Case> all_cases() {
  std::vector<Case> cases;
  int root = 0;
  for (CallKind kind : kKinds) {
    for (Form form : forms_of(kind)) {
      for (DType dtype : kAllDTypes) {
        for (int64_t count : kCounts) {
          for (Reduce reduce : kReductions) {
            for (Where where : {Where::kOurs, Where::kForeign, Where::kStrided}) {
              const Case c{kind, form, dtype, count, reduce, where, root++};
              if (makes_sense(c)) cases.push_back(c);
            }
          }
        }
      }
    }
  }
  return cases;
}

// The same on all ranks and in every run.
std::vector<Case> sample(unsigned seed, size_t count, int64_t largest) {
  std::vector<Case> cases = all_cases();
  if (config::env("CHORALE_EXACTNESS") == "all") return cases;
  std::mt19937 random(seed);
  std::shuffle(cases.begin(), cases.end(), random);
  // One of each kind and form, then a second one of each, …
  std::map<std::pair<CallKind, Form>, int> seen;
  std::vector<std::pair<int, Case>> turns;
  turns.reserve(cases.size());
  for (const Case& c : cases) turns.emplace_back(seen[{c.kind, c.form}]++, c);
  std::stable_sort(turns.begin(), turns.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (size_t i = 0; i < cases.size(); ++i) cases[i] = turns[i].second;
  // The largest take longest: two of them.
  const auto first_large =
      std::stable_partition(cases.begin(), cases.end(), [&](const Case& c) { return c.count <= largest; });
  std::rotate(cases.begin(), first_large, first_large + 2);
  cases.resize(std::min(count, cases.size()));
  return cases;
}

// False when the rest was not tried.
bool run_all(Group& group, const std::vector<Case>& cases) {
  for (const Case& c : cases) {
    SCOPED_TRACE(concat(group.size(), " ranks: ", c));
    run_case(group, c);
    if (testing::Test::HasFatalFailure()) return false;
  }
  return true;
}

TEST(Exactness, EveryCollectiveAmongThreads) {
  for (int size : sizes_to_run({1, 2, 3, 5, 8}))
    run_ranks(size, [&](Group& group) { EXPECT_TRUE(run_all(group, sample(static_cast<unsigned>(size), 60, 65537))); });
}

TEST(Exactness, EveryCollectiveAmongProcesses) {
  for (int size : {2, 3, 5, 8}) {
    const auto results = run_processes(
        size, [&](Group& group) { EXPECT_TRUE(run_all(group, sample(static_cast<unsigned>(100 + size), 80, 65537))); });
    EXPECT_EQ(results, std::vector<int>(static_cast<size_t>(size), 0));
  }
}

// Hosts that are branches of the tree of sums, hosts that are not, one rank each, and ranks dealt out in turn.
const std::vector<std::vector<int>> kLayouts = {{0, 1},       {0, 0, 1, 1},    {0, 0, 0, 1, 1},
                                                {0, 1, 2},    {0, 1, 0, 1},    {0, 0, 1, 2},
                                                {0, 0, 0, 1}, {0, 0, 1, 1, 2}, {0, 1, 2, 2, 1, 0}};

TEST(Exactness, EveryCollectiveBetweenHosts) {
  for (size_t i = 0; i < kLayouts.size(); ++i)
    run_hosts(kLayouts[i], [&](Group& group) {
      EXPECT_TRUE(run_all(group, sample(static_cast<unsigned>(200 + i), 30, 65537)));
      EXPECT_EQ(group.backend(), transport::choose_fabric("").kind);
    });
}

TEST(Exactness, EveryCollectiveBetweenHostsOverUcx) {
  if (const Availability ucx = shared_object_availability(kUcxObject); !ucx.yes) GTEST_SKIP() << ucx.reason;
  for (const auto& layout : {kLayouts[0], kLayouts[2], kLayouts[3]}) {
    run_hosts(layout,
              [&](Group& group) {
                EXPECT_TRUE(run_all(group, sample(static_cast<unsigned>(300 + layout.size()), 60, 65537)));
                EXPECT_EQ(group.backend(), "ucx");
              },
              {.fabric = "ucx"});
  }
}

// Large enough for reduction in place, and for the staging of memory that peers cannot reach; and both in one call.
TEST(Exactness, LargeAllReducesOfOurOwnAndOfForeignMemory) {
  run_everywhere(3, [](Group& group) {
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kI64}) {
      for (Where where : {Where::kOurs, Where::kForeign}) {
        for (CallKind kind : {CallKind::kAllReduce, CallKind::kReduce}) {
          run_case(group, {kind, Form::kPlain, dtype, (1 << 20) + 3, Reduce::kSum, where, 1});
          // Rank 0 holds its data elsewhere than the others.
          Case mixed{kind, Form::kPlain, dtype, 70001, Reduce::kSum, where, 2};
          if (group.rank() == 0) mixed.where = where == Where::kOurs ? Where::kForeign : Where::kOurs;
          run_case(group, mixed);
          mixed.count = 1500;
          run_case(group, mixed);
        }
      }
    }
  });
}

// Between hosts sums of such sizes travel in pieces of 4 MiB, of which few are on their way at once.
TEST(Exactness, SumsBetweenHostsInSeveralPieces) {
  for (const auto& layout : {kLayouts[0], kLayouts[1], kLayouts[3]}) {
    run_hosts(layout, [](Group& group) {
      run_case(group, {CallKind::kAllReduce, Form::kPlain, DType::kF32, (6 << 20) + 3, Reduce::kSum, Where::kOurs, 1});
      run_case(group, {CallKind::kReduce, Form::kPlain, DType::kBF16, (6 << 20) + 3, Reduce::kSum, Where::kOurs, 1});
    });
  }
}

TEST(Exactness, FloatSumsDoNotDependOnThePath) { EXPECT_NO_FATAL_FAILURE(run_everywhere(5, expect_sums_in_order)); }

}  // namespace
}  // namespace chorale::comm
