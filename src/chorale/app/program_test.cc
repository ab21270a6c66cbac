#include "chorale/app/program.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "chorale/app/commands.h"
#include "chorale/app/op_functions.h"
#include "chorale/base/cpu.h"
#include "chorale/base/optional_parts.h"
#include "chorale/transport/congestion.h"

namespace chorale::app {
namespace {

using testing::HasSubstr;

struct Outcome {
  int status;
  std::string out, err;
};
Outcome run_with(std::vector<const char*> args, std::span<const AddCommand> commands = chorale_commands()) {
  args.insert(args.begin(), "chorale");
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  const int status = run(static_cast<int>(args.size()), args.data(), commands);
  std::fflush(stdout);
  return {status, testing::internal::GetCapturedStdout(), testing::internal::GetCapturedStderr()};
}

TEST(Program, PrintsItsVersion) {
  const Outcome outcome = run_with({"--version"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.out, "chorale " + std::string(version()) + "\n");
}

TEST(Program, HelpListsTheCommands) {
  for (const auto& args : {std::vector<const char*>{}, {"--help"}}) {
    const Outcome outcome = run_with(args);
    EXPECT_EQ(outcome.status, 0);
    EXPECT_THAT(outcome.out, AllOf(HasSubstr("doctor"), HasSubstr("bench")));
  }
}

TEST(Program, AMisspeltCommandGetsTheNearestName) {
  const Outcome outcome = run_with({"docter"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_EQ(outcome.out, "");
  EXPECT_THAT(outcome.err, HasSubstr("no command 'docter'; did you mean 'doctor'?"));
}

TEST(Program, AnUnknownCommandGetsTheList) {
  const Outcome outcome = run_with({"xyzzy"});
  EXPECT_EQ(outcome.status, 2);
  EXPECT_THAT(outcome.err, testing::StartsWith("chorale: no command 'xyzzy' (commands: "));
}

TEST(Program, ABenchmarkOfNoCaseListsTheCases) {
  const AddCommand commands[] = {add_bench};  // as in chorale-bench
  for (const auto& [bench, one] :
       std::map<const char*, const char*>{{"collectives", "\n  all_reduce/f32/4096/n2/ordinary\n"},
                                          {"ops", "\n  cost/f32/1/recorded\n"},
                                          {"steps", "\n  bert_256x4/local/n1/t1/bf16"},
                                          {"ddp", "\n  tinymlp/ddp/n2/t1\n"},
                                          {"rpc", "\n  calls/64 in flight/4096"}}) {
    const Outcome outcome = run_with({"bench", bench, "--only", "all_reduse"}, commands);
    EXPECT_EQ(outcome.status, 1);
    EXPECT_THAT(outcome.err, AllOf(HasSubstr("no case has 'all_reduse'"), HasSubstr(one)));
  }
}

TEST(Program, WrongArgumentsAreQuotedWithTheNearestNameAndWhereToLook) {
  const struct {
    std::vector<const char*> args;
    std::string error;
  } kRows[] = {
      {{"doctor", "--frobnicate"}, "chorale doctor: there is no option --frobnicate\nSee chorale doctor --help\n"},
      {{"doctor", "well"}, "chorale doctor: 'well' was not expected\nSee chorale doctor --help\n"},
      {{"train", "gpt", "--ephocs", "3"},
       "chorale train gpt: there is no option --ephocs; did you mean '--epochs'?\nSee chorale train gpt --help\n"},
      {{"train", "gpt", "--epoch=3"},
       "chorale train gpt: there is no option --epoch; did you mean '--epochs'?\nSee chorale train gpt --help\n"},
      {{"train", "bret"},
       "chorale train: no command 'bret'; did you mean 'bert'? (commands: fashion-mnist, gpt, bert, recommender)\n"
       "See chorale train --help\n"},
      {{"train"},
       "chorale train: which one? (commands: fashion-mnist, gpt, bert, recommender)\nSee chorale train --help\n"},
      {{"report"}, "chorale report: runs is required\nSee chorale report --help\n"},
  };
  for (const auto& row : kRows) {
    const Outcome outcome = run_with(row.args);
    EXPECT_EQ(outcome.status, 2);
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(outcome.err, row.error);
  }
}

TEST(Doctor, ShowsTheProcessorAndEveryOptionalPart) {
  const Outcome outcome = run_with({"doctor"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_THAT(outcome.out, HasSubstr(cpu_brand()));
  for (const OptionalPart& part : optional_parts()) {
    EXPECT_THAT(outcome.out, HasSubstr(std::string(part.name)));
    EXPECT_THAT(outcome.out, HasSubstr(part.available().reason));
  }
  EXPECT_THAT(outcome.out, HasSubstr("congestion control: " + transport::usual_congestion_control("192.0.2.1")));
}

TEST(OpFunctions, AreReadFromTheirHeaders) {
  const auto found = functions_in(
      "// Of a file.\n#pragma once\n\n// ---- section\n\n// Adds.\nTensor add(const Tensor& x,\n           Scalar y = "
      "1);\n"
      "Tensor sub(const Tensor& x);  // takes away\nCHORALE_FORMS(exp, const Tensor& x)\n\n"
      "struct Options {\n  Tensor mask{};\n};\ninline Tensor operator+(const Tensor& x) { return add(x); }\n");
  ASSERT_EQ(found.size(), 3u);
  EXPECT_EQ(found[0].declaration, "Tensor add(const Tensor& x, Scalar y = 1)");
  EXPECT_EQ(found[0].comment, "Adds.");
  EXPECT_EQ(found[1].comment, "takes away");
  EXPECT_EQ(found[2].declaration, "Tensor exp(const Tensor& x), also exp_ and exp_out");
}

TEST(OpFunctions, HaveWhatUsersCall) {
  std::set<std::string> names;
  for (const OpFunction& function : op_functions()) names.insert(function.name);
  for (const char* name : {"einsum", "conv2d", "flatten", "mse_loss", "reshape", "matmul", "clamp", "cat", "where",
                           "all_gather", "start_all_gather", "flex_attention"}) {
    EXPECT_TRUE(names.contains(name)) << name;
  }
  EXPECT_FALSE(names.contains("Tensor"));  // of a type of functions
}

}  // namespace
}  // namespace chorale::app
