// The system's C compiler: found, started without a shell, ended when it takes too long.
#pragma once

#include <chrono>
#include <filesystem>
#include <string>
#include <vector>

namespace chorale::codegen {

struct Toolchain {
  std::filesystem::path compiler;  // empty: there is none
  std::string why_not;             // why there is none
  std::vector<std::string> flags;
  // What a compiled file depends on besides its text: compiler, flags, processor.
  std::string identity() const;
};

// `wanted`: a path or a name; empty: CHORALE_CC, else cc, gcc or clang, as PATH has them.
Toolchain find_toolchain(const std::string& wanted = {});

// Compiles `source` into the shared object `result`. Empty, or what went wrong, with the compiler's own words.
std::string run_compiler(const Toolchain& toolchain, const std::filesystem::path& source,
                         const std::filesystem::path& result, std::chrono::milliseconds deadline);

}  // namespace chorale::codegen
