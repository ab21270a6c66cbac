#include "chorale/transport/fabric/fabric_name.h"

#include <algorithm>

#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/transport/fabric/fabric.h"
#include "chorale/transport/tls/tls_fabric.h"

namespace chorale::transport {
namespace {

// `source` names what it was read from.
FabricName parse(std::string_view text, std::string_view source) {
  const size_t colon = text.find(':');
  const FabricName name{std::string(text.substr(0, colon)),
                        colon == std::string_view::npos ? "" : std::string(text.substr(colon + 1))};
  const char* const kinds[] = {"tls", "ucx", "mpi"};
  CHORALE_CHECK(std::find(std::begin(kinds), std::end(kinds), name.kind) != std::end(kinds), "[fabric] ", source, "'",
                text, "' is no fabric; there are tls, ucx, ucx:DEVICE and mpi");
  CHORALE_CHECK(colon == std::string_view::npos || (name.kind == "ucx" && !name.device.empty()), "[fabric] ", source,
                "in '", text, "' a device is named; only ucx takes one, such as ucx:mlx5_0:1");
  return name;
}

}  // namespace

FabricName parse_fabric(std::string_view text) { return parse(text, ""); }

FabricName choose_fabric(std::string_view text) {
  if (!text.empty()) return parse_fabric(text);
  const auto named = config::env("CHORALE_FABRIC");
  return named ? parse(*named, "CHORALE_FABRIC: ") : FabricName{};
}

std::unique_ptr<FabricBuilder> make_fabric(const FabricName& name, const FabricOptions& options,
                                           const std::string& own_address) {
  if (name.kind == "ucx") return make_ucx_fabric(options, own_address, name.device);
  CHORALE_CHECK(name.kind == "tls", "[fabric] ", name.kind, " does not connect hosts; tls and ucx do");
  return make_tls_fabric(options, own_address);
}

}  // namespace chorale::transport
