// The four kinds of error (docs/dev/style.md, section 6) and the macros that raise them. A message says what was
// expected, what was found and what to try; its parts are joined only when the check fails.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace chorale {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};
// A bad value: shape, dtype, index, attribute, file content.
class InvalidArgument : public Error {
 public:
  using Error::Error;
};
// A call in the wrong order or state.
class StateError : public Error {
 public:
  using Error::Error;
};
// An invariant of ours broke: always a bug in this library.
class InternalError : public Error {
 public:
  using Error::Error;
};

template <class... Parts>
[[gnu::noinline, gnu::cold]] std::string concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return std::move(text).str();
}

namespace detail {
template <class Kind, class... Parts>
[[noreturn, gnu::noinline, gnu::cold]] void raise(const Parts&... parts) {
  throw Kind(concat(parts...));
}
}  // namespace detail
}  // namespace chorale

#define CHORALE_CHECK_KIND(Kind, condition, ...)   \
  do {                                             \
    if (!(condition)) [[unlikely]]                 \
      ::chorale::detail::raise<Kind>(__VA_ARGS__); \
  } while (false)

#define CHORALE_CHECK(condition, ...) CHORALE_CHECK_KIND(::chorale::InvalidArgument, condition, __VA_ARGS__)
#define CHORALE_CHECK_STATE(condition, ...) CHORALE_CHECK_KIND(::chorale::StateError, condition, __VA_ARGS__)
// Checks an invariant of our own; it is active in every build, so keep it off the hot path.
#define CHORALE_INVARIANT(condition, ...)                                                                      \
  CHORALE_CHECK_KIND(::chorale::InternalError, condition, "internal error at ", __FILE__, ":", __LINE__, ": ", \
                     __VA_ARGS__, "; please report this")
