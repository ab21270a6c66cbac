#include "chorale/transport/tls_records.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "chorale/base/error.h"

namespace chorale::transport {
namespace {

constexpr size_t kTagBytes = 16;
constexpr size_t kMaxCipherBytes = kRecordBytes + 256;

// Content types; the true one is encrypted, behind the data.
constexpr uint8_t kAlert = 21, kHandshake = 22, kData = 23;
// A handshake message: the sender's next record has its next key; none is asked of the other side.
constexpr std::array<std::byte, 5> kKeyUpdate{std::byte{24}, std::byte{0}, std::byte{0}, std::byte{1}, std::byte{0}};

Digest expand(const Digest& secret, std::string_view label, size_t bytes) {
  const std::string name = concat("tls13 ", label);
  std::string info{'\0', static_cast<char>(bytes), static_cast<char>(name.size())};
  info += name;
  info += std::string{'\0', '\1'};  // no context; the first block of HKDF
  return hmac_sha256(view(secret), {info});
}

const unsigned char* chars(const std::byte* bytes) { return reinterpret_cast<const unsigned char*>(bytes); }
unsigned char* chars(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }

}  // namespace

struct RecordKey::Cipher {
  explicit Cipher(bool for_receiver) : decrypts(for_receiver), context(EVP_CIPHER_CTX_new()) {}
  ~Cipher() { EVP_CIPHER_CTX_free(context); }
  Cipher(const Cipher&) = delete;
  Cipher& operator=(const Cipher&) = delete;

  void update(std::byte* out, std::span<const std::byte> in) const {
    int bytes = 0;
    CHORALE_INVARIANT(EVP_CipherUpdate(context, chars(out), &bytes, chars(in.data()), static_cast<int>(in.size())) == 1,
                      "AES-GCM failed");
  }

