// Compiled code by content: in the process, and on disk between processes.
//
// Note [Code on disk] An entry is executed, so it is trusted only if nobody else could have written it: the folder and
// the entry belong to the user and nobody else may write to them, links are not followed, and the bytes have the
// SHA-256 that the entry says. They are read once, through one descriptor, and loaded from memory that nobody else
// sees. What is damaged, foreign or of another version is compiled again and replaced. Entries appear whole (a rename),
// so processes that fill one cache at a time get the same.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "chorale/codegen/toolchain.h"

namespace chorale::codegen {

// A loaded shared object; unloaded with its last owner.
class Code {
 public:
  // Throws StateError where the bytes cannot be loaded.
  explicit Code(const std::string& bytes);
  ~Code();
  Code(const Code&) = delete;
  Code& operator=(const Code&) = delete;
  // Throws StateError where there is no such function.
  void* function(const std::string& name) const;

 private:
  void* handle_ = nullptr;
};

// A function, with the name that it has among all there are.
struct KernelText {
  std::string name, text;
};
struct LoadedKernel {
  std::shared_ptr<const Code> code;
  void* address = nullptr;
};

struct CacheCounts {
  int64_t hit = 0;                    // from disk or from this process
  int64_t miss = 0;                   // compiled
  int64_t bypass = 0;                 // compiled without a cache on disk: there is no folder that can be trusted
  std::chrono::milliseconds saved{};  // what the hits on disk took to compile
};

class CodeCache {
 public:
  struct Options {
    // Empty: CHORALE_CACHE_DIR, else XDG_CACHE_HOME/chorale or HOME/.cache/chorale; without any of them nothing is kept
    // on disk.
    std::filesystem::path folder;
    bool on_disk = true;
    int64_t most_bytes = int64_t{256} << 20;  // the oldest go first
    std::chrono::milliseconds deadline{60'000};
  };
  CodeCache();
  explicit CodeCache(Options options);
  // The kernels, in one file behind `prelude` where they must be compiled; those that this process has already are not
  // compiled again. Empty where it fails; `why` says why.
  std::vector<LoadedKernel> get(const Toolchain& toolchain, const std::string& prelude,
                                const std::vector<KernelText>& kernels, std::string& why);
  CacheCounts counts() const;
  // Forgets what this process holds; the disk keeps its entries.
  void forget();
  // Where entries lie, or empty, with the reason.
  std::filesystem::path folder(std::string& why) const;

  // The process's own.
  static CodeCache& shared();

 private:
  struct State;
  std::shared_ptr<const Code> load(const std::string& key, const Toolchain& toolchain, const std::string& text,
                                   std::string& why);

  std::shared_ptr<State> state_;
};

}  // namespace chorale::codegen
