#include "chorale/base/cpu.h"

#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <sstream>
#include <string>

namespace chorale {
namespace {

// A line "name : value" of the first processor in /proc/cpuinfo.
std::string cpuinfo(const std::string& name) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(name)) return line.substr(line.find(": ") + 2);
  }
  return "";
}

TEST(Cpu, FeaturesAreThoseThatTheKernelLists) {
  std::istringstream text(cpuinfo("flags"));
  const std::set<std::string> flags(std::istream_iterator<std::string>(text), {});
  if (flags.empty()) GTEST_SKIP() << "/proc/cpuinfo lists no flags here";
  for (const CpuFeature feature : all_cpu_features()) {
    EXPECT_EQ(cpu_has(feature), flags.contains(std::string(name_of(feature)))) << name_of(feature);
  }
}

TEST(Cpu, BrandIsThatOfTheKernel) {
  const std::string expected = cpuinfo("model name");
  if (expected.empty()) GTEST_SKIP() << "/proc/cpuinfo names no model here";
  EXPECT_EQ(cpu_brand(), expected);
}

}  // namespace
}  // namespace chorale
