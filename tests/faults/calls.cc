#include "calls.h"

#include <algorithm>
#include <string>

#include "chorale/base/error.h"
#include "chorale/comm/coalescing.h"
#include "chorale/comm/objects.h"

namespace chorale::faults {
namespace {

using comm::Group;
using comm::Value;

// What rank r holds at index i: small integers, so that sums are exact in every order; no rank has another's.
float held(int rank, int64_t i) { return static_cast<float>(1000 * rank + i % 997); }
float summed(int size, int64_t i) {
  float sum = 0;
  for (int rank = 0; rank < size; ++rank) sum += held(rank, i);
  return sum;
}

auto of_rank(int rank, int64_t shift = 0) {
  return [rank, shift](int64_t i) { return held(rank, i + shift); };
}

// What is asked once of a tensor or a group is not asked for each of millions of elements: in the debug build that took
// longer than everything else in a cell.
template <class T, class Held>
void fill(T* data, int64_t count, const Held& value) {
  for (int64_t i = 0; i < count; ++i) data[i] = static_cast<T>(value(i));
}
template <class Held>
Tensor tensor_of(DType dtype, int64_t count, const Held& value) {
  const Tensor tensor = Tensor::empty({count}, dtype);
  if (dtype == DType::kF32) {
    fill(tensor.data<float>(), count, value);
  } else {
    fill(tensor.data<int32_t>(), count, value);
  }
  return tensor;
}
Tensor own(const CallArgs& args, int64_t shift = 0) {
  return tensor_of(args.dtype, args.count, of_rank(args.group.rank(), shift));
}
Tensor room(const CallArgs& args, int64_t count) {
  return tensor_of(args.dtype, count, [](int64_t) { return -1.0f; });
}
std::vector<Tensor> one_per_rank(const CallArgs& args) {
  std::vector<Tensor> list;
  for (int rank = 0; rank < args.group.size(); ++rank) list.push_back(room(args, args.count));
  return list;
}
// What this rank has for each rank.
std::vector<Tensor> own_for_each(const CallArgs& args) {
  std::vector<Tensor> list;
  for (int rank = 0; rank < args.group.size(); ++rank) list.push_back(own(args, rank));
  return list;
}
bool is_root(const CallArgs& args) { return args.group.global_rank(args.group.rank()) == args.root; }

void require(bool good, const std::string& what) {
  if (!good) throw WrongResult(what);
}
// Only f32 is compared: other dtypes occur in calls that must fail.
template <class Expected>
void require_elements(const Tensor& tensor, const Expected& expected) {
  if (tensor.dtype() != DType::kF32) return;
  const float* const data = tensor.data<float>();
  for (int64_t i = 0, count = tensor.elems(); i < count; ++i) {
    if (data[i] != expected(i)) throw WrongResult(concat("element ", i, " is ", data[i], ", not ", expected(i)));
  }
}
auto sum_of(int size, int64_t shift = 0) {
  return [size, shift](int64_t i) { return summed(size, i + shift); };
}

void run_barrier(const CallArgs& args) { args.group.barrier().wait(); }
void run_monitored_barrier(const CallArgs& args) {
  // Rank 0 is to find out first which rank is missing: the others only know that it does not answer.
  const auto timeout = args.group.timeout();
  args.group.monitored_barrier(args.group.rank() == 0 ? timeout / 2 : timeout);
}
void run_broadcast(const CallArgs& args) {
  const Tensor x = own(args);
  args.group.broadcast(x, args.root).wait();
  require_elements(x, of_rank(args.group.group_rank(args.root)));
}
void run_reduce(const CallArgs& args) {
  const Tensor x = own(args);
  args.group.reduce(x, args.root, args.reduce).wait();
  if (is_root(args)) require_elements(x, sum_of(args.group.size()));
}
void run_all_reduce(const CallArgs& args) {
  const Tensor x = own(args);
  args.group.all_reduce(x, args.reduce).wait();
  require_elements(x, sum_of(args.group.size()));
}
void run_all_reduce_of_foreign_memory(const CallArgs& args) {
  std::vector<float> x(static_cast<size_t>(args.count));
  for (int64_t i = 0; i < args.count; ++i) x[static_cast<size_t>(i)] = held(args.group.rank(), i);
  args.group.all_reduce(std::span(x), args.reduce).wait();
  for (int64_t i = 0; i < args.count; ++i)
    require(x[static_cast<size_t>(i)] == summed(args.group.size(), i), "a sum of foreign memory is wrong");
}
void run_all_reduce_coalesced(const CallArgs& args) {
  const std::vector<Tensor> x{own(args), own(args, 1), own(args, 2)};
  args.group.all_reduce_coalesced(x, args.reduce).wait();
  for (int64_t i = 0; i < 3; ++i) require_elements(x[static_cast<size_t>(i)], sum_of(args.group.size(), i));
}
void run_all_gather(const CallArgs& args) {
  const auto outputs = one_per_rank(args);
  args.group.all_gather(outputs, own(args)).wait();
  for (int r = 0; r < args.group.size(); ++r) require_elements(outputs[static_cast<size_t>(r)], of_rank(r));
}
void run_all_gather_into(const CallArgs& args) {
  const Tensor all = room(args, args.count * args.group.size());
  args.group.all_gather_into(all, own(args)).wait();
  require_elements(all, [&](int64_t i) { return held(static_cast<int>(i / args.count), i % args.count); });
}
void run_gather(const CallArgs& args) {
  const auto outputs = is_root(args) ? one_per_rank(args) : std::vector<Tensor>();
  args.group.gather(outputs, own(args), args.root).wait();
  for (int r = 0; r < static_cast<int>(outputs.size()); ++r)
    require_elements(outputs[static_cast<size_t>(r)], of_rank(r));
}
void run_scatter(const CallArgs& args) {
  const Tensor x = room(args, args.count);
  args.group.scatter(x, is_root(args) ? own_for_each(args) : std::vector<Tensor>(), args.root).wait();
  require_elements(x, of_rank(args.group.group_rank(args.root), args.group.rank()));
}
void run_reduce_scatter(const CallArgs& args) {
  const Tensor x = room(args, args.count);
  args.group.reduce_scatter(x, own_for_each(args), args.reduce).wait();
  require_elements(x, sum_of(args.group.size(), args.group.rank()));
}
void run_reduce_scatter_from(const CallArgs& args) {
  CallArgs whole = args;
  whole.count = args.count * args.group.size();
  const Tensor x = room(args, args.count);
  args.group.reduce_scatter_from(x, own(whole), args.reduce).wait();
  require_elements(x, sum_of(args.group.size(), args.count * args.group.rank()));
}
void run_all_to_all(const CallArgs& args) {
  const auto outputs = one_per_rank(args);
  args.group.all_to_all(outputs, own_for_each(args)).wait();
  for (int r = 0; r < args.group.size(); ++r)
    require_elements(outputs[static_cast<size_t>(r)], of_rank(r, args.group.rank()));
}
void run_all_to_all_single(const CallArgs& args) {
  // Rank s gives count + s + r elements to rank r; those for lower ranks come first.
  const int rank = args.group.rank(), size = args.group.size();
  const auto elems = [&](int from, int to) { return args.count + from + to; };
  std::vector<int64_t> in, out;
  int64_t total = 0;
  for (int r = 0; r < size; ++r) {
    in.push_back(elems(rank, r));
    out.push_back(elems(r, rank));
    total += in.back();
  }
  CallArgs whole = args;
  whole.count = total;
  const Tensor x = room(args, total);
  args.group.all_to_all_single(x, own(whole), out, in).wait();
  require_elements(x, [&](int64_t i) {
    int from = 0;
    for (; i >= elems(from, rank); ++from) i -= elems(from, rank);
    for (int r = 0; r < rank; ++r) i += elems(from, r);
    return held(from, i);
  });
}
// Messages go round in a ring.
void run_send(const CallArgs& args) {
  const int size = args.group.size(), rank = args.group.rank();
  const int right = args.group.global_rank((rank + 1) % size), left = args.group.global_rank((rank + size - 1) % size);
  const Tensor x = own(args), y = room(args, args.count);
  const comm::Work sent = args.group.isend(x, right), received = args.group.irecv(y, left);
  sent.wait();
  received.wait();
  require_elements(y, of_rank(args.group.group_rank(left)));
}
void run_sparse_all_reduce(const CallArgs& args) {
  const int64_t rows = std::min<int64_t>(args.count, 100);
  const Tensor indices = Tensor::empty({1, rows}, DType::kI64);
  for (int64_t i = 0; i < rows; ++i) indices.data<int64_t>()[i] = i;
  CallArgs few = args;
  few.count = rows;
  const Tensor sum = args.group.sparse_all_reduce(Tensor::sparse_coo(indices, own(few), {100}));
  require_elements(sum.sparse().values, sum_of(args.group.size()));
}
Value value_of(int rank) { return comm::Map{{"rank", rank}, {"list", comm::List{1.5, "two", true}}}; }
void run_all_gather_object(const CallArgs& args) {
  const auto values = comm::all_gather_object(args.group, value_of(args.group.rank()));
  for (int r = 0; r < args.group.size(); ++r)
    require(values[static_cast<size_t>(r)] == value_of(r), "a value is wrong");
}
void run_gather_object(const CallArgs& args) {
  const auto values = comm::gather_object(args.group, value_of(args.group.rank()), args.root);
  for (int r = 0; r < static_cast<int>(values.size()); ++r)
    require(values[static_cast<size_t>(r)] == value_of(r), "a value is wrong");
}
void run_broadcast_object_list(const CallArgs& args) {
  std::vector<Value> values{value_of(args.group.rank()), args.group.rank()};
  comm::broadcast_object_list(args.group, values, args.root);
  const int root = args.group.group_rank(args.root);
  require(values == std::vector<Value>{value_of(root), root}, "a value is wrong");
}
void run_scatter_object_list(const CallArgs& args) {
  std::vector<Value> output(1), inputs;
  for (int r = 0; is_root(args) && r < args.group.size(); ++r) inputs.push_back(value_of(r));
  comm::scatter_object_list(args.group, output, inputs, args.root);
  require(output[0] == value_of(args.group.rank()), "a value is wrong");
}
void run_new_group(const CallArgs& args) {
  const Group other = args.group.duplicate();
  require(other.size() == args.group.size(), "a group of the wrong size");
}

constexpr CallRow kRows[] = {
    // name, has data, reduces, has a root, pairwise
    {"barrier", false, false, false, false, run_barrier},
    {"monitored_barrier", false, false, false, false, run_monitored_barrier},
    {"broadcast", true, false, true, false, run_broadcast},
    {"reduce", true, true, true, false, run_reduce},
    {"all_reduce", true, true, false, false, run_all_reduce},
    {"all_reduce_of_foreign_memory", false, true, false, false, run_all_reduce_of_foreign_memory},
    {"all_reduce_coalesced", true, true, false, false, run_all_reduce_coalesced},
    {"all_gather", true, false, false, true, run_all_gather},
    {"all_gather_into", true, false, false, false, run_all_gather_into},
    {"gather", true, false, true, false, run_gather},
    {"scatter", true, false, true, false, run_scatter},
    {"reduce_scatter", true, true, false, true, run_reduce_scatter},
    {"reduce_scatter_from", true, true, false, false, run_reduce_scatter_from},
    {"all_to_all", true, false, false, true, run_all_to_all},
    {"all_to_all_single", true, false, false, true, run_all_to_all_single},
    {"send", true, false, false, true, run_send},
    {"sparse_all_reduce", false, false, false, false, run_sparse_all_reduce},
    {"all_gather_object", false, false, false, false, run_all_gather_object},
    {"gather_object", false, false, true, false, run_gather_object},
    {"broadcast_object_list", false, false, true, false, run_broadcast_object_list},
    {"scatter_object_list", false, false, true, false, run_scatter_object_list},
    {"new_group", false, false, false, false, run_new_group},
};

}  // namespace

std::span<const CallRow> call_rows() { return kRows; }

const CallRow& call_row(std::string_view name) {
  const auto* const found =
      std::find_if(std::begin(kRows), std::end(kRows), [&](const auto& row) { return row.name == name; });
  CHORALE_CHECK(found != std::end(kRows), "there is no call '", name, "'");
  return *found;
}

void make_call(const CallRow& row, Group& group, int64_t count, int root, Wrong wrong) {
  CallArgs args{.group = group, .count = count, .root = root};
  if (wrong == Wrong::kShape) ++args.count;
  if (wrong == Wrong::kDtype) args.dtype = DType::kI32;
  if (wrong == Wrong::kReduction) args.reduce = Reduce::kMax;
  if (wrong == Wrong::kRoot) args.root = group.global_rank((group.group_rank(root) + 1) % group.size());
  row.run(args);
}

}  // namespace chorale::faults
