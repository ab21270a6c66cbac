#include "chorale/kernel/cpu/support/cpu_probe.h"

#include <cpuid.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstring>

namespace chorale::kernel::cpu {
namespace {

struct Registers {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// Zeros for a leaf that the CPU does not have.
Registers cpuid(unsigned leaf, unsigned subleaf = 0) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

std::string brand() {
  char text[49] = {};
  for (unsigned i = 0; i < 3; ++i) {
    const Registers r = cpuid(0x80000002u + i);
    std::memcpy(text + 16 * i, &r, 16);
  }
  std::string name(text);
  const size_t first = name.find_first_not_of(' ');
  return first == std::string::npos ? "unknown" : name.substr(first, name.find_last_not_of(' ') - first + 1);
}

// Note [AMX trial]
// Some virtual machines advertise AMX without providing it, and a library that believes them dies with SIGILL in its
// first bf16 product (oneDNN, and PyTorch with it). Two forms are known. Hypervisors that hide CPUID's tile palettes
// (leaf 1Dh), from which oneDNN takes the size of a tile: it then loads an empty configuration and the next tile
// instruction is illegal. And those where the instructions themselves fault. The first is read from CPUID; the second
// is tried out, in a child process, because a fault cannot be survived reliably inside a program that may have handlers
// and threads of its own. The child is forked and never execs, which this project avoids elsewhere, since OpenMP's
// threads and locks do not survive it. Here it is safe: the child runs the few instructions below and _exit, no library
// code, takes no lock and allocates nothing. It is made by a raw clone without exit signal, so that neither fork
// handlers nor the host program's SIGCHLD handler see it.

// What `ldtilecfg` reads: palette 1, tiles 0 to 2 of 16 rows of 64 bytes.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64};
  uint8_t rows[16] = {16, 16, 16};
};

// Runs in the child. Returns if the instructions work, dies otherwise.
void use_tiles() {
  for (const int signal : {SIGILL, SIGSEGV, SIGBUS, SIGFPE}) std::signal(signal, SIG_DFL);
  prctl(PR_SET_DUMPABLE, 0);                                   // no core file
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) _exit(1);
  const TileConfig config;
  asm volatile(
      "ldtilecfg %0\n\t"
      "tilezero %%tmm0\n\t"
      "tilezero %%tmm1\n\t"
      "tilezero %%tmm2\n\t"
      "tdpbf16ps %%tmm2, %%tmm1, %%tmm0\n\t"
      "tilerelease"
      :
      : "m"(config)
      : "memory");
}

// Empty if AMX works, else the reason why not.
std::string amx_trouble() {
  const unsigned max_palette = cpuid(0x1d).eax;
  const Registers palette = cpuid(0x1d, 1);
  const unsigned bytes_per_row = palette.ebx & 0xffff, tiles = palette.ebx >> 16, rows = palette.ecx & 0xffff;
  if (max_palette < 1 || bytes_per_row != 64 || tiles != 8 || rows != 16) return "CPUID hides the tile palette";

  // The child reports through this page, which says "worked" whatever happens to its exit status.
  void* page = mmap(nullptr, sizeof(int), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return "no page for the trial";
  auto* worked = static_cast<volatile int*>(page);
  const long child = syscall(SYS_clone, 0, nullptr, nullptr, nullptr, 0);
  if (child == 0) {
    use_tiles();
    *worked = 1;
    _exit(0);
  }
  int status = 0;
  if (child > 0) {
    while (waitpid(static_cast<pid_t>(child), &status, __WALL) < 0 && errno == EINTR) {
    }
  }
  const bool good = child > 0 && *worked == 1;
  munmap(page, sizeof(int));
  if (good) return "";
  if (child < 0) return "no child process for the trial";
  if (WIFSIGNALED(status)) return std::string("a trial died: ") + strsignal(WTERMSIG(status));
  return "the kernel refused the permission";
}

CpuProbe probe() {
  CpuProbe p;
  p.model = brand();
  __builtin_cpu_init();
  p.amd = __builtin_cpu_is("amd");
  p.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  p.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  p.avx512_bf16 = p.avx512 && __builtin_cpu_supports("avx512bf16");
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  p.amx_advertised = (cpuid(7).edx & (kAmxBf16 | kAmxTile)) == (kAmxBf16 | kAmxTile);
  if (!p.amx_advertised) {
    p.amx_note = "the CPU has no AMX";
    return p;
  }
  const std::string trouble = amx_trouble();
  p.amx_usable = trouble.empty();
  p.amx_note = p.amx_usable ? "AMX works" : "AMX is advertised but not usable (" + trouble + "); it is left alone";
  return p;
}

}  // namespace

const CpuProbe& cpu_probe() {
  static const CpuProbe instance = probe();
  return instance;
}

}  // namespace chorale::kernel::cpu
