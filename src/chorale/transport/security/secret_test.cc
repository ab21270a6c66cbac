#include "chorale/transport/security/secret.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "chorale/base/error.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/transport/store/store_kinds_test_util.h"

namespace chorale::transport {
namespace {

using testing::HasSubstr;

constexpr const char* kText = "0123456789abcdef0123456789abcdef";

class SecretTest : public testing::Test {
 protected:
  std::string file(const std::string& text, mode_t mode = 0600) {
    const std::string path = folder_.path("secret");
    std::ofstream(path) << text;
    chmod(path.c_str(), mode);
    return path;
  }
  void TearDown() override {
    unsetenv("CHORALE_SECRET_FD");
    unsetenv("CHORALE_SECRET_FILE");
  }

 private:
  ScratchFolder folder_;
};

std::string hex(std::string_view bytes) {
  std::string text;
  for (const char byte : bytes) {
    for (const int shift : {4, 0}) text += "0123456789abcdef"[(static_cast<unsigned char>(byte) >> shift) & 15];
  }
  return text;
}

TEST(Hmac, GivesTheDigestOfTheStandardsExample) {
  // RFC 4231, test case 2, in one part and in three.
  const char* digest = "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843";
  EXPECT_EQ(hex(view(hmac_sha256("Jefe", {"what do ya want for nothing?"}))), digest);
  EXPECT_EQ(hex(view(hmac_sha256("Jefe", {"what do ya ", "", "want for nothing?"}))), digest);
}

TEST_F(SecretTest, TwoGeneratedSecretsDiffer) {
  EXPECT_EQ(Secret::generate().bytes().size(), 32U);
  EXPECT_NE(Secret::generate().bytes(), Secret::generate().bytes());
}

TEST_F(SecretTest, LineEndsOfAFileDoNotCount) {
  EXPECT_EQ(Secret::read_file(file(std::string(kText) + "\r\n")).bytes(), kText);
  EXPECT_EQ(Secret::read_file(file(kText, 0400)).bytes(), kText);
}

TEST_F(SecretTest, AFileThatOthersCanReadIsRefusedWithTheRemedy) {
  for (const mode_t mode : {0640U, 0604U, 0620U, 0666U}) {
    const std::string path = file(kText, mode);
    EXPECT_THAT(message_of([&] { Secret::read_file(path); }), HasSubstr("chmod 600 " + path)) << mode;
  }
}

TEST_F(SecretTest, AFileOfAnotherUserIsRefused) {
  if (geteuid() != 0) GTEST_SKIP() << "only root can give a file away";
  const std::string path = file(kText);
  ASSERT_EQ(chown(path.c_str(), 12345, 0), 0);
  EXPECT_THAT(message_of([&] { Secret::read_file(path); }), HasSubstr("belongs to user 12345"));
}

TEST_F(SecretTest, AShortOrMissingOrHugeSecretIsRefusedButNotShown) {
  EXPECT_THAT(message_of([&] { Secret::read_file(file("hunter2hunter2")); }),
              AllOf(HasSubstr("14 bytes"), HasSubstr("secret"), Not(HasSubstr("hunter2"))));
  EXPECT_THAT(message_of([&] { Secret::read_file(file(std::string(5000, 'x'))); }), HasSubstr("expected 16 to 4096"));
  EXPECT_THAT(message_of([&] { Secret::read_file("/nonexistent/secret"); }), HasSubstr("/nonexistent/secret"));
  EXPECT_THAT(message_of([&] { Secret::read_file("/tmp"); }), HasSubstr("not a regular file"));
}

TEST_F(SecretTest, ComesFromTheDescriptorThenTheFileThenNowhere) {
  EXPECT_FALSE(Secret::from_environment());
  setenv("CHORALE_SECRET_FILE", file(kText).c_str(), 1);
  EXPECT_EQ(Secret::from_environment()->bytes(), kText);
  const Secret made = Secret::from_bytes("any bytes may be in it\r\n");
  const int descriptor = made.to_descriptor();
  setenv("CHORALE_SECRET_FD", std::to_string(descriptor).c_str(), 1);
  for (int i = 0; i < 2; ++i)
    EXPECT_EQ(Secret::from_environment()->bytes(), made.bytes());  // reading takes nothing away
  close(descriptor);
  EXPECT_THAT(message_of([] { Secret::from_environment(); }), HasSubstr("CHORALE_SECRET_FD"));
  setenv("CHORALE_SECRET_FD", "7x", 1);
  EXPECT_THAT(message_of([] { Secret::from_environment(); }), HasSubstr("'7x'"));
}

}  // namespace
}  // namespace chorale::transport
