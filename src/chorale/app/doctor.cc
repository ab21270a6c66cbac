// `chorale doctor`: what this machine offers, and what is missing.
#include <fmt/format.h>
#include <hwloc.h>
#include <hwy/highway.h>
#include <sleef.h>
#include <spdlog/version.h>

#include <string>

#include "chorale/app/commands.h"
#include "chorale/app/program.h"
#include "chorale/base/config.h"
#include "chorale/base/cpu.h"
#include "chorale/base/host.h"
#include "chorale/base/optional_parts.h"
#include "chorale/base/parallel_for.h"
#include "chorale/comm/algorithm/table.h"
#include "chorale/kernel/cpu/blas/openblas.h"
#include "chorale/kernel/cpu/dnnl/runtime.h"
#include "chorale/kernel/cpu/support/cpu_probe.h"
#include "chorale/transport/congestion.h"
#include "chorale/transport/fabric/fabric_name.h"
#include "chorale/vec/target.h"

namespace chorale::app {
namespace {

void print_row(std::string_view name, std::string_view value) { fmt::print("  {:<16} {}\n", name, value); }

std::string in_gib(uint64_t bytes) { return fmt::format("{:.1f} GiB", static_cast<double>(bytes) / (1 << 30)); }
std::string room(Room room) { return fmt::format("{}, {} free", in_gib(room.total_bytes), in_gib(room.free_bytes)); }

std::string cpu_features(bool wanted) {
  std::string names;
  for (const CpuFeature feature : all_cpu_features()) {
    if (cpu_has(feature) == wanted) names.append(names.empty() ? "" : " ").append(name_of(feature));
  }
  return names.empty() ? "none" : names;
}

std::string cores() {
  const int usable = usable_cores();
  std::string text = usable == machine_cores() ? fmt::format("{}", usable)
                                               : fmt::format("{} of {} usable here", usable, machine_cores());
  return text + fmt::format(", {} thread{} per rank", thread_count(), thread_count() == 1 ? "" : "s");
}

void print_machine() {
  fmt::print("Machine\n");
  print_row("processor", cpu_brand());
  print_row("vectors", cpu_features(true));
  print_row("not there", cpu_features(false));
  print_row("AMX", kernel::cpu::cpu_probe().amx_note);
  print_row("cores", cores());
  print_row("memory", room(memory_room()));
  const Room shm = shared_memory_room();
  print_row("/dev/shm", shm.total_bytes == 0 ? "absent" : room(shm));
}

std::string openblas_state() {
  const std::string trouble = kernel::cpu::blas::openblas_trouble();
  return trouble.empty() ? "kernels for " + kernel::cpu::blas::openblas().core : "no: " + trouble;
}

void print_libraries() {
  fmt::print("\nLibraries\n");
  kernel::cpu::dnnl::initialize();
  print_row("oneDNN", fmt::format("{}, up to {}", kernel::cpu::dnnl::version(), kernel::cpu::dnnl::effective_isa()));
  print_row("OpenBLAS", openblas_state());
  print_row("Highway", fmt::format("{}.{}.{}, vectors of {}", HWY_MAJOR, HWY_MINOR, HWY_PATCH, vec::target_name()));
  print_row("SLEEF", fmt::format("{}.{}.{}", SLEEF_VERSION_MAJOR, SLEEF_VERSION_MINOR, SLEEF_VERSION_PATCHLEVEL));
  print_row("hwloc", fmt::format("{}.{}, which cores a rank gets", hwloc_get_api_version() >> 16,
                                 hwloc_get_api_version() >> 8 & 0xff));
  print_row("fmt", fmt::format("{}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100));
  print_row("spdlog", fmt::format("{}.{}.{}", SPDLOG_VER_MAJOR, SPDLOG_VER_MINOR, SPDLOG_VER_PATCH));
}

std::string congestion_state() {
  if (const auto named = config::env("CHORALE_CONGESTION")) return *named + " (CHORALE_CONGESTION)";
  const std::string system = transport::usual_congestion_control("192.0.2.1");
  const std::string near = transport::usual_congestion_control("10.0.0.1");
  if (near == system) return system + " (CHORALE_CONGESTION)";
  return fmt::format("{}, but {} to private addresses (CHORALE_CONGESTION); UCX keeps {} where it connects itself",
                     system, near, system);
}

void print_between_hosts() {
  fmt::print("\nBetween hosts\n");
  print_row("fabric", transport::choose_fabric("").kind + " (CHORALE_FABRIC)");
  print_row("TCP", "congestion control: " + congestion_state());
}

void print_algorithms() {
  fmt::print("\nAlgorithms of calls, by their size (CHORALE_ALGORITHMS)\n");
  for (const std::string& line : comm::AlgorithmTable::from_environment().lines()) fmt::print("  {}\n", line);
}

void print_optional_parts() {
  fmt::print("\nOptional parts\n");
  for (const OptionalPart& part : optional_parts()) {
    const Availability found = part.available();
    print_row(part.name, fmt::format("{:<30} {}", part.gives, found.yes ? "yes" : "no: " + found.reason));
  }
}

void examine() {
  fmt::print("Chorale {}\n\n", version());
  print_machine();
  print_libraries();
  print_optional_parts();
  print_between_hosts();
  print_algorithms();
}

}  // namespace

void add_doctor(CLI::App& program, Work& work) {
  program.add_subcommand("doctor", "Show what this machine offers and what is missing")->callback([&work] {
    work = examine;
  });
}

}  // namespace chorale::app
