#include "chorale/comm/net/net_options.h"

#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/transport/fabric/fabric.h"
#include "chorale/transport/fabric/fabric_name.h"
#include "chorale/transport/interface.h"

namespace chorale::comm {
namespace {

std::chrono::milliseconds keep_alive() {
  using namespace std::chrono_literals;
  const auto text = config::env("CHORALE_KEEP_ALIVE");
  if (!text) return 2s;
  char* end = nullptr;
  const double seconds = std::strtod(text->c_str(), &end);
  CHORALE_CHECK(*end == 0 && seconds >= 0.05 && seconds < 1e6, "[group] CHORALE_KEEP_ALIVE is '", *text,
                "'; it takes a number of seconds, at least 0.05, such as 2");
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
}

}  // namespace

std::unique_ptr<transport::FabricBuilder> make_fabric_builder(const transport::FabricName& kind,
                                                              const NetOptions& options,
                                                              transport::FabricOptions fabric) {
  fabric.secret = options.secret ? options.secret : transport::Secret::from_environment();
  fabric.keep_alive = keep_alive();
  fabric.congestion = config::env("CHORALE_CONGESTION").value_or("");
  CHORALE_CHECK(fabric.secret,
                "[group] ranks are on several hosts, which need a secret in common: use `chorale run`, or set "
                "CHORALE_SECRET_FILE to a file with mode 0600 on every node");
  return transport::make_fabric(kind, fabric, options.address.empty() ? transport::own_address("") : options.address);
}

}  // namespace chorale::comm
