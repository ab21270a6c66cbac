#include "chorale/transport/tls/tls_stream.h"

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

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/transport/byte_queue.h"
#include "chorale/transport/tls/tls_records.h"

namespace chorale::transport {
namespace {

constexpr std::string_view kIdentityMagic = "chorale-fabric-2";
// How much is read with one system call: more where more comes.
constexpr size_t kMinInputBytes = 16 << 10;
constexpr size_t kMaxInputBytes = 256 << 10;

// Encrypted bytes, to be sent and received.
struct Wire {
  int descriptor = -1;
  ByteQueue output;
  ByteQueue input;
  size_t input_bytes = kMinInputBytes;

  // Returns what recv() returns.
  ssize_t receive() {
    const ssize_t n = recv(descriptor, input.room(input_bytes).data(), input_bytes, MSG_DONTWAIT);
    if (n <= 0) return n;
    input.commit(static_cast<size_t>(n));
    if (static_cast<size_t>(n) == input_bytes) input_bytes = std::min(2 * input_bytes, kMaxInputBytes);
    return n;
  }
};

int write_to_wire(BIO* bio, const char* data, int size) {
  auto& wire = *static_cast<Wire*>(BIO_get_data(bio));
  wire.output.push(std::as_bytes(std::span(data, static_cast<size_t>(size))));
  return size;
}

// No more than was asked for: what follows the handshake is not OpenSSL's.
int read_from_wire(BIO* bio, char* data, int size) {
  auto& wire = *static_cast<Wire*>(BIO_get_data(bio));
  BIO_clear_retry_flags(bio);
  if (wire.input.empty()) {
    const ssize_t n = wire.receive();
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) BIO_set_retry_read(bio);
    if (n <= 0) return static_cast<int>(n);
  }
  const size_t taken = std::min(static_cast<size_t>(size), wire.input.size());
  std::memcpy(data, wire.input.bytes().data(), taken);
  wire.input.pop(taken);
  return static_cast<int>(taken);
}

// OpenSSL asks for nothing but flushing, which is ours to decide.
long control_wire(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

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

std::optional<Digest> digest_of_hex(std::string_view text) {
  Digest digest;
  if (text.size() != 2 * digest.size()) return std::nullopt;
  for (size_t i = 0; i < digest.size(); ++i) {
    unsigned char byte = 0;
    const auto [end, error] = std::from_chars(text.data() + 2 * i, text.data() + 2 * i + 2, byte, 16);
    if (error != std::errc() || end != text.data() + 2 * i + 2) return std::nullopt;
    digest[i] = static_cast<char>(byte);
  }
  return digest;
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

std::string StreamIdentity::text() const {
  return concat(kIdentityMagic, " ", to_token, " ", from_token, " ", from, " ", to, " ", stream);
}

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
  identity.to_token = word();
  identity.from_token = word();
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
  static void keep_traffic_secret(const SSL* ssl, const char* line);
  void end_handshake();
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
  SSL* ssl;  // until the handshake is done
  // The keys and data after the handshake.
  std::optional<RecordKey> sending, receiving;
  ByteQueue opened;  // data of a record that the caller had no room for
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

// How OpenSSL hands out the secrets from which the keys of the records come.
void TlsStream::Impl::keep_traffic_secret(const SSL* ssl, const char* line) {
  auto& self = *static_cast<Impl*>(SSL_get_app_data(ssl));
  const std::string_view text(line);
  const bool is_clients = text.starts_with("CLIENT_TRAFFIC_SECRET_0 ");
  if (!is_clients && !text.starts_with("SERVER_TRAFFIC_SECRET_0 ")) return;
  auto secret = digest_of_hex(text.substr(text.rfind(' ') + 1));
  CHORALE_INVARIANT(secret, "a traffic secret of another size");
  const bool is_own = is_clients == (SSL_is_server(ssl) == 0);
  (is_own ? self.sending : self.receiving).emplace(*secret, !is_own);
  OPENSSL_cleanse(secret->data(), secret->size());
}

void TlsStream::Impl::end_handshake() {
  if (SSL_session_reused(ssl) != 1) fail("the handshake with", "it does not know the secret");
  CHORALE_INVARIANT(sending && receiving, "a handshake without keys");
  SSL_free(std::exchange(ssl, nullptr));
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
    SSL_CTX_set_keylog_callback(made, keep_traffic_secret);
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
  if (!impl_->ssl) return flush() ? Step::kDone : Step::kNeedsOutput;
  ERR_clear_error();
  const int result = SSL_do_handshake(impl_->ssl);
  const int error = SSL_get_error(impl_->ssl, result);
  std::string why = result == 1 || error == SSL_ERROR_WANT_READ ? "" : last_tls_error();
  if (!why.empty() && impl_->expects) {
    why = concat(impl_->identity_text.empty() ? "it is no rank of this job that is expected (" : "a wrong secret? (",
                 why, ")");
  }
  if (result == 1) impl_->end_handshake();
  // What it said last (an alert, too) is worth sending.
  bool sent = false;
  try {
    sent = flush();
  } catch (const CommError&) {
    if (why.empty()) throw;
  }
  if (!why.empty()) impl_->fail("the handshake with", why);
  if (!sent) return Step::kNeedsOutput;
  return result == 1 ? Step::kDone : Step::kNeedsInput;
}

void TlsStream::write(std::span<const std::byte> head, std::span<const std::byte> body) {
  impl_->sending->seal(head, body, impl_->wire.output);
}

bool TlsStream::flush(size_t most) {
  ByteQueue& output = impl_->wire.output;
  while (!output.empty()) {
    if (most == 0) return false;
    const ssize_t n = send(impl_->socket.descriptor(), output.bytes().data(), std::min(output.size(), most),
                           MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n >= 0) {
      output.pop(static_cast<size_t>(n));
      most -= static_cast<size_t>(n);
    } else if (errno == EAGAIN) {
      return false;
    } else if (errno != EINTR) {
      impl_->fail("sending to", std::strerror(errno));
    }
  }
  return true;
}

size_t TlsStream::unsent_bytes() const { return impl_->wire.output.size(); }

ptrdiff_t TlsStream::read(std::span<std::byte> into) {
  Impl& self = *impl_;
  ByteQueue& input = self.wire.input;
  const size_t wanted = into.size();
  while (!into.empty()) {
    if (!self.opened.empty()) {
      const size_t n = std::min(into.size(), self.opened.size());
      std::memcpy(into.data(), self.opened.bytes().data(), n);
      self.opened.pop(n);
      into = into.subspan(n);
    } else if (const auto room = RecordKey::room_for(input.bytes())) {
      const bool fits = *room <= into.size();
      const auto opened = self.receiving->open(input.bytes(), fits ? into : self.opened.room(*room));
      input.pop(opened.taken);
      if (opened.is_end) return kEnd;
      if (fits) {
        into = into.subspan(opened.bytes);
      } else {
        self.opened.commit(opened.bytes);
      }
    } else if (into.size() < wanted) {
      break;
    } else if (const ssize_t n = self.wire.receive(); n <= 0) {
      if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
      if (n == 0 || errno == ECONNRESET) return kEnd;  // a reset: it ended with something unread
      self.fail("receiving from", std::strerror(errno));
    }
  }
  return static_cast<ptrdiff_t>(wanted - into.size());
}

bool TlsStream::holds_input() const {
  return !impl_->opened.empty() || RecordKey::room_for(impl_->wire.input.bytes()).has_value();
}

const StreamIdentity& TlsStream::identity() const { return impl_->identity; }
int TlsStream::descriptor() const { return impl_->socket.descriptor(); }
const std::string& TlsStream::peer() const { return impl_->socket.peer(); }
void TlsStream::close() { const Socket closing(impl_->socket.release(), ""); }

}  // namespace chorale::transport
