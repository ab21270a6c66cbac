#include "chorale/launch/output.h"

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <thread>

#include "chorale/launch/descriptor.h"

namespace chorale::launch {
namespace {

using namespace std::chrono_literals;

bool soon(const std::function<bool()>& is_so) {
  const Deadline limit = within(20s);
  while (!is_so() && !limit.passed()) std::this_thread::sleep_for(1ms);
  return is_so();
}

std::string read_all(int descriptor, size_t bytes) {
  std::string text(bytes, '\0');
  for (size_t at = 0; at < bytes;) {
    const ssize_t size = read(descriptor, text.data() + at, bytes - at);
    if (size <= 0) return text.substr(0, at);
    at += static_cast<size_t>(size);
  }
  return text;
}

TEST(Output, NobodyReadsAndNothingBlocksOrGetsLost) {
  Pipe pipe;
  Output output(pipe.writing.get());
  std::string all;
  // Far more than a pipe holds; a bounded number of bytes beyond what has room.
  for (int i = 0; output.has_room(); ++i) {
    const std::string part = std::to_string(i) + std::string(10'000, 'x') + "\n";
    output.write(part);
    all += part;
  }
  EXPECT_GE(all.size(), Output::kMostBytes);
  EXPECT_LT(all.size(), Output::kMostBytes + 200'000);  // the pipe, and the last part
  EXPECT_FALSE(output.is_drained());
  EXPECT_EQ(read_all(pipe.reading.get(), all.size()), all);
  EXPECT_TRUE(soon([&] { return output.is_drained() && output.has_room(); }));
}

TEST(Output, ANonBlockingPipeIsWaitedFor) {
  Pipe pipe;
  fcntl(pipe.writing.get(), F_SETFL, O_NONBLOCK);
  Output output(pipe.writing.get());
  const std::string all(1 << 20, 'y');
  output.write(all);
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(read_all(pipe.reading.get(), all.size()), all);
  EXPECT_TRUE(soon([&] { return output.is_drained(); }));
  EXPECT_EQ(output.problem(), "");
}

TEST(Output, AReaderThatHasGoneAndAFullDiskAreToldApart) {
  const auto before = signal(SIGPIPE, SIG_IGN);
  {
    Pipe pipe;
    Output output(pipe.writing.get());
    pipe.reading.reset();
    output.write("x");
    EXPECT_TRUE(soon([&] { return output.has_lost_its_reader(); }));
    EXPECT_EQ(output.problem(), "");
    EXPECT_TRUE(output.is_drained());
  }
  const Descriptor full(open("/dev/full", O_WRONLY | O_CLOEXEC));
  Output output(full.get());
  output.write("x");
  EXPECT_TRUE(soon([&] { return output.problem() == "No space left on device"; }));
  EXPECT_FALSE(output.has_lost_its_reader());
  output.write("y");
  EXPECT_TRUE(output.is_drained() && output.has_room());
  signal(SIGPIPE, before);
}

}  // namespace
}  // namespace chorale::launch
