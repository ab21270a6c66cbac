// Two hosts for a benchmark: network namespaces joined by a cable.
#pragma once

#include <array>
#include <string>

namespace chorale::app {

class TwoHosts {
 public:
  // Throws StateError when there can be none: that takes root and the program `ip`.
  TwoHosts();
  ~TwoHosts();
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  // What comes in front of a command that is to run there.
  std::string prefix(int host) const { return "ip netns exec " + names_[static_cast<size_t>(host)]; }
  static std::string address(int host) { return host == 0 ? "10.231.80.1" : "10.231.80.2"; }
  static constexpr const char* kInterface = "veth0";

 private:
  void remove() const;
  std::array<std::string, 2> names_;
};

}  // namespace chorale::app
