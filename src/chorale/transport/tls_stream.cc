#include "chorale/transport/tls_stream.h"

#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <utility>
#include <vector>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"

namespace chorale::transport {
namespace {

constexpr std::string_view kIdentityMagic = "chorale-fabric-1";
constexpr size_t kRecordBytes = SSL3_RT_MAX_PLAIN_LENGTH;
// Many records per system call. OpenSSL's own reading ahead moves all that it holds with each record.
constexpr size_t kInputBytes = 256 << 10;
// AES-GCM should not encrypt more than 2^24.5 records with one key (RFC 8446, section 5.5).
constexpr uint64_t kRecordsPerKey = uint64_t{1} << 22;

// What encryption makes is gathered here, so that many records leave with one system call and encrypting never blocks.
struct Output {
  std::vector<char> bytes;
  size_t sent = 0;
  size_t left() const { return bytes.size() - sent; }
  // Only when it is the larger part: each byte is then moved at most once.
  void forget_what_was_sent() {
    if (sent < left()) return;
    bytes.erase(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(sent));
    sent = 0;
  }
};

// What has come and was not decrypted yet.
struct Input {
  std::vector<char> bytes;
  size_t begin = 0;
  size_t end = 0;
};

struct Wire {
  int descriptor = -1;
  Input input;
  Output output;
};

int write_to_wire(BIO* bio, const char* data, int size) {
  auto& output = static_cast<Wire*>(BIO_get_data(bio))->output;
  output.bytes.insert(output.bytes.end(), data, data + size);
  return size;
}

int read_from_wire(BIO* bio, char* data, int size) {
  auto& wire = *static_cast<Wire*>(BIO_get_data(bio));
  Input& input = wire.input;
  BIO_clear_retry_flags(bio);
  if (input.begin == input.end) {
    input.bytes.resize(kInputBytes);
    const ssize_t n = recv(wire.descriptor, input.bytes.data(), input.bytes.size(), MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) BIO_set_retry_read(bio);
    if (n <= 0) return static_cast<int>(n);
    input.begin = 0;
    input.end = static_cast<size_t>(n);
  }
  const size_t taken = std::min(static_cast<size_t>(size), input.end - input.begin);
  std::memcpy(data, input.bytes.data() + input.begin, taken);
  input.begin += taken;
  return static_cast<int>(taken);
}

long control_wire(BIO* bio, int command, long, void*) {
  switch (command) {
    case BIO_CTRL_FLUSH:  // ours to decide
      return 1;
    case BIO_CTRL_EOF:
      return BIO_get_shutdown(bio);
    default:
      return 0;
  }
}

BIO* new_wire_bio(Wire* wire) {
  static BIO_METHOD* const method = [] {
    BIO_METHOD* made = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "buffered socket");
    BIO_meth_set_write(made, write_to_wire);
    BIO_meth_set_read(made, read_from_wire);
    BIO_meth_set_ctrl(made, control_wire);
    return made;
  }();
  BIO* bio = BIO_new(method);
  BIO_set_data(bio, wire);
  BIO_set_init(bio, 1);
  return bio;
}

std::string last_tls_error() {
  const unsigned long code = ERR_peek_last_error();
  const char* reason = ERR_reason_error_string(code);
  const std::string text = reason ? reason : code != 0 ? concat("error ", code) : "the connection was closed";
  ERR_clear_error();
  return text;
}

int take_number(std::string_view& text) {
  const size_t space = text.find(' ');
  const std::string_view digits = text.substr(0, space);
  int value = -1;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size()) return -1;
  text.remove_prefix(space == std::string_view::npos ? text.size() : space + 1);
  return value;
}

}  // namespace

std::string StreamIdentity::text() const { return concat(kIdentityMagic, " ", nonce, " ", from, " ", to, " ", stream); }

std::optional<StreamIdentity> StreamIdentity::parse(std::string_view text) {
  const std::string_view whole = text;
  const auto word = [&] {
    const size_t end = std::min(text.find(' '), text.size());
    const std::string_view found = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    return found;
  };
  if (word() != kIdentityMagic) return std::nullopt;
  StreamIdentity identity;
  identity.nonce = word();
  identity.from = take_number(text);
  identity.to = take_number(text);
  identity.stream = take_number(text);
  // One spelling only.
  if (identity.from < 0 || identity.to < 0 || identity.stream < 0 || identity.text() != whole) return std::nullopt;
  return identity;
}

