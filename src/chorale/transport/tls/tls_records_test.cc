// The records are TLS's: OpenSSL reads ours, and we read OpenSSL's.
#include "chorale/transport/tls/tls_records.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <openssl/ssl.h>
#include <sys/socket.h>

#include <string>
#include <thread>

#include "chorale/base/error.h"
#include "chorale/transport/fabric/fabric_test_util.h"
#include "chorale/transport/tls/tls_stream.h"

namespace chorale::transport {
namespace {

using Bytes = std::vector<std::byte>;

const StreamIdentity kIdentity{"0123", "4567", 1, 0, 2};

// A client that is nothing but OpenSSL.
class Client {
 public:
  Client(int descriptor, const Secret& secret) : descriptor_(descriptor), name_(kIdentity.text()) {
    key_ = hmac_sha256(secret.bytes(), {"chorale fabric key", name_});
    context_ = SSL_CTX_new(TLS_method());
    SSL_CTX_set_ciphersuites(context_, "TLS_AES_128_GCM_SHA256");
    SSL_CTX_set_psk_use_session_callback(context_, use_session);
    ssl = SSL_new(context_);
    SSL_set_app_data(ssl, this);
    SSL_set_fd(ssl, descriptor);
  }
  ~Client() {
    SSL_free(ssl);
    SSL_CTX_free(context_);
    close(descriptor_);
  }
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  SSL* ssl;

 private:
  static int use_session(SSL* ssl, const EVP_MD*, const unsigned char** name, size_t* bytes, SSL_SESSION** session) {
    const auto& self = *static_cast<Client*>(SSL_get_app_data(ssl));
    const unsigned char cipher[] = {0x13, 0x01};
    *name = reinterpret_cast<const unsigned char*>(self.name_.data());
    *bytes = self.name_.size();
    *session = SSL_SESSION_new();
    SSL_SESSION_set1_master_key(*session, reinterpret_cast<const unsigned char*>(self.key_.data()), self.key_.size());
    SSL_SESSION_set_cipher(*session, SSL_CIPHER_find(ssl, cipher));
    SSL_SESSION_set_protocol_version(*session, TLS1_3_VERSION);
    return 1;
  }

  const int descriptor_;
  const std::string name_;
  Digest key_;
  SSL_CTX* context_;
};

class WithOpenSsl : public testing::Test {
 protected:
  void SetUp() override {
    int pair[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
    const Secret secret = *test_options(0).secret;
    client_ = std::make_unique<Client>(pair[1], secret);
    server_.emplace(
        TlsStream::server(Socket(pair[0], "OpenSSL"), secret, [](const auto& name) { return name == kIdentity; }));
    std::thread connecting([&] { EXPECT_EQ(SSL_connect(client_->ssl), 1); });
    while (server_->handshake() != TlsStream::Step::kDone) std::this_thread::yield();
    connecting.join();
  }
  void to_server(const Bytes& data, size_t piece) {
    std::thread writer([&] {
      EXPECT_EQ(SSL_write(client_->ssl, data.data(), static_cast<int>(data.size())), static_cast<int>(data.size()));
    });
    Bytes got(data.size());
    for (size_t done = 0; done < got.size();) {
      const ptrdiff_t n = server_->read(std::span(got).subspan(done, std::min(piece, got.size() - done)));
      ASSERT_GE(n, 0);
      done += static_cast<size_t>(n);
    }
    writer.join();
    EXPECT_TRUE(got == data);
  }
  void to_client(const Bytes& head, const Bytes& body) {
    server_->write(head, body);
    std::thread writer([&] {
      while (!server_->flush()) std::this_thread::yield();
    });
    Bytes got(head.size() + body.size()), expected = head;
    expected.insert(expected.end(), body.begin(), body.end());
    for (size_t done = 0, n = 0; done < got.size(); done += n) {
      ASSERT_EQ(SSL_read_ex(client_->ssl, got.data() + done, got.size() - done, &n), 1);
    }
    writer.join();
    EXPECT_TRUE(got == expected);
  }

  std::unique_ptr<Client> client_;
  std::optional<TlsStream> server_;
};

TEST_F(WithOpenSsl, DataOfAnySizeGoesBothWays) {
  EXPECT_STREQ(SSL_get_version(client_->ssl), "TLSv1.3");
  for (const size_t bytes :
       {size_t{1}, size_t{100}, kRecordBytes - 1, kRecordBytes, kRecordBytes + 1, size_t{300001}}) {
    for (const size_t piece : {size_t{96}, kRecordBytes, size_t{1} << 20}) to_server(pattern(bytes, bytes), piece);
    to_client(pattern(96, 3), pattern(bytes, bytes));
    to_client(pattern(5, 3), {});
  }
}

TEST_F(WithOpenSsl, ANewKeyOfThePeerIsFollowed) {
  for (int i = 0; i < 3; ++i) {
    to_server(pattern(50000, 1), 1 << 20);
    ASSERT_EQ(SSL_key_update(client_->ssl, SSL_KEY_UPDATE_NOT_REQUESTED), 1);
    to_server(pattern(50000, 2), 1 << 20);
  }
}

TEST_F(WithOpenSsl, TheEndIsSeen) {
  SSL_shutdown(client_->ssl);
  std::array<std::byte, 10> into;
  EXPECT_EQ(server_->read(into), TlsStream::kEnd);
}

class Records : public testing::Test {
 protected:
  const Digest secret_ = hmac_sha256("a", {"b"});
  RecordKey sender_{secret_, false}, receiver_{secret_, true};
  ByteQueue wire_;
  Bytes into_ = Bytes(kRecordBytes);
};

TEST_F(Records, AChangedByteIsFoundWhereverItIs) {
  const Bytes data = pattern(100, 1);
  sender_.seal({}, data, wire_);
  const Bytes record(wire_.bytes().begin(), wire_.bytes().end());
  for (size_t at = 0; at < record.size(); ++at) {
    Bytes changed = record;
    changed[at] ^= std::byte{1};
    RecordKey receiver(secret_, true);
    EXPECT_THROW(
        {
          if (RecordKey::room_for(changed)) receiver.open(changed, into_);
          throw InvalidArgument("longer than it is");
        },
        InvalidArgument);
  }
  EXPECT_EQ(receiver_.open(record, into_).bytes, data.size());
  EXPECT_THROW(receiver_.open(record, into_), InvalidArgument) << "a repeated record";
}

TEST_F(Records, ALostRecordIsFound) {
  sender_.seal({}, pattern(10, 1), wire_);
  wire_.pop(wire_.size());
  sender_.seal({}, pattern(10, 1), wire_);
  EXPECT_THROW(receiver_.open(wire_.bytes(), into_), InvalidArgument);
}

TEST_F(Records, TheKeyIsReplacedAfterManyRecords) {
  RecordKey sender(secret_, false, 100);
  const Bytes data = pattern(1, 1);
  int without_data = 0;
  for (int i = 0; i < 1000; ++i) {
    sender.seal({}, data, wire_);
    while (!wire_.empty()) {
      const auto opened = receiver_.open(wire_.bytes(), into_);
      wire_.pop(opened.taken);
      if (opened.bytes == 0) {
        ++without_data;
        continue;
      }
      ASSERT_EQ(into_[0], data[0]);
    }
  }
  EXPECT_EQ(without_data, 9);
}

}  // namespace
}  // namespace chorale::transport
