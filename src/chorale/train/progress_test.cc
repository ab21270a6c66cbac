#include "chorale/train/progress.h"

#include <gtest/gtest.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <functional>

#include "chorale/base/error.h"

namespace chorale::train {
namespace {

using namespace std::chrono_literals;

// What a progress line writes to a file.
std::string written(const std::function<void(Output&)>& write) {
  std::FILE* file = std::tmpfile();
  Output output(file);
  write(output);
  std::rewind(file);
  char text[4096];
  const size_t length = std::fread(text, 1, sizeof(text), file);
  std::fclose(file);
  return {text, length};
}

TEST(Progress, NumbersAreReadable) {
  EXPECT_EQ(grouped(0), "0");
  EXPECT_EQ(grouped(999), "999");
  EXPECT_EQ(grouped(1000), "1,000");
  EXPECT_EQ(grouped(-1234567), "-1,234,567");
  EXPECT_EQ(grouped(-123), "-123");
  EXPECT_EQ(clock_text(65), "1:05");
  EXPECT_EQ(clock_text(7384.4), "2:03:04");
}

TEST(Progress, AFileGetsTheFirstAndTheLastStepAsPlainLines) {
  const std::string text = written([](Output& file) {
    EXPECT_EQ(Progress::style_for(file), Progress::Style::kPlain);
    Progress progress(file, Progress::Style::kPlain, 1000, 1h);
    for (int step = 1; step <= 1000; ++step) progress.show(step, "loss 0.5");
  });
  EXPECT_EQ(text.substr(0, 27), "  0 %  1/1,000  loss 0.5  0");
  EXPECT_NE(text.find("\n100 %  1,000/1,000  loss 0.5  0:00 left\n"), std::string::npos);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 2);
}

TEST(Progress, ALiveLineIsErasedBeforeAnotherLineAndAtTheEnd) {
  const std::string text = written([](Output& file) {
    Progress progress(file, Progress::Style::kLive, 2);
    progress.show(1, "half");
    progress.say("a word");
    progress.show(2, "all");
  });
  EXPECT_NE(text.find(" 50 %  1/2  half"), std::string::npos);
  EXPECT_NE(text.find("\r\033[Ka word\n"), std::string::npos);
  EXPECT_NE(text.find("█▏ 100 %  2/2  all"), std::string::npos);
  EXPECT_TRUE(text.ends_with("\r\033[K"));
}

TEST(Progress, ATerminalThatHasBecomeNarrowerIsCleared) {
  int master = -1, slave = -1;
  winsize size{.ws_row = 24, .ws_col = 100, .ws_xpixel = 0, .ws_ypixel = 0};
  ASSERT_EQ(openpty(&master, &slave, nullptr, nullptr, &size), 0);
  std::FILE* terminal = fdopen(slave, "w");
  {
    Output output(terminal);
    Progress progress(output, Progress::style_for(output), 2);
    progress.show(1, std::string(60, 'x'));  // fills 99 columns
    size.ws_col = 40;
    ioctl(slave, TIOCSWINSZ, &size);
    progress.show(2, "all");
  }
  std::fclose(terminal);
  // What was written comes in parts; behind the last one there is an error, since nobody has the other end any more.
  std::string text;
  char part[4096];
  for (ssize_t bytes = 0; (bytes = read(master, part, sizeof(part))) > 0;)
    text.append(part, static_cast<size_t>(bytes));
  close(master);
  EXPECT_NE(text.find("\033[2A\r\033[J"), std::string::npos) << text;  // three rows of 40 are 99 cells
  EXPECT_NE(text.find("100 %  2/2  all"), std::string::npos);
}

TEST(Progress, QuietSaysNothing) {
  EXPECT_EQ(written([](Output& file) {
              Progress progress(file, Progress::Style::kQuiet, 2);
              progress.show(2, "all");
              progress.say("a word");
            }),
            "");
}

TEST(Output, AFullDiskGetsOneWarningAndIsRemembered) {
  std::FILE* full = std::fopen("/dev/full", "w");
  ASSERT_NE(full, nullptr);
  testing::internal::CaptureStderr();
  {
    Output output(full);
    Progress progress(output, Progress::Style::kPlain, 3, 0ms);
    for (int step = 1; step <= 3; ++step) progress.show(step, "loss 0.5");
    EXPECT_TRUE(output.has_failed());
  }
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_NE(said.find("the output cannot be written: No space left on device"), std::string::npos) << said;
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  std::fclose(full);
}

TEST(Output, AReaderThatHasGoneIsAnError) {
  std::signal(SIGPIPE, SIG_IGN);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  close(ends[0]);
  std::FILE* file = fdopen(ends[1], "w");
  Output output(file);
  EXPECT_THROW(output.print("a word\n"), StateError);
  EXPECT_FALSE(output.has_failed());
  std::fclose(file);
  std::signal(SIGPIPE, SIG_DFL);
}

}  // namespace
}  // namespace chorale::train
