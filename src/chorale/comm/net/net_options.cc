#include "chorale/comm/net/net_options.h"

#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/transport/fabric/fabric.h"
#include "chorale/transport/fabric/fabric_name.h"
#include "chorale/transport/interface.h"
#include "chorale/transport/keep_alive.h"

namespace chorale::comm {

std::unique_ptr<transport::FabricBuilder> make_fabric_builder(const transport::FabricName& kind,
                                                              const NetOptions& options,
                                                              transport::FabricOptions fabric) {
  fabric.secret = options.secret ? options.secret : transport::Secret::from_environment();
  fabric.keep_alive = transport::keep_alive();
  fabric.congestion = config::env("CHORALE_CONGESTION").value_or("");
  CHORALE_CHECK(fabric.secret,
                "[group] ranks are on several hosts, which need a secret in common: use `chorale run`, or set "
                "CHORALE_SECRET_FILE to a file with mode 0600 on every node");
  return transport::make_fabric(kind, fabric, options.address.empty() ? transport::own_address("") : options.address);
}

}  // namespace chorale::comm