struct TlsStream::Impl {
  Impl(Socket owned, const Secret& job_secret, bool is_server)
      : socket(std::move(owned)), secret(job_secret), ssl(SSL_new(context())) {
    CHORALE_INVARIANT(ssl, "no memory for a TLS connection");
    SSL_set_app_data(ssl, this);
    wire.descriptor = socket.descriptor();
    BIO* bio = new_wire_bio(&wire);
    SSL_set_bio(ssl, bio, bio);
    if (is_server) {
      SSL_set_accept_state(ssl);
    } else {
      SSL_set_connect_state(ssl);
      // A server without the key could only show a certificate, and none is trusted.
      SSL_set_verify(ssl, SSL_VERIFY_PEER, nullptr);
    }
  }
  ~Impl() { SSL_free(ssl); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  static SSL_CTX* context();
  static int use_session(SSL* ssl, const EVP_MD*, const unsigned char** name, size_t* bytes, SSL_SESSION** session);
  static int find_session(SSL* ssl, const unsigned char* name, size_t bytes, SSL_SESSION** session);
  SSL_SESSION* new_session() const;
  [[noreturn]] void fail(std::string_view what, const std::string& why) const {
    throw CommError(concat("[tls] ", what, " ", socket.peer(), " failed: ", why));
  }

  Socket socket;
  const Secret secret;
  StreamIdentity identity;
  std::string identity_text;
  std::function<bool(const StreamIdentity&)> expects;
  Wire wire;
  SSL* ssl;
  uint64_t records = 0;          // since the key was changed
  std::vector<std::byte> small;  // a record that is put together from two parts
};

SSL_SESSION* TlsStream::Impl::new_session() const {
  static constexpr unsigned char kAes128GcmSha256[] = {0x13, 0x01};
  Digest key = hmac_sha256(secret.bytes(), {"chorale fabric key", identity_text});
  SSL_SESSION* session = SSL_SESSION_new();
  const bool fine =
      session &&
      SSL_SESSION_set1_master_key(session, reinterpret_cast<const unsigned char*>(key.data()), key.size()) == 1 &&
      SSL_SESSION_set_cipher(session, SSL_CIPHER_find(ssl, kAes128GcmSha256)) == 1 &&
      SSL_SESSION_set_protocol_version(session, TLS1_3_VERSION) == 1;
  OPENSSL_cleanse(key.data(), key.size());
  if (fine) return session;
  SSL_SESSION_free(session);
  return nullptr;
}

int TlsStream::Impl::use_session(SSL* ssl, const EVP_MD*, const unsigned char** name, size_t* bytes,
                                 SSL_SESSION** session) {
  const auto& self = *static_cast<Impl*>(SSL_get_app_data(ssl));
  *name = reinterpret_cast<const unsigned char*>(self.identity_text.data());
  *bytes = self.identity_text.size();
  *session = self.new_session();
  return *session != nullptr;
}

int TlsStream::Impl::find_session(SSL* ssl, const unsigned char* name, size_t bytes, SSL_SESSION** session) {
  auto& self = *static_cast<Impl*>(SSL_get_app_data(ssl));
  *session = nullptr;  // no key: the handshake ends
  const std::string_view text(reinterpret_cast<const char*>(name), bytes);
  const auto identity = StreamIdentity::parse(text);
  if (!identity || !self.expects(*identity)) return 1;
  self.identity = *identity;
  self.identity_text = text;
  *session = self.new_session();
  return *session != nullptr;
}

// One for all: what differs is in each connection.
SSL_CTX* TlsStream::Impl::context() {
  static SSL_CTX* const shared = [] {
    SSL_CTX* made = SSL_CTX_new(TLS_method());
    CHORALE_INVARIANT(made, "no TLS from OpenSSL: ", last_tls_error());
    SSL_CTX_set_min_proto_version(made, TLS1_3_VERSION);
    SSL_CTX_set_ciphersuites(made, "TLS_AES_128_GCM_SHA256");
    SSL_CTX_set1_groups_list(made, "X25519");
    SSL_CTX_set_num_tickets(made, 0);
    SSL_CTX_set_session_cache_mode(made, SSL_SESS_CACHE_OFF);
    // Whether a rank has left or was cut off is said by our own messages.
    SSL_CTX_set_options(made, SSL_OP_IGNORE_UNEXPECTED_EOF);
    SSL_CTX_clear_options(made, SSL_OP_ENABLE_MIDDLEBOX_COMPAT);
    SSL_CTX_set_mode(made, SSL_MODE_RELEASE_BUFFERS);
    SSL_CTX_set_psk_use_session_callback(made, use_session);
    SSL_CTX_set_psk_find_session_callback(made, find_session);
    return made;
  }();
  return shared;
}

TlsStream::TlsStream(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
TlsStream::TlsStream(TlsStream&&) noexcept = default;
TlsStream& TlsStream::operator=(TlsStream&&) noexcept = default;
TlsStream::~TlsStream() = default;

TlsStream TlsStream::client(Socket socket, const Secret& secret, const StreamIdentity& identity) {
  auto impl = std::make_unique<Impl>(std::move(socket), secret, false);
  impl->identity = identity;
  impl->identity_text = identity.text();
  return TlsStream(std::move(impl));
}

TlsStream TlsStream::server(Socket socket, const Secret& secret, std::function<bool(const StreamIdentity&)> expects) {
  auto impl = std::make_unique<Impl>(std::move(socket), secret, true);
  impl->expects = std::move(expects);
  return TlsStream(std::move(impl));
}

TlsStream::Step TlsStream::handshake() {
  ERR_clear_error();
  const int result = SSL_do_handshake(impl_->ssl);
  const int error = SSL_get_error(impl_->ssl, result);
  std::string why = result == 1 || error == SSL_ERROR_WANT_READ ? "" : last_tls_error();
  if (!why.empty() && impl_->expects) {
    why = concat(impl_->identity_text.empty() ? "it is no rank of this job that is expected (" : "a wrong secret? (",
                 why, ")");
  }
  // What it said last (an alert, too) is worth sending.
  bool sent = false;
  try {
    sent = flush();
  } catch (const CommError&) {
    if (why.empty()) throw;
  }
  if (!why.empty()) impl_->fail("the handshake with", why);
  if (!sent) return Step::kNeedsOutput;
  if (result != 1) return Step::kNeedsInput;
  if (SSL_session_reused(impl_->ssl) != 1) impl_->fail("the handshake with", "it does not know the secret");
  return Step::kDone;
}

void TlsStream::write(std::span<const std::byte> head, std::span<const std::byte> body) {
  Impl& self = *impl_;
  const auto encrypt = [&](std::span<const std::byte> part) {
    if (part.empty()) return;
    ERR_clear_error();
    size_t written = 0;
    if (SSL_write_ex(self.ssl, part.data(), part.size(), &written) != 1 || written != part.size()) {
      self.fail("encrypting for", last_tls_error());
    }
    self.records += (part.size() + kRecordBytes - 1) / kRecordBytes;
  };
  if (self.records >= kRecordsPerKey) {
    if (SSL_key_update(self.ssl, SSL_KEY_UPDATE_NOT_REQUESTED) != 1) self.fail("a new key for", last_tls_error());
    self.records = 0;
  }
  // The first record takes the head and as much of the body as fits; the rest needs no copy.
  const size_t with_head = std::min(body.size(), kRecordBytes - std::min(head.size(), kRecordBytes));
  self.small.assign(head.begin(), head.end());
  self.small.insert(self.small.end(), body.begin(), body.begin() + static_cast<ptrdiff_t>(with_head));
  encrypt(self.small);
  encrypt(body.subspan(with_head));
}

bool TlsStream::flush(size_t most) {
  Output& output = impl_->wire.output;
  while (output.left() > 0) {
    if (most == 0) return false;
    const ssize_t n = send(impl_->socket.descriptor(), output.bytes.data() + output.sent, std::min(output.left(), most),
                           MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) {
      output.sent += static_cast<size_t>(n);
      most -= static_cast<size_t>(n);
    } else if (errno == EAGAIN) {
      output.forget_what_was_sent();
      return false;
    } else if (errno != EINTR) {
      impl_->fail("sending to", std::strerror(errno));
    }
  }
  output.forget_what_was_sent();
  return true;
}

size_t TlsStream::unsent_bytes() const { return impl_->wire.output.left(); }

ptrdiff_t TlsStream::read(std::span<std::byte> into) {
  ERR_clear_error();
  errno = 0;
  size_t n = 0;
  if (SSL_read_ex(impl_->ssl, into.data(), into.size(), &n) == 1) return static_cast<ptrdiff_t>(n);
  const int failure = errno;
  switch (SSL_get_error(impl_->ssl, 0)) {
    case SSL_ERROR_WANT_READ:
      return 0;
    case SSL_ERROR_ZERO_RETURN:
      return kEnd;
    case SSL_ERROR_SYSCALL:
      if (failure == 0 || failure == ECONNRESET) return kEnd;  // a reset: it ended with something unread
      ERR_clear_error();
      impl_->fail("receiving from", std::strerror(failure));
    default:
      impl_->fail("receiving from", last_tls_error());
  }
}

bool TlsStream::holds_input() const {
  return impl_->wire.input.begin != impl_->wire.input.end || SSL_has_pending(impl_->ssl) == 1;
}

const StreamIdentity& TlsStream::identity() const { return impl_->identity; }
int TlsStream::descriptor() const { return impl_->socket.descriptor(); }
const std::string& TlsStream::peer() const { return impl_->socket.peer(); }
void TlsStream::close() { const Socket closing(impl_->socket.release(), ""); }

}  // namespace chorale::transport
