#include "chorale/report/page.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::report {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::StartsWith;

// The data inside a page.
json::Value data_of(const std::string& page) {
  const std::string mark = "id=\"data\">";
  const size_t start = page.find(mark) + mark.size();
  return json::parse("data", page.substr(start, page.find("</script>", start) - start));
}
const json::Value& at(const json::Value& value, std::string_view key) { return *json::find(value.object(key), key); }

double number(const json::Value& value) {
  const auto* real = value.as<double>();
  return real ? *real : static_cast<double>(value.size("a number"));
}

std::string report_of(const TemporaryFolder& folder) {
  const std::filesystem::path runs[] = {folder.path()};
  EXPECT_THAT(write_report(runs, folder / "report.html"), IsEmpty());
  return folder.read("report.html");
}

TEST(Page, TextOfARunCannotEndTheElementOfTheData) {
  const TemporaryFolder folder;
  folder.write("metrics.jsonl", "{\"kind\":\"sample\",\"step\":1,\"text\":\"</script><script>alert(1)</script>\"}\n");
  const std::string page = report_of(folder);
  EXPECT_THAT(page, Not(HasSubstr("<script>alert")));
  const json::Value data = data_of(page);
  const json::Value& sample = at(at(data, "runs").array("runs")[0], "samples").array("samples")[0];
  EXPECT_EQ(at(sample, "text").string("text"), "</script><script>alert(1)</script>");
}

TEST(Page, AsksForNothingFromOutside) {
  const TemporaryFolder folder;
  folder.write("metrics.jsonl", "{\"kind\":\"train\",\"step\":1,\"loss\":1}\n");
  const std::string page = report_of(folder);
  EXPECT_THAT(page, HasSubstr("default-src 'none'"));
  for (const char* word : {"src=", "href=\"http", "@import", "url(http", "fetch("})
    EXPECT_THAT(page, Not(HasSubstr(word)));
}

TEST(Page, ALongRunIsThinned) {
  const TemporaryFolder folder;
  std::string lines;
  for (int i = 1; i <= 20'000; ++i)
    lines += concat("{\"kind\":\"train\",\"step\":", i, ",\"loss\":", i == 777 ? 99 : 1, "}\n");
  folder.write("metrics.jsonl", lines);
  const json::Value data = data_of(report_of(folder));
  const json::Value& steps = at(at(data, "runs").array("runs")[0], "train");
  EXPECT_LE(at(steps, "loss").array("loss").size(), 1500U);
  EXPECT_EQ(number(at(steps, "step").array("step").back()), 20'000);
  double highest = 0;
  for (const json::Value& value : at(steps, "loss_high").array("loss_high")) highest = std::max(highest, number(value));
  EXPECT_EQ(highest, 99) << "the spike is gone";
}

TEST(Page, SamplesAreEvenlyChosenAndTheLastIsAmongThem) {
  const TemporaryFolder folder;
  std::string lines;
  for (int i = 1; i <= 50; ++i) lines += concat("{\"kind\":\"sample\",\"step\":", i, ",\"text\":\"\"}\n");
  folder.write("metrics.jsonl", lines);
  const json::Value data = data_of(report_of(folder));
  const json::Array& samples = at(at(data, "runs").array("runs")[0], "samples").array("samples");
  ASSERT_EQ(samples.size(), 20U);
  EXPECT_EQ(at(samples.front(), "step").size("step"), 2);
  EXPECT_EQ(at(samples.back(), "step").size("step"), 50);
}

TEST(Page, ALongSampleIsCutBetweenCharacters) {
  const TemporaryFolder folder;
  std::string text = "x";
  for (int i = 0; i < 5000; ++i) text += "é";
  folder.write("metrics.jsonl", "{\"kind\":\"sample\",\"step\":1,\"text\":\"" + text + "\"}\n");
  const json::Value data = data_of(report_of(folder));  // which must be UTF-8
  const json::Value& sample = at(at(data, "runs").array("runs")[0], "samples").array("samples")[0];
  EXPECT_LT(at(sample, "text").string("text").size(), 8010U);
}

TEST(WriteReport, NamesTheRunOfAProblem) {
  const TemporaryFolder folder;
  folder.write("metrics.jsonl", "?\n");
  const std::filesystem::path runs[] = {folder.path()};
  EXPECT_THAT(
      write_report(runs, folder / "report.html"),
      ElementsAre(AllOf(StartsWith(folder.path().filename().string() + ": "), HasSubstr("metrics.jsonl, line 1"))));
}

TEST(WriteReport, RefusesAFolderWithoutMetrics) {
  const TemporaryFolder folder;
  const std::filesystem::path runs[] = {folder.path()};
  EXPECT_THROW(write_report(runs, folder / "report.html"), InvalidArgument);
  EXPECT_FALSE(std::filesystem::exists(folder / "report.html"));
}

}  // namespace
}  // namespace chorale::report
