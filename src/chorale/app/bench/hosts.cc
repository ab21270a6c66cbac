#include "chorale/app/bench/hosts.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cstdlib>

#include "chorale/base/error.h"

namespace chorale::app {

TwoHosts::TwoHosts(const std::string& rate) {
  for (size_t host = 0; host < 2; ++host) names_[host] = fmt::format("chorale-bench-{}-{}", getpid(), host);
  std::string script = "set -e;";
  for (const std::string& name : names_) script += fmt::format(" ip netns add {0}; ip -n {0} link set lo up;", name);
  script +=
      fmt::format(" ip link add {0} netns {1} type veth peer name {0} netns {2};", kInterface, names_[0], names_[1]);
  for (int host = 0; host < 2; ++host)
    script += fmt::format(" ip -n {0} address add {1}/24 dev {2}; ip -n {0} link set {2} up;",
                          names_[static_cast<size_t>(host)], address(host), kInterface);
  // UCX looks once for interfaces that are up.
  for (const std::string& name : names_)
    script += fmt::format(" timeout 5 sh -c 'until ip -n {} link show {} | grep -q \"state UP\"; do sleep 0.05; done';",
                          name, kInterface);
  // A burst is what the kernel's clock lets through at once at 10 Gbit/s; the queue holds what TCP has under way.
  if (!rate.empty()) {
    for (const std::string& name : names_)
      script +=
          fmt::format(" tc -n {} qdisc add dev {} root tbf rate '{}' burst 1mb latency 100ms;", name, kInterface, rate);
  }
  const int status = std::system(fmt::format("({}) >/dev/null 2>&1", script).c_str());
  if (status != 0) remove();
  CHORALE_CHECK_STATE(status == 0,
                      "[bench] cannot make two network namespaces with a cable between them; that takes "
                      "root and the programs ip and tc (iproute2)");
}

std::vector<std::string> TwoHosts::variables(const std::string& folder, const std::string& fabric) {
  const std::string secret = folder + "/secret";
  const std::string make = fmt::format("umask 077; [ -e '{0}' ] || openssl rand -hex 32 > '{0}'", secret);
  CHORALE_CHECK_STATE(std::system(make.c_str()) == 0, "[bench] cannot write a secret to ", secret, " with openssl");
  return {"CHORALE_SECRET_FILE=" + secret, fmt::format("CHORALE_IFACE={}", kInterface), "CHORALE_FABRIC=" + fabric};
}

TwoHosts::~TwoHosts() { remove(); }

void TwoHosts::remove() const {
  for (const std::string& name : names_)
    [[maybe_unused]] const int status = std::system(fmt::format("ip netns delete {} >/dev/null 2>&1", name).c_str());
}

}  // namespace chorale::app
