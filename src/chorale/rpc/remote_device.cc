#include "chorale/rpc/remote_module.h"

#include <charconv>

namespace chorale::rpc {

RemoteDevice parse_remote_device(const std::string& text) {
  const auto fail = [&](const std::string& why) -> InvalidArgument {
    return InvalidArgument(concat("[remote_module] '", text, "' is no place for a module: ", why,
                                  "; write worker, worker/device, rank:N or rank:N/device"));
  };
  RemoteDevice found;
  const size_t slash = text.find('/');
  found.worker = text.substr(0, slash);
  if (found.worker.empty()) throw fail("it names no worker");
  if (slash != std::string::npos) {
    found.device = text.substr(slash + 1);
    if (found.device.find('/') != std::string::npos) throw fail("it has more than one '/'");
    if (found.device.empty()) throw fail("it names no device behind the '/'");
    if (found.device != "cpu") throw fail(concat("there is no device '", found.device, "' here, only cpu"));
  }
  if (found.worker.starts_with("rank:")) {
    const char* const end = found.worker.data() + found.worker.size();
    const auto [at, error] = std::from_chars(found.worker.data() + 5, end, found.rank);
    if (error != std::errc() || at != end || found.rank < 0) throw fail("behind 'rank:' comes a number");
  }
  return found;
}

}  // namespace chorale::rpc
