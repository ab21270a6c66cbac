// Two hosts for a benchmark: network namespaces joined by a cable.
#pragma once

#include <array>
#include <string>
#include <vector>

namespace chorale::app {

class TwoHosts {
 public:
  // A rate as `tc` takes it (1gbit) slows the cable down; empty: it is as fast as memory. Throws StateError when there
  // can be none: that takes root and the programs `ip` and `tc`.
  explicit TwoHosts(const std::string& rate = {});
  ~TwoHosts();
  TwoHosts(const TwoHosts&) = delete;
  TwoHosts& operator=(const TwoHosts&) = delete;

  // What comes in front of a command that is to run there.
  std::string prefix(int host) const { return "ip netns exec " + names_[static_cast<size_t>(host)]; }
  std::vector<std::string> words(int host) const {
    return {"/usr/bin/env", "ip", "netns", "exec", names_[static_cast<size_t>(host)]};
  }
  static std::string address(int host) { return host == 0 ? "10.231.80.1" : "10.231.80.2"; }
  static constexpr const char* kInterface = "veth0";
  // `NAME=value` for each variable that a rank there needs, with a new secret in a file in `folder`.
  static std::vector<std::string> variables(const std::string& folder, const std::string& fabric);

 private:
  void remove() const;
  std::array<std::string, 2> names_;
};

}  // namespace chorale::app
