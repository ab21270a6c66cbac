#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <vector>

#include "chorale/app/bench/collectives.h"
#include "chorale/base/parallel_for.h"
#include "chorale/comm/group.h"
#include "chorale/transport/store/file_store.h"

namespace chorale::app {
namespace {

using comm::Group;
using Clock = std::chrono::steady_clock;

// One collective on one size: what it reads is written before each timed call, as a backward pass does.
struct Measured {
  std::function<void()> refill;
  std::function<void()> call;
  std::function<int64_t()> wrong;  // elements of the result, after one call
};

Tensor ours(int64_t elems) { return Tensor::empty({elems}, DType::kF32); }
// Memory that peers cannot reach.
Tensor foreign(int64_t elems) {
  const auto memory = std::make_shared<std::vector<float>>(static_cast<size_t>(elems));
  return Tensor::borrow(std::span<float>(*memory), {elems}, [memory] {});
}

void fill(const Tensor& tensor, float value) { std::fill_n(tensor.data<float>(), tensor.elems(), value); }
int64_t count_wrong(const Tensor& tensor, float expected) {
  return tensor.elems() - std::count(tensor.data<float>(), tensor.data<float>() + tensor.elems(), expected);
}

Measured prepare(const Group& group, const std::string& op, int64_t elems, bool registered) {
  const auto make = registered ? ours : foreign;
  const int64_t n = group.size(), piece = std::max<int64_t>(1, elems / n);
  const auto size = static_cast<float>(n);
  const Tensor x = make(elems);
  const auto refill_x = [x] { fill(x, 1); };
  if (op == "all_reduce")
    return {refill_x, [=, &group] { group.all_reduce(x).wait(); }, [=] { return count_wrong(x, size); }};
  if (op == "broadcast")
    return {refill_x, [=, &group] { group.broadcast(x, 0).wait(); }, [=] { return count_wrong(x, 1); }};
  if (op == "reduce") {
    return {refill_x, [=, &group] { group.reduce(x, 0).wait(); },
            [=, &group] { return group.rank() == 0 ? count_wrong(x, size) : 0; }};
  }
  if (op == "all_gather") {
    const Tensor all = make(elems * n);
    return {refill_x, [=, &group] { group.all_gather_into(all, x).wait(); }, [=] { return count_wrong(all, 1); }};
  }
  const Tensor whole = make(piece * n);
  const auto refill_whole = [whole] { fill(whole, 1); };
  if (op == "reduce_scatter") {
    const Tensor own = make(piece);
    return {refill_whole, [=, &group] { group.reduce_scatter_from(own, whole).wait(); },
            [=] { return count_wrong(own, size); }};
  }
  if (op == "all_to_all") {
    const Tensor to = make(piece * n);
    return {refill_whole, [=, &group] { group.all_to_all_single(to, whole).wait(); },
            [=] { return count_wrong(to, 1); }};
  }
  if (op == "send_recv") {
    const Tensor inbox = make(elems);
    const int rank = group.rank(), ranks = group.size();
    return {refill_x,
            [=, &group] {
              const auto works = comm::batch_isend_irecv({comm::P2POp::send(group, x, (rank + 1) % ranks),
                                                          comm::P2POp::recv(group, inbox, (rank + ranks - 1) % ranks)});
              for (const comm::Work& work : works) work.wait();
            },
            [=] { return count_wrong(inbox, 1); }};
  }
  if (op == "new_group") return {[] {}, [&group] { group.duplicate(); }, [] { return int64_t{0}; }};
  if (op == "64_subgroups") {
    std::vector<int> even, odd;
    for (int r = 0; r < group.size(); ++r) (r % 2 == 0 ? even : odd).push_back(r);
    return {[] {},
            [=, &group] {
              std::vector<Group> groups;
              groups.reserve(64);
              for (int i = 0; i < 64; ++i) groups.push_back(group.new_group(i % 2 == 0 || odd.empty() ? even : odd));
            },
            [] { return int64_t{0}; }};
  }
  return {[] {}, [&group] { group.barrier().wait(); }, [] { return int64_t{0}; }};
}

}  // namespace

std::vector<CollectiveCase> collective_cases(int ranks, int64_t most_bytes) {
  std::vector<CollectiveCase> cases;
  for (const char* op : {"all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv",
                         "barrier", "new_group", "64_subgroups"}) {
    const bool moves_data =
        std::string_view(op).find("group") == std::string::npos && std::string_view(op) != "barrier";
    for (int64_t bytes :
         {int64_t{4}, int64_t{4} << 10, int64_t{64} << 10, int64_t{1} << 20, int64_t{16} << 20, int64_t{64} << 20}) {
      for (bool registered : {true, false}) {
        if (bytes > most_bytes || (!moves_data && (bytes > 4 || !registered))) continue;
        cases.push_back({fmt::format("{}/f32/{}/n{}/{}", op, bytes, ranks, registered ? "registered" : "ordinary"), op,
                         bytes, registered});
      }
    }
  }
  return cases;
}

void run_collectives_rank(int rank, int size, const std::string& path, const std::string& only, int64_t most_bytes,
                          bool few) {
  set_thread_count(1);
  transport::FileStore store(path);
  const Group group = Group::connect(store, "bench", rank, size);
  const auto together = [&] {
    float one = 1;
    group.all_reduce(std::span(&one, 1)).wait();
  };
  for (const CollectiveCase& c : collective_cases(size, most_bytes)) {
    if (!picks(only, c.name)) continue;
    const Measured measured = prepare(group, c.op, c.bytes / 4, c.registered);
    const int count = c.op == "64_subgroups" ? 5
                      : c.op == "new_group"  ? 64
                      : c.bytes <= 65536     ? (few ? 300 : 2000)
                      : c.bytes <= (1 << 20) ? (few ? 40 : 200)
                                             : (few ? 12 : 20);
    const int before = std::min(5, count / 4);
    std::vector<double> us;
    for (int i = 0; i < count + before; ++i) {
      measured.refill();
      together();
      const auto start = Clock::now();
      measured.call();
      if (i >= before) us.push_back(std::chrono::duration<double, std::micro>(Clock::now() - start).count());
    }
    std::vector<int64_t> wrong{measured.wrong()};
    group.all_reduce(std::span(wrong)).wait();
    std::sort(us.begin(), us.end());
    if (rank == 0) {
      fmt::print("{} {} {:.3f} {:.3f} {}\n", c.name, c.bytes, us[us.size() / 2], us[us.size() * 99 / 100], wrong[0]);
      std::fflush(stdout);
    }
  }
}

}  // namespace chorale::app
