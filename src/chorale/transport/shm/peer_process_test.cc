// The memory of other processes: what a rank takes of it, and what it refuses.
#include "chorale/transport/shm/peer_process.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <string>

#include "chorale/base/comm_error.h"

namespace chorale::transport::shm {
namespace {

constexpr size_t kBytes = size_t{1} << 16;

// A file in memory with a word in it; the test is its own peer.
class PeerMemories : public testing::Test {
 protected:
  ~PeerMemories() override { close(file_); }
  void seal(int seals) { ASSERT_EQ(fcntl(file_, F_ADD_SEALS, seals), 0); }
  SharedFile shared() const { return shared_file(file_); }
  static int make() {
    const int file = memfd_create("peer", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    EXPECT_EQ(ftruncate(file, kBytes), 0);
    EXPECT_EQ(pwrite(file, "word", 4, 100), 4);
    return file;
  }
  const int file_ = make();
};

TEST_F(PeerMemories, AreReadWhereTheyAreByMappingsThatCannotBecomeWritable) {
  seal(F_SEAL_SHRINK);
  const auto memory = PeerMemory::open(shared(), Access::kRead);
  const PeerMemory::Extent extent = memory->map(100, 4);
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(extent.at(100)), 4), "word");
  EXPECT_EQ(mprotect(extent.base, 4096, PROT_READ | PROT_WRITE), -1);
}

TEST_F(PeerMemories, ThatCouldShrinkAreRefused) {
  EXPECT_THROW(PeerMemory::open(shared(), Access::kRead)->map(0, 4), CommError);
}

TEST_F(PeerMemories, EndWhereTheirFileEnds) {
  seal(F_SEAL_SHRINK);
  const auto memory = PeerMemory::open(shared(), Access::kRead);
  EXPECT_NO_THROW(memory->map(kBytes - 4, 4));
  EXPECT_THROW(memory->map(kBytes - 4, 5), CommError);
  EXPECT_THROW(memory->map(UINT64_MAX - 2, 4), CommError);
}

}  // namespace
}  // namespace chorale::transport::shm
