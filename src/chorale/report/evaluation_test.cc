#include "chorale/report/evaluation.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/json/json_write.h"
#include "chorale/testing/message_test_util.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::report {
namespace {

using testing::HasSubstr;

Evaluation two_classes() {
  return {.names = {"Coat", "Bag"},
          .confusion = {{8, 2}, {0, 10}},
          .width = 2,
          .height = 2,
          .worst = {{.index = 7, .label = 0, .guess = 1, .probability = 0.75, .pixels = {0, 255, 16, 3}}}};
}

std::string message_for(std::string_view text) {
  return message_of([&] { evaluation_from_json("evaluation.json", json::parse("evaluation.json", text)); });
}

TEST(Evaluation, IsReadBackFromItsFile) {
  const TemporaryFolder folder;
  write_evaluation(folder.path(), two_classes());
  const Evaluation read = evaluation_from_json("it", json::parse("it", folder.read("evaluation.json")));
  EXPECT_EQ(read.names, two_classes().names);
  EXPECT_EQ(read.confusion, two_classes().confusion);
  ASSERT_EQ(read.worst.size(), 1U);
  EXPECT_EQ(read.worst[0].index, 7);
  EXPECT_EQ(read.worst[0].label, 0);
  EXPECT_EQ(read.worst[0].guess, 1);
  EXPECT_EQ(read.worst[0].probability, 0.75);
  EXPECT_EQ(read.worst[0].pixels, two_classes().worst[0].pixels);
}

TEST(Evaluation, WhatDoesNotFitTogetherIsNamed) {
  const std::string good = json::write(to_json(two_classes()));
  EXPECT_EQ(message_for(good), "");
  const std::vector<std::array<const char*, 3>> cases = {
      {R"("names": ["Coat", "Bag"])", R"("names": [])", "0 names of classes"},
      {R"("names": ["Coat", "Bag"])", R"("names": ["Coat", "Bag", "Hat"])", "2 rows for 3 classes"},
      {R"("names")", R"("nomes")", "no \"names\""},
      {"[8, 2]", "[8]", "1 counts for 2 classes"},
      {"[8, 2]", "[8, -2]", "a count of confusion"},
      {R"("label": 0)", R"("label": 2)", "worst[0]: label is 2, expected less than 2"},
      {"0.75", "1.5", "probability must be a number from 0 to 1"},
      {R"("width": 2)", R"("width": 3)", "4 pixels, expected 3 x 2"},
      {R"("width": 2)", R"("width": 100000)", "width is 100000, expected less than 513"},
      {"AP8QAw==", "AP8QA", "base64 of 5 characters"},
      {"AP8QAw==", "AP8Q?w==", "not base64 at character 4"},
  };
  for (const auto& [from, to, expected] : cases) {
    std::string bad = good;
    const size_t at = bad.find(from);
    ASSERT_NE(at, std::string::npos) << from << " in " << good;
    bad.replace(at, std::string_view(from).size(), to);
    EXPECT_THAT(message_for(bad), HasSubstr(expected)) << bad;
  }
}

TEST(Base64, IsThatOfRfc4648) {
  const std::vector<std::pair<std::string, std::string>> vectors = {
      {"", ""}, {"f", "Zg=="}, {"fo", "Zm8="}, {"foo", "Zm9v"}, {"foob", "Zm9vYg=="}, {"fooba", "Zm9vYmE="}};
  for (const auto& [plain, coded] : vectors) {
    const std::vector<uint8_t> bytes(plain.begin(), plain.end());
    EXPECT_EQ(base64(bytes), coded);
    EXPECT_EQ(from_base64(coded), bytes);
  }
  EXPECT_THROW(from_base64("Zg==Zg=="), InvalidArgument);
}

}  // namespace
}  // namespace chorale::report
