#include "chorale/io/checksum.h"

#include <openssl/evp.h>

#include <array>

#include "chorale/base/error.h"

namespace chorale::io {

std::string sha256(std::span<const std::byte> bytes) {
  std::array<unsigned char, 32> digest;
  unsigned int size = 0;
  const bool fine = EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, EVP_sha256(), nullptr) == 1;
  CHORALE_INVARIANT(fine && size == digest.size(), "libcrypto computes no SHA-256");
  std::string text;
  for (const unsigned char byte : digest) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

}  // namespace chorale::io
