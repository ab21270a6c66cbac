// The fabric between hosts whose network is not trusted.
#pragma once

#include <memory>
#include <string>

#include "chorale/transport/fabric/fabric.h"

namespace chorale::transport {

// `own_address` is the address of the interface to listen at.
std::unique_ptr<FabricBuilder> make_tls_fabric(const FabricOptions& options, const std::string& own_address);

}  // namespace chorale::transport
