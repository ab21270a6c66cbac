#include "chorale/report/run.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "chorale/base/error.h"
#include "chorale/testing/temporary_folder_test_util.h"

namespace chorale::report {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::IsNan;

const std::vector<double>& column(const Series& series, std::string_view name) {
  for (const Column& one : series.columns()) {
    if (one.name == name) return one.values;
  }
  throw std::runtime_error("no such column");
}

TEST(RunReader, ReadsEveryKindOfLine) {
  const TemporaryFolder folder;
  folder.write("config.json", R"({"model": "cnn", "batch": 128})");
  folder.write(
      "metrics.jsonl",
      R"({"kind":"start","step":0,"seconds":0,"task":"gpt","ranks":2,"time":"2026-01-01T00:00:00Z"})"
      "\n"
      R"({"kind":"train","step":10,"seconds":1.5,"epoch":0.1,"loss":2.5,"lr":0.01,"step_ms":20,)"
      R"("tokens_per_second":900,"exposed_communication_ms":5})"
      "\n"
      R"({"kind":"train","step":20,"loss":null})"
      "\n"
      R"({"kind":"evaluation","step":20,"seconds":2,"test_loss":2.25,"test_accuracy":0.5})"
      "\n"
      R"({"kind":"event","step":15,"cause":"rank 1 died","ranks":3,"repeated":true,"cost_ms":170.5})"
      "\n"
      R"({"kind":"sample","step":20,"text":"In the beginning"})"
      "\n"
      R"({"kind":"time","step":20,"rank":1,"compute_ms":3,"exposed_ms":1,"hidden_ms":0.5,"memory_mib":64})"
      "\n"
      R"({"kind":"calls","step":10,"from":"a","to":"b","calls":3})"
      "\n"
      R"({"kind":"calls","step":20,"from":"a","to":"b","calls":7,"failed":1,"in_flight":2,"sent_bytes":40,)"
      R"("received_bytes":50,"p50_us":6.5,"p99_us":70})"
      "\n"
      R"({"kind":"worker","step":20,"name":"b","queued":1,"served":2,"owned_references":3,"held_references":4})"
      "\n");
  RunReader reader(folder.path());
  EXPECT_TRUE(reader.refresh());
  EXPECT_THAT(reader.problems(), IsEmpty());
  const auto& run = reader.run();
  EXPECT_EQ(run.name, folder.path().filename().string());
  EXPECT_EQ(json::find(run.config, "model")->string("model"), "cnn");
  EXPECT_EQ(json::find(run.start, "task")->string("task"), "gpt");
  EXPECT_THAT(column(run.train, "step"), ElementsAre(10, 20));
  EXPECT_THAT(column(run.train, "loss"), ElementsAre(2.5, IsNan()));
  EXPECT_THAT(column(run.train, "rate"), ElementsAre(900, IsNan()));
  EXPECT_THAT(column(run.train, "waiting"), ElementsAre(0.25, IsNan()));
  EXPECT_THAT(column(run.train, "seconds"), ElementsAre(1.5, IsNan()));
  EXPECT_EQ(run.rate_unit, "tokens/s");
  EXPECT_THAT(column(run.evaluations, "test_accuracy"), ElementsAre(0.5));
  ASSERT_EQ(run.samples.size(), 1U);
  EXPECT_EQ(run.samples[0].text, "In the beginning");
  ASSERT_EQ(run.events.size(), 1U);
  EXPECT_EQ(run.events[0].cause, "rank 1 died");
  EXPECT_TRUE(run.events[0].repeated);
  EXPECT_THAT(column(run.times.at(1), "memory_mib"), ElementsAre(64));
  ASSERT_EQ(run.calls.size(), 1U);
  EXPECT_THAT(run.calls.at({"a", "b"}), ElementsAre(7, 1, 2, 40, 50, 6.5, 70));
  EXPECT_THAT(run.workers.at("b"), ElementsAre(1, 2, 3, 4, IsNan()));
  EXPECT_GT(run.updated, 1.6e9);
}

TEST(RunReader, NumbersOfAProgramsOwnAreKeptByName) {
  const TemporaryFolder folder;
  folder.write("metrics.jsonl",
               R"({"kind":"train","step":1,"seconds":0.5,"loss":1,"reward":-3,"step_ms":2,"note":"hm"})"
               "\n"
               R"({"kind":"train","step":2,"loss":1,"reward":4.5})"
               "\n"
               R"({"kind":"evaluation","step":2,"test_loss":1,"test_bleu":30})"
               "\n"
               R"({"kind":"arm","step":7,"angle":0.25,"loss_of_grip":1})"
               "\n");
  RunReader reader(folder.path());
  reader.refresh();
  EXPECT_THAT(reader.problems(), IsEmpty());
  const auto& run = reader.run();
  std::vector<std::string> names;
  names.reserve(run.own.size());
  for (const auto& [name, series] : run.own) names.push_back(name);
  EXPECT_THAT(names, ElementsAre("arm: angle", "arm: loss_of_grip", "reward", "test_bleu"));
  EXPECT_THAT(column(run.own.at("reward"), "step"), ElementsAre(1, 2));
  EXPECT_THAT(column(run.own.at("reward"), "seconds"), ElementsAre(0.5, IsNan()));
  EXPECT_THAT(column(run.own.at("reward"), "value"), ElementsAre(-3, 4.5));
  EXPECT_THAT(column(run.own.at("arm: angle"), "value"), ElementsAre(0.25));
}

TEST(RunReader, UnknownKindsAndFieldsArePassedOver) {
  const TemporaryFolder folder;
  folder.write("metrics.jsonl",
               "{\"kind\":\"weather\",\"rain\":true}\n{\"kind\":\"train\",\"step\":1,\"loss\":1,\"mood\":[]}\n");
  RunReader reader(folder.path());
  reader.refresh();
  EXPECT_THAT(reader.problems(), IsEmpty());
  EXPECT_EQ(reader.run().train.rows(), 1U);
}

TEST(RunReader, LinesThatAreNotUnderstoodAreNamedByNumberAndTheRestIsRead) {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"loss 3.5", "line 2"},
      {"[]", "line 2 should be an object, but is an array"},
      {"{\"step\":1}", "line 2: no \"kind\""},
      {"{\"kind\":\"train\"}", "line 2: no \"step\""},
      {"{\"kind\":\"train\",\"step\":-1}", "line 2: \"step\""},
      {"{\"kind\":\"train\",\"step\":1.5}", "line 2: \"step\""},
      {"{\"kind\":\"train\",\"step\":2,\"loss\":\"low\"}", "line 2: \"loss\" is a string, expected a number"},
      {"{\"kind\":\"sample\",\"step\":2,\"text\":7}", "line 2: \"text\""},
      {"{\"kind\":\"time\",\"step\":2}", "line 2: no \"rank\""},
      {"{\"kind\":\"train\",\"step\":2,\"loss\":\xff}", "line 2"},
      {"", "line 2"},
      {std::string(2'000'000, 'x'), "line 2: longer than 1048576 characters"},
  };
  for (const auto& [bad, expected] : cases) {
    const TemporaryFolder folder;
    folder.write("metrics.jsonl", "{\"kind\":\"train\",\"step\":1,\"loss\":1}\n" + bad +
                                      "\n{\"kind\":\"train\",\"step\":3,\"loss\":3}\n");
    RunReader reader(folder.path());
    reader.refresh();
    EXPECT_THAT(reader.problems(), ElementsAre(HasSubstr(expected))) << bad.substr(0, 100);
    EXPECT_THAT(column(reader.run().train, "loss"), ElementsAre(1, 3)) << bad.substr(0, 100);
  }
}

