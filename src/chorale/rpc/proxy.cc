#include "chorale/rpc/proxy.h"

namespace chorale::rpc {

void Proxy::check(const std::string& type, const std::string& wanted, const AnyRRef& object) {
  if (type != wanted)
    throw RpcError(RpcErrorKind::kUnsupported, object.owner().id,
                   concat("[rref] reference ", object, " stands for a ", type, ", which has no methods of ", wanted));
}

}  // namespace chorale::rpc
