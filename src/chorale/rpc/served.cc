#include "chorale/rpc/served.h"

#include <cxxabi.h>

#include "chorale/base/rpc_error.h"

namespace chorale::rpc {

std::string readable_name(const std::type_info& type) {
  int status = 0;
  char* const text = abi::__cxa_demangle(type.name(), nullptr, nullptr, &status);
  std::string name = text ? text : type.name();
  std::free(text);  // NOLINT(cppcoreguidelines-no-malloc): the ABI asks for it
  return name;
}

void raise_not_sendable(const std::string& name) {
  throw RpcError(RpcErrorKind::kUnsupported, -1,
                 concat("[rpc] a value of type ", name,
                        " stays where it is: list its fields (CHORALE_MESSAGE) if it is to travel"));
}

namespace detail {

std::string name_in(std::string_view pretty) {
  // g++: "… [with auto F = ns::name; std::string = …]", clang: "… [F = &ns::name]".
  const size_t found = pretty.find(" F = ");
  const size_t from = found == std::string_view::npos ? pretty.find("[F = ") : found;
  CHORALE_INVARIANT(from != std::string_view::npos, "the compiler's text for a function is ", pretty);
  std::string name(pretty.substr(from + 5));
  const size_t end = name.find("; std::string = ");
  name.resize(end != std::string::npos ? end : name.rfind(']'));
  for (const std::string_view part : {"(anonymous namespace)::", "{anonymous}::", "&", " "}) {
    for (size_t at = name.find(part); at != std::string::npos; at = name.find(part)) name.erase(at, part.size());
  }
  return name;
}

}  // namespace detail
}  // namespace chorale::rpc
