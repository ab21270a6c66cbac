#include "chorale/transport/tls/tls_records.h"

#define NO_COMPAT_IMB_API_053  // its old names are macros such as SHA1, which OpenSSL's headers use, too
#include <intel-ipsec-mb.h>
#include <openssl/crypto.h>

#include <algorithm>
#include <array>
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

// AES with the widest vectors of this processor. Only its functions are used, which have no state.
IMB_MGR* cipher_functions() {
  static IMB_MGR* const found = [] {
    IMB_MGR* made = alloc_mb_mgr(0);
    CHORALE_INVARIANT(made, "no memory for the table of ciphers");
    init_mb_mgr_auto(made, nullptr);
    CHORALE_CHECK_STATE(imb_get_errno(made) == 0, "[tls] connections between hosts need a processor with AES-NI (",
                        imb_get_strerror(imb_get_errno(made)), ")");
    return made;
  }();
  return found;
}

}  // namespace

struct RecordKey::Cipher {
  explicit Cipher(bool for_receiver) : decrypts(for_receiver) {}
  ~Cipher() { OPENSSL_cleanse(&key, sizeof key); }
  Cipher(const Cipher&) = delete;
  Cipher& operator=(const Cipher&) = delete;

  void update(std::byte* out, std::span<const std::byte> in) {
    auto* const to = reinterpret_cast<uint8_t*>(out);
    const auto* const from = reinterpret_cast<const uint8_t*>(in.data());
    if (decrypts) {
      IMB_AES128_GCM_DEC_UPDATE(functions, &key, &context, to, from, in.size());
    } else {
      IMB_AES128_GCM_ENC_UPDATE(functions, &key, &context, to, from, in.size());
    }
  }
  std::array<char, kTagBytes> tag() {
    std::array<char, kTagBytes> made;
    auto* const to = reinterpret_cast<uint8_t*>(made.data());
    if (decrypts) {
      IMB_AES128_GCM_DEC_FINALIZE(functions, &key, &context, to, made.size());
    } else {
      IMB_AES128_GCM_ENC_FINALIZE(functions, &key, &context, to, made.size());
    }
    return made;
  }

  IMB_MGR* const functions = cipher_functions();
  const bool decrypts;
  alignas(64) gcm_key_data key;
  alignas(64) gcm_context_data context;
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
  IMB_AES128_GCM_PRE(cipher_->functions, key.data(), &cipher_->key);
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
  IMB_AES128_GCM_INIT(cipher_->functions, &cipher_->key, &cipher_->context, nonce.data(),
                      reinterpret_cast<const uint8_t*>(head.data()), head.size());
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
  const auto tag = cipher_->tag();
  std::memcpy(at, tag.data(), tag.size());
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
  const auto tag = cipher_->tag();
  const std::string_view sent(reinterpret_cast<const char*>(in.data()) + kRecordHeadBytes + room + 1, kTagBytes);
  CHORALE_CHECK(equal_in_constant_time({tag.data(), tag.size()}, sent), "[tls] a record was changed on its way");
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
