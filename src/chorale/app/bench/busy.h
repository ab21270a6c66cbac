// What the benchmarks share that run beside programs which use the cores (`--busy`).
#pragma once

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "chorale/app/bench/bench.h"

namespace chorale::app {

// Threads that do nothing but use a core, for as long as this lives.
class Burners {
 public:
  // `burners` entries for each core that this process may use.
  static std::vector<int> on_each_core(int burners);
  static std::vector<int> on_last_core();

  // One thread for each entry.
  explicit Burners(const std::vector<int>& cores);
  ~Burners();
  Burners(const Burners&) = delete;
  Burners& operator=(const Burners&) = delete;

 private:
  void burn(int core) const;

  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

// Our time is held against PyTorch's beside so many burners on each core, and may be at most this much of it.
inline constexpr int kBurnersPerCore[] = {1, 2};
inline constexpr double kBusyBar = 1.05;

// One line: ours, PyTorch's ("torch" among the peers), and whether it is within the bar.
void print_busy(const BenchRow& row);
void print_busy_bars(const std::vector<BenchRow>& rows);

}  // namespace chorale::app