TEST(RunReader, OfManyBadLinesOnlyTheFirstTenAreNamed) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 25; ++i) text += "?\n";
  folder.write("metrics.jsonl", text);
  RunReader reader(folder.path());
  reader.refresh();
  ASSERT_EQ(reader.problems().size(), 11U);
  EXPECT_EQ(reader.problems().back(), "metrics.jsonl: 15 more lines like these");
}

TEST(RunReader, ALineCountsOnceItsEndIsWritten) {
  const TemporaryFolder folder;
  const std::string first = "{\"kind\":\"train\",\"step\":1,\"loss\":1}\n",
                    second = "{\"kind\":\"train\",\"step\":2,\"loss\":2}\n";
  folder.write("metrics.jsonl", first + second.substr(0, 20));
  RunReader reader(folder.path());
  reader.refresh();
  EXPECT_EQ(reader.run().train.rows(), 1U);
  EXPECT_FALSE(reader.refresh()) << "nothing was written meanwhile";
  std::ofstream(folder / "metrics.jsonl", std::ios::app) << second.substr(20);
  EXPECT_TRUE(reader.refresh());
  EXPECT_THAT(column(reader.run().train, "loss"), ElementsAre(1, 2));
  EXPECT_THAT(reader.problems(), IsEmpty());
}

TEST(RunReader, AFileThatWasCutShortIsReadAnew) {
  const TemporaryFolder folder;
  folder.write("metrics.jsonl",
               "{\"kind\":\"train\",\"step\":1,\"loss\":1}\n{\"kind\":\"train\",\"step\":2,\"loss\":2}\n");
  RunReader reader(folder.path());
  reader.refresh();
  folder.write("metrics.jsonl", "{\"kind\":\"train\",\"step\":1,\"loss\":7}\n");
  EXPECT_TRUE(reader.refresh());
  EXPECT_THAT(column(reader.run().train, "loss"), ElementsAre(7));
}

TEST(RunReader, FilesMayComeLater) {
  const TemporaryFolder folder;
  RunReader reader(folder.path());
  EXPECT_FALSE(reader.refresh());
  EXPECT_EQ(reader.run().updated, 0);
  folder.write("config.json", "{\"task\": \"gpt\"}");
  EXPECT_TRUE(reader.refresh());
  EXPECT_EQ(reader.run().config.size(), 1U);
}

TEST(RunReader, ADamagedConfigurationOrEvaluationIsAProblemNotTheEnd) {
  const TemporaryFolder folder;
  folder.write("metrics.jsonl", "{\"kind\":\"train\",\"step\":1,\"loss\":1}\n");
  folder.write("config.json", "{");
  folder.write("evaluation.json", "{}");
  RunReader reader(folder.path());
  reader.refresh();
  EXPECT_THAT(reader.problems(), ElementsAre(HasSubstr("config.json"), HasSubstr("evaluation.json has no \"names\"")));
  EXPECT_EQ(reader.run().train.rows(), 1U);
}

TEST(RunReader, WhatIsNoFolderIsRefused) {
  const TemporaryFolder folder;
  EXPECT_THROW(RunReader(folder / "nothing"), InvalidArgument);
  EXPECT_THROW(RunReader(folder.write("file", "")), InvalidArgument);
}

}  // namespace
}  // namespace chorale::report
