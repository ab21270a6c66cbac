#include <fmt/format.h>

#include <algorithm>
#include <span>

#include "chorale/app/bench/collectives.h"
#include "chorale/base/host.h"

namespace chorale::app {
namespace {

constexpr int64_t kKiB = 1 << 10, kMiB = 1 << 20;

enum class Memory { kOurs, kForeign, kEither };

// One sentence of docs/dev/bench.md: the time of a peer over ours is at least so much.
struct Bar {
  const char* op;  // null: every collective but all_reduce
  int64_t least_bytes, most_bytes;
  Memory memory;
  const char* peer;
  double at_least;
};

constexpr Bar kOneHost[] = {
    {"all_reduce", 4, 64 * kKiB, Memory::kOurs, "floor", 1 / 1.5},
    {"all_reduce", kMiB, 64 * kMiB, Memory::kOurs, "floor", 1 / 1.25},
    {"all_reduce", 4, 4 * kKiB, Memory::kOurs, "torch", 140},
    {"all_reduce", 64 * kKiB, 64 * kKiB, Memory::kOurs, "torch", 50},
    {"all_reduce", kMiB, kMiB, Memory::kOurs, "torch", 9},
    {"all_reduce", 16 * kMiB, 16 * kMiB, Memory::kOurs, "torch", 12},
    {"all_reduce", 64 * kMiB, 64 * kMiB, Memory::kOurs, "torch", 8},
    {"all_reduce", 4, 4, Memory::kOurs, "mpi", 0.8},
    {"all_reduce", 4 * kKiB, 64 * kMiB, Memory::kOurs, "mpi", 2},
    {"all_reduce", 4, 64 * kMiB, Memory::kForeign, "mpi", 1},
    {"barrier", 4, 4, Memory::kEither, "torch", 50},
    {nullptr, 4 * kKiB, 4 * kKiB, Memory::kOurs, "torch", 50},
    {nullptr, 16 * kMiB, 16 * kMiB, Memory::kOurs, "torch", 4},
};
constexpr Bar kMoreRanksThanCores[] = {{"all_reduce", 4 * kKiB, 4 * kKiB, Memory::kEither, "mpi", 1}};
constexpr Bar kTls[] = {{"all_reduce", 4 * kKiB, 4 * kKiB, Memory::kEither, "torch", 1},
                        {"all_reduce", 64 * kMiB, 64 * kMiB, Memory::kEither, "torch", 1}};
constexpr Bar kUcx[] = {{"all_reduce", 4 * kKiB, 4 * kKiB, Memory::kEither, "torch", 1.5},
                        {"all_reduce", 64 * kMiB, 64 * kMiB, Memory::kEither, "torch", 1.5}};

class Judge {
 public:
  void compare(const std::string& what, double found, double bar, bool more_is_better) {
    const bool good = more_is_better ? found >= bar : found <= bar;
    good ? ++reached_ : ++missed_;
    if (!good)
      text_ +=
          fmt::format("  missed: {}: {:.3g}, {} {:.3g}\n", what, found, more_is_better ? "at least" : "at most", bar);
  }
  void print() const {
    if (reached_ + missed_ > 0)
      fmt::print("\nbars (docs/dev/bench.md): {} reached, {} missed\n{}", reached_, missed_, text_);
  }

 private:
  int reached_ = 0, missed_ = 0;
  std::string text_;
};

bool concerns(const Bar& bar, const CollectiveCase& c) {
  if (bar.op ? c.op != bar.op : c.op == "all_reduce") return false;
  if (bar.memory != Memory::kEither && (bar.memory == Memory::kOurs) != c.registered) return false;
  return c.bytes >= bar.least_bytes && c.bytes <= bar.most_bytes;
}

}  // namespace

void print_bars(const std::vector<BenchRow>& rows, int ranks, int hosts, const std::string& fabric) {
  const bool core_each = ranks <= machine_cores();
  std::span<const Bar> bars = kOneHost;
  if (hosts == 1 && !core_each) bars = kMoreRanksThanCores;
  if (hosts == 2) bars = fabric == "tls" ? std::span<const Bar>(kTls) : kUcx;
  Judge judge;
  for (const CollectiveCase& c : collective_cases(ranks, 64 * kMiB)) {
    const auto row = std::find_if(rows.begin(), rows.end(), [&](const BenchRow& r) { return r.name == c.name; });
    if (row == rows.end()) continue;
    for (const Bar& bar : bars) {
      const auto peer = row->peers.find(bar.peer);
      if (concerns(bar, c) && peer != row->peers.end())
        judge.compare(fmt::format("{} over {}", c.name, bar.peer), peer->second / row->ours, bar.at_least, true);
    }
    if (hosts == 1 && core_each && c.op == "all_reduce" && c.bytes <= 64 * kKiB)
      judge.compare(c.name + ", p99 over p50", row->extra["p99"].get<double>() / row->ours, 4, false);
    if (c.op == "new_group" && ranks <= 8) judge.compare(c.name + ", ms", row->ours / 1e3, 50, false);
    if (c.op == "64_subgroups" && ranks <= 8) judge.compare(c.name + ", ms", row->ours / 1e3, 500, false);
  }
  judge.print();
}

}  // namespace chorale::app
