// The secret that the ranks of a job share, and HMAC-SHA-256 keyed with it.
#pragma once

#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>

namespace chorale::transport {

using Digest = std::array<char, 32>;

inline std::string_view view(const Digest& digest) { return {digest.data(), digest.size()}; }
// Takes the same time wherever they differ.
bool equal_in_constant_time(std::string_view a, std::string_view b);
Digest random_bytes();
// The code of the parts, one behind the other: the caller makes them of fixed sizes, or says their sizes.
Digest hmac_sha256(std::string_view key, std::initializer_list<std::string_view> parts);

// Wiped when destroyed; never printed, never in an environment variable or on a command line.
class Secret {
 public:
  static Secret generate();
  // A secret has at least 16 bytes: an observer of one handshake could guess a shorter one.
  static Secret from_bytes(std::string_view bytes);
  // A file that only its owner (this user or root) can read; line ends at its end do not count. `openssl rand -hex 32`
  // makes a good one.
  static Secret read_file(const std::string& path);
  // CHORALE_SECRET_FD, an inherited descriptor of a file (what `chorale run` gives its ranks), else
  // CHORALE_SECRET_FILE, else nothing.
  static std::optional<Secret> from_environment();

  Secret(const Secret&) = default;
  Secret& operator=(const Secret&) = default;
  ~Secret();

  // A new memory file that holds the secret, for from_environment() of a child. Closed on exec unless the caller says
  // otherwise.
  int to_descriptor() const;
  std::string_view bytes() const { return bytes_; }

 private:
  explicit Secret(std::string bytes);
  static Secret read_descriptor(int descriptor, bool is_text, const std::string& source);

  std::string bytes_;
};

}  // namespace chorale::transport
