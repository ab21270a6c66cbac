#include "chorale/base/host.h"

#include <sched.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <optional>
#include <string>

namespace chorale {
namespace {

// The first word of a file of the control group (version 2, as seen inside a container), if it is a number.
std::optional<uint64_t> control_group_value(const char* file) {
  std::ifstream in(std::string("/sys/fs/cgroup/") + file);
  uint64_t value = 0;
  if (in >> value) return value;
  return std::nullopt;  // no such file, or "max"
}

}  // namespace

int machine_cores() { return static_cast<int>(sysconf(_SC_NPROCESSORS_ONLN)); }

int usable_cores() {
  cpu_set_t set;
  int cores = machine_cores();
  if (sched_getaffinity(0, sizeof set, &set) == 0) cores = CPU_COUNT(&set);
  // "QUOTA PERIOD" in microseconds, or "max PERIOD".
  std::ifstream in("/sys/fs/cgroup/cpu.max");
  int64_t quota = 0;
  int64_t period = 0;
  if (in >> quota >> period && period > 0) cores = std::min(cores, static_cast<int>((quota + period - 1) / period));
  return std::max(cores, 1);
}

Room memory_room() {
  Room room{};
  std::ifstream in("/proc/meminfo");
  std::string name;
  std::string unit;
  for (uint64_t kib = 0; in >> name >> kib; std::getline(in, unit)) {
    if (name == "MemTotal:") room.total_bytes = kib * 1024;
    if (name == "MemAvailable:") room.free_bytes = kib * 1024;
  }
  if (const auto limit = control_group_value("memory.max")) {
    const uint64_t used = control_group_value("memory.current").value_or(0);
    room.total_bytes = std::min(room.total_bytes, *limit);
    room.free_bytes = std::min(room.free_bytes, *limit - std::min(*limit, used));
  }
  return room;
}

Room shared_memory_room() {
  struct statvfs stat {};
  if (statvfs("/dev/shm", &stat) != 0) return {};
  return {uint64_t{stat.f_blocks} * stat.f_frsize, uint64_t{stat.f_bavail} * stat.f_frsize};
}

}  // namespace chorale
