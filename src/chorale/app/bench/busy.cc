#include "chorale/app/bench/busy.h"

#include <fmt/format.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstdio>

namespace chorale::app {
namespace {

std::vector<int> cores_of_process() {
  std::vector<int> cores;
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return {0};
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &allowed)) cores.push_back(core);
  }
  return cores;
}

bool is_within(const BenchRow& row) {
  const auto torch = row.peers.find("torch");
  return torch == row.peers.end() || row.ours <= kBusyBar * torch->second;
}

}  // namespace

std::vector<int> Burners::on_each_core(int burners) {
  std::vector<int> cores;
  for (int core : cores_of_process()) cores.insert(cores.end(), static_cast<size_t>(burners), core);
  return cores;
}
std::vector<int> Burners::on_last_core() { return {cores_of_process().back()}; }

Burners::Burners(const std::vector<int>& cores) {
  for (int core : cores) threads_.emplace_back([this, core] { burn(core); });
}
Burners::~Burners() {
  stop_ = true;
  for (std::thread& thread : threads_) thread.join();
}

void Burners::burn(int core) const {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(core, &one);
  pthread_setaffinity_np(pthread_self(), sizeof one, &one);
  while (!stop_.load(std::memory_order_relaxed)) {
  }
}

void print_busy(const BenchRow& row) {
  const auto torch = row.peers.find("torch");
  const bool has_peer = torch != row.peers.end();
  fmt::print("{:<48} {:>12.3f} {:>12} {:>7}{}\n", row.name, row.ours,
             has_peer ? fmt::format("{:.3f}", torch->second) : "-",
             has_peer ? fmt::format("{:.2f}", row.ours / torch->second) : "-",
             is_within(row) ? "" : fmt::format("  more than {}", kBusyBar));
  std::fflush(stdout);
}

void print_busy_bars(const std::vector<BenchRow>& rows) {
  const auto over = std::count_if(rows.begin(), rows.end(), [](const BenchRow& row) { return !is_within(row); });
  fmt::print("\n{} of {} cases take more than {} of PyTorch's time\n", over, rows.size(), kBusyBar);
}

}  // namespace chorale::app
