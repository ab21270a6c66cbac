#include "chorale/transport/security/secret.h"

#include <fcntl.h>
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/params.h>
#include <openssl/rand.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <utility>

#include "chorale/base/config.h"
#include "chorale/base/descriptors.h"
#include "chorale/base/error.h"

namespace chorale::transport {
namespace {

constexpr size_t kMinSecretBytes = 16;
constexpr size_t kMaxSecretBytes = 4096;

struct MacDeleter {
  void operator()(EVP_MAC_CTX* context) const { EVP_MAC_CTX_free(context); }
};

}  // namespace

bool equal_in_constant_time(std::string_view a, std::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

Digest random_bytes() {
  Digest bytes;
  CHORALE_INVARIANT(RAND_bytes(reinterpret_cast<unsigned char*>(bytes.data()), static_cast<int>(bytes.size())) == 1,
                    "no random numbers from libcrypto");
  return bytes;
}

Digest hmac_sha256(std::string_view key, std::initializer_list<std::string_view> parts) {
  static EVP_MAC* const hmac = EVP_MAC_fetch(nullptr, "HMAC", nullptr);
  const std::unique_ptr<EVP_MAC_CTX, MacDeleter> context(EVP_MAC_CTX_new(hmac));
  std::string digest_name = "SHA256";
  const OSSL_PARAM params[] = {OSSL_PARAM_construct_utf8_string(OSSL_MAC_PARAM_DIGEST, digest_name.data(), 0),
                               OSSL_PARAM_construct_end()};
  const auto bytes = [](std::string_view text) { return reinterpret_cast<const unsigned char*>(text.data()); };
  bool fine = context && EVP_MAC_init(context.get(), bytes(key), key.size(), params) == 1;
  for (const std::string_view part : parts) {
    fine = fine && EVP_MAC_update(context.get(), bytes(part), part.size()) == 1;
  }
  Digest digest;
  size_t size = 0;
  fine =
      fine && EVP_MAC_final(context.get(), reinterpret_cast<unsigned char*>(digest.data()), &size, digest.size()) == 1;
  CHORALE_INVARIANT(fine && size == digest.size(), "libcrypto computes no HMAC-SHA-256");
  return digest;
}

Secret::Secret(std::string bytes) : bytes_(std::move(bytes)) {}

Secret::~Secret() { OPENSSL_cleanse(bytes_.data(), bytes_.size()); }

Secret Secret::generate() { return Secret(std::string(view(random_bytes()))); }

Secret Secret::from_bytes(std::string_view bytes) {
  CHORALE_CHECK(bytes.size() >= kMinSecretBytes && bytes.size() <= kMaxSecretBytes, "[secret] ", bytes.size(),
                " bytes; expected ", kMinSecretBytes, " to ", kMaxSecretBytes,
                " (openssl rand -hex 32 makes a good secret)");
  return Secret(std::string(bytes));
}

Secret Secret::read_descriptor(int descriptor, bool is_text, const std::string& source) {
  std::string bytes(kMaxSecretBytes + 1, '\0');
  const ssize_t size = pread(descriptor, bytes.data(), bytes.size(), 0);
  const int error = errno;
  if (size >= 0) bytes.resize(static_cast<size_t>(size));
  while (is_text && !bytes.empty() && (bytes.back() == '\n' || bytes.back() == '\r')) bytes.pop_back();
  std::optional<Secret> secret;
  try {
    CHORALE_CHECK(size >= 0, "[secret] cannot read: ", std::strerror(error));
    secret = from_bytes(bytes);
  } catch (const InvalidArgument& problem) {
    throw InvalidArgument(concat(problem.what(), " in ", source));
  }
  OPENSSL_cleanse(bytes.data(), bytes.size());
  return *std::move(secret);
}

Secret Secret::read_file(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  CHORALE_CHECK(file >= 0, "[secret] cannot open ", path, ": ", std::strerror(errno));
  struct Close {
    int file;
    ~Close() { close(file); }
  } const closing{file};
  struct stat state {};
  CHORALE_CHECK(fstat(file, &state) == 0 && S_ISREG(state.st_mode), "[secret] ", path, " is not a regular file");
  CHORALE_CHECK(state.st_uid == geteuid() || state.st_uid == 0, "[secret] ", path, " belongs to user ", state.st_uid,
                ", who could change it; it must belong to this user (", geteuid(), ") or to root");
  CHORALE_CHECK((state.st_mode & 077U) == 0, "[secret] ", path, " can be read by others; chmod 600 ", path);
  return read_descriptor(file, true, path);
}

std::optional<Secret> Secret::from_environment() {
  if (const auto text = config::env("CHORALE_SECRET_FD")) {
    int descriptor = -1;
    const auto [end, error] = std::from_chars(text->data(), text->data() + text->size(), descriptor);
    CHORALE_CHECK(error == std::errc() && end == text->data() + text->size() && descriptor >= 0,
                  "[secret] CHORALE_SECRET_FD must be the number of an open descriptor, not '", *text, "'");
    return read_descriptor(descriptor, false, "descriptor " + *text + " (CHORALE_SECRET_FD)");
  }
  if (const auto path = config::env("CHORALE_SECRET_FILE")) return read_file(*path);
  return std::nullopt;
}

int Secret::to_descriptor() const {
  const int file = above_standard(memfd_create("chorale-secret", MFD_CLOEXEC));
  CHORALE_INVARIANT(file >= 0 && pwrite(file, bytes_.data(), bytes_.size(), 0) == static_cast<ssize_t>(bytes_.size()),
                    "no memory file for the secret: ", std::strerror(errno));
  return file;
}

}  // namespace chorale::transport
