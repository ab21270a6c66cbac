#include "chorale/transport/security/handshake.h"

#include <gtest/gtest.h>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"

namespace chorale::transport {
namespace {

const std::optional<Secret>& job() {
  static const std::optional<Secret> secret = Secret::from_bytes("the secret of this job");
  return secret;
}
const std::optional<Secret>& other_job() {
  static const std::optional<Secret> secret = Secret::from_bytes("the secret of another job");
  return secret;
}

TEST(Handshake, TwoEndsWithTheSameSecretUnderstandEachOther) {
  for (const auto& secret : {job(), std::optional<Secret>()}) {
    ClientHandshake client(secret, "store");
    ServerHandshake server(secret, "store");
    const std::string proof = client.answer(server.challenge(client.hello()));
    SessionMacs at_client = client.finish(server.answer(proof));
    SessionMacs at_server = server.macs();
    for (const char* message : {"one", "two", "two", ""}) {
      EXPECT_TRUE(at_server.receiving.check_next(message, at_client.sending.next(message)));
      EXPECT_TRUE(at_client.receiving.check_next(message, at_server.sending.next(message)));
    }
  }
}

TEST(Handshake, AClientWithAnotherSecretIsRefusedBeforeTheServerProvesAnything) {
  for (const auto& wrong : {other_job(), std::optional<Secret>()}) {
    ClientHandshake client(wrong, "store");
    ServerHandshake server(job(), "store");
    EXPECT_THROW(server.answer(client.answer(server.challenge(client.hello()))), CommError);
  }
}

TEST(Handshake, AServerWithAnotherSecretIsRefused) {
  ClientHandshake client(job(), "store");
  ServerHandshake server(other_job(), "store");
  const std::string proof = client.answer(server.challenge(client.hello()));
  EXPECT_THROW(server.answer(proof), CommError);
  EXPECT_THROW(client.finish(std::string(kProofBytes, '\0')), CommError);
  EXPECT_THROW(client.finish(""), CommError);
}

TEST(Handshake, AProofCannotBeReflected) {
  ClientHandshake client(job(), "store");
  const std::string proof = client.answer(std::string(kChallengeBytes, 'c'));
  EXPECT_THROW(client.finish(proof), CommError);
  // Nor can the client's words be used as a server's: here the attacker relays between two clients.
  ClientHandshake second(job(), "store");
  EXPECT_THROW(client.finish(second.answer(client.hello().substr(kHelloBytes - kChallengeBytes))), CommError);
}

TEST(Handshake, ARecordedClientIsRefusedTheSecondTime) {
  ClientHandshake client(job(), "store");
  ServerHandshake first(job(), "store"), second(job(), "store");
  const std::string proof = client.answer(first.challenge(client.hello()));
  EXPECT_NO_THROW(first.answer(proof));
  second.challenge(client.hello());
  EXPECT_THROW(second.answer(proof), CommError);
}

TEST(Handshake, AProofForAnotherPurposeIsRefused) {
  ClientHandshake client(job(), "keep-alive");
  ServerHandshake server(job(), "store");
  EXPECT_THROW(server.challenge(client.hello()), CommError);
  // A man in the middle that changes the purpose on the way gains nothing: both ends have it in their MACs.
  ClientHandshake wanted(job(), "store");
  std::string hello = client.hello();
  hello.replace(8, kPurposeBytes, wanted.hello(), 8, kPurposeBytes);
  EXPECT_THROW(server.answer(client.answer(server.challenge(hello))), CommError);
}

TEST(Handshake, AHelloWithAnyByteOfItsHeadChangedOrOfAnotherSizeIsRefused) {
  const std::string hello = ClientHandshake(job(), "store").hello();
  ASSERT_EQ(hello.size(), kHelloBytes);
  for (size_t i = 0; i < 8 + kPurposeBytes; ++i) {
    std::string changed = hello;
    changed[i] = static_cast<char>(changed[i] ^ 1);
    EXPECT_THROW(ServerHandshake(job(), "store").challenge(changed), CommError) << i;
  }
  for (const size_t size : {size_t{0}, kHelloBytes - 1}) {
    EXPECT_THROW(ServerHandshake(job(), "store").challenge(hello.substr(0, size)), CommError);
  }
  EXPECT_THROW(ServerHandshake(job(), "store").challenge(hello + "x"), CommError);
}

TEST(Handshake, APurposeHasOneToSixteenCharacters) {
  EXPECT_THROW(ClientHandshake(job(), ""), InvalidArgument);
  EXPECT_THROW(ServerHandshake(job(), "seventeen letters"), InvalidArgument);
}

TEST(MessageMac, AChangedRepeatedOrReorderedMessageIsNoticed) {
  const Digest key = random_bytes();
  MessageMac sending(key);
  const std::string first = sending.next("first"), second = sending.next("second");
  EXPECT_EQ(first.size(), MessageMac::kBytes);
  const auto receiver_after_first = [&] {
    MessageMac receiver(key);
    EXPECT_TRUE(receiver.check_next("first", first));
    return receiver;
  };
  EXPECT_TRUE(receiver_after_first().check_next("second", second));
  EXPECT_FALSE(receiver_after_first().check_next("first", first));
  EXPECT_FALSE(receiver_after_first().check_next("Second", second));
  EXPECT_FALSE(receiver_after_first().check_next("second", second.substr(1)));
  EXPECT_FALSE(MessageMac(key).check_next("second", second));
}

TEST(MessageMac, TheTwoDirectionsHaveDifferentKeys) {
  ClientHandshake client(job(), "store");
  ServerHandshake server(job(), "store");
  const std::string proof = client.answer(server.challenge(client.hello()));
  SessionMacs macs = client.finish(server.answer(proof));
  EXPECT_FALSE(macs.receiving.check_next("x", macs.sending.next("x")));  // our own message, sent back to us
}

}  // namespace
}  // namespace chorale::transport