  const bool decrypts;
  EVP_CIPHER_CTX* const context;
};

RecordKey::RecordKey(const Digest& traffic_secret, bool decrypts, uint64_t records_per_key)
    : secret_(traffic_secret), records_per_key_(records_per_key), cipher_(std::make_unique<Cipher>(decrypts)) {
  derive();
}
RecordKey::RecordKey(RecordKey&&) noexcept = default;
RecordKey& RecordKey::operator=(RecordKey&&) noexcept = default;
RecordKey::~RecordKey() { OPENSSL_cleanse(secret_.data(), secret_.size()); }

void RecordKey::derive() {
  Digest key = expand(secret_, "key", 16);
  const Digest iv = expand(secret_, "iv", iv_.size());
  std::memcpy(iv_.data(), iv.data(), iv_.size());
  number_ = 0;
  CHORALE_INVARIANT(
      EVP_CipherInit_ex(cipher_->context, EVP_aes_128_gcm(), nullptr,
                        reinterpret_cast<const unsigned char*>(key.data()), nullptr, cipher_->decrypts ? 0 : 1) == 1,
      "no AES-128-GCM from libcrypto");
  OPENSSL_cleanse(key.data(), key.size());
}

void RecordKey::replace() {
  secret_ = expand(secret_, "traffic upd", secret_.size());
  derive();
}

// Begins a record: its nonce is the key's, with the record's number in it; its head is authenticated.
void RecordKey::begin(std::span<const std::byte> head) {
  std::array<uint8_t, 12> nonce = iv_;
  for (size_t i = 0; i < sizeof number_; ++i) nonce[nonce.size() - 1 - i] ^= static_cast<uint8_t>(number_ >> (8 * i));
  ++number_;
  CHORALE_INVARIANT(EVP_CipherInit_ex(cipher_->context, nullptr, nullptr, nullptr, nonce.data(), -1) == 1,
                    "AES-GCM refuses a nonce");
  cipher_->update(nullptr, head);
}

void RecordKey::seal_one(uint8_t type, std::span<const std::byte> head, std::span<const std::byte> body,
                         ByteQueue& out) {
  const size_t cipher_bytes = head.size() + body.size() + 1 + kTagBytes;
  std::byte* at = out.room(kRecordHeadBytes + cipher_bytes).data();
  const std::array<uint8_t, kRecordHeadBytes> record{kData, 3, 3, static_cast<uint8_t>(cipher_bytes >> 8),
                                                     static_cast<uint8_t>(cipher_bytes)};
  std::memcpy(at, record.data(), record.size());
  begin({at, record.size()});
  at += record.size();
  for (const auto part : {head, body, std::as_bytes(std::span(&type, 1))}) {
    if (!part.empty()) cipher_->update(at, part);
    at += part.size();
  }
  int none = 0;
  CHORALE_INVARIANT(EVP_CipherFinal_ex(cipher_->context, chars(at), &none) == 1 &&
                        EVP_CIPHER_CTX_ctrl(cipher_->context, EVP_CTRL_AEAD_GET_TAG, kTagBytes, at) == 1,
                    "AES-GCM gives no tag");
  out.commit(kRecordHeadBytes + cipher_bytes);
}

void RecordKey::seal(std::span<const std::byte> head, std::span<const std::byte> body, ByteQueue& out) {
  if (number_ >= records_per_key_) {
    seal_one(kHandshake, kKeyUpdate, {}, out);
    replace();
  }
  CHORALE_INVARIANT(head.size() <= kRecordBytes, "a head of ", head.size(), " bytes");
  size_t bytes = std::min(body.size(), kRecordBytes - head.size());
  seal_one(kData, head, body.first(bytes), out);
  for (body = body.subspan(bytes); !body.empty(); body = body.subspan(bytes)) {
    bytes = std::min(body.size(), kRecordBytes);
    seal_one(kData, {}, body.first(bytes), out);
  }
}

std::optional<size_t> RecordKey::room_for(std::span<const std::byte> in) {
  if (in.size() < kRecordHeadBytes) return std::nullopt;
  const size_t bytes = std::to_integer<size_t>(in[3]) << 8 | std::to_integer<size_t>(in[4]);
  CHORALE_CHECK(in[0] == std::byte{kData} && in[1] == std::byte{3} && in[2] == std::byte{3} && bytes > kTagBytes &&
                    bytes <= kMaxCipherBytes,
                "[tls] no record of data: type ", std::to_integer<int>(in[0]), ", ", bytes, " bytes");
  if (in.size() < kRecordHeadBytes + bytes) return std::nullopt;
  return bytes - kTagBytes - 1;
}

RecordKey::Opened RecordKey::open(std::span<const std::byte> in, std::span<std::byte> into) {
  const size_t room = room_for(in).value();
  CHORALE_INVARIANT(into.size() >= room, "no room for a record");
  begin(in.first(kRecordHeadBytes));
  const auto cipher = in.subspan(kRecordHeadBytes, room + 1);
  std::byte last{};
  if (room > 0) cipher_->update(into.data(), cipher.first(room));
  cipher_->update(&last, cipher.last(1));
  std::array<std::byte, kTagBytes> tag;
  std::memcpy(tag.data(), in.data() + kRecordHeadBytes + room + 1, tag.size());
  int none = 0;
  unsigned char nowhere[kTagBytes];
  CHORALE_CHECK(EVP_CIPHER_CTX_ctrl(cipher_->context, EVP_CTRL_AEAD_SET_TAG, kTagBytes, tag.data()) == 1 &&
                    EVP_CipherFinal_ex(cipher_->context, nowhere, &none) == 1,
                "[tls] a record was changed on its way");
  Opened opened{kRecordHeadBytes + room + 1 + kTagBytes, room, false};
  // Zeros behind the type are padding.
  while (last == std::byte{0} && opened.bytes > 0) last = into[--opened.bytes];
  const std::span<const std::byte> content = into.first(opened.bytes);
  switch (std::to_integer<uint8_t>(last)) {
    case kData:
      return opened;
    case kHandshake:
      CHORALE_CHECK(std::equal(content.begin(), content.end(), kKeyUpdate.begin(), kKeyUpdate.end()),
                    "[tls] a message of the handshake after its end");
      replace();
      opened.bytes = 0;
      return opened;
    case kAlert:
      opened.bytes = 0;
      opened.is_end = true;
      return opened;
    default:
      throw InvalidArgument(concat("[tls] a record of type ", std::to_integer<int>(last)));
  }
}

}  // namespace chorale::transport
