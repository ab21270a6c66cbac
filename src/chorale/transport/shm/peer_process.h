// Other processes of this host: are they alive, what are they doing, and the memory they share with us.
//
// Which processes we watch and which of their files are mapped here is by nature a fact about the whole process, so
// both are kept once per process and shared by all groups; entries go with their last user.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace chorale::transport::shm {

// A process id may be reused; with the time of its start it is unique.
struct ProcessId {
  int64_t pid = 0;
  uint64_t start_time = 0;  // in clock ticks since boot

  friend bool operator==(const ProcessId&, const ProcessId&) = default;
  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy 14 takes a 0 of its own making for a pointer
  friend auto operator<=>(const ProcessId&, const ProcessId&) = default;
};
const ProcessId& this_process();
// One that has ended, waited for or not, does not run; one that is stopped does.
bool is_running(const ProcessId& id);

// A memfd of some process. Memory files have no name; others open it through /proc while its owner lives.
struct SharedFile {
  ProcessId owner;
  int64_t descriptor = -1;
  uint64_t inode = 0;

  friend bool operator==(const SharedFile&, const SharedFile&) = default;
  // NOLINTNEXTLINE(modernize-use-nullptr): clang-tidy 14 takes a 0 of its own making for a pointer
  friend auto operator<=>(const SharedFile&, const SharedFile&) = default;
};
SharedFile shared_file(int descriptor);

class PeerProcess {
 public:
  // Throws CommError when there is no such process any more.
  static std::shared_ptr<PeerProcess> find(const ProcessId& id);
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  const ProcessId& id() const { return id_; }
  // A process that has ended but was not waited for by its parent does not live.
  bool alive() const;
  // The state in a word for messages: "running", "sleeping", "stopped by a signal", "stopped by a debugger", "gone".
  std::string condition() const;

 private:
  explicit PeerProcess(const ProcessId& id);
  const ProcessId id_;
  int descriptor_ = -1;
};

// A peer's memfd, mapped piece by piece on first use. Mappings stay until the last user of the file goes. What only
// reads a peer's memory has mappings, and a descriptor, that cannot write it.
enum class Access : uint8_t { kRead, kWrite };
class PeerMemory {
 public:
  static std::shared_ptr<PeerMemory> open(const SharedFile& file, Access access);
  ~PeerMemory();
  PeerMemory(const PeerMemory&) = delete;
  PeerMemory& operator=(const PeerMemory&) = delete;

  struct Extent {
    uint64_t begin = 0, end = 0;
    std::byte* base = nullptr;
    std::byte* at(uint64_t offset) const { return base + (offset - begin); }
    bool holds(uint64_t offset, size_t bytes) const {
      return offset >= begin && offset <= end && bytes <= end - offset;
    }
  };
  // A mapping that holds the stretch; the caller may keep it while it keeps this object. Throws CommError when the file
  // has no such stretch: the peer is not what it says it is.
  Extent map(uint64_t offset, size_t bytes);

 private:
  PeerMemory(const SharedFile& file, Access access, int descriptor)
      : file_(file), access_(access), descriptor_(descriptor) {}
  const SharedFile file_;
  const Access access_;
  const int descriptor_;
  std::mutex mutex_;
  std::vector<Extent> extents_;
};

// A memfd that is mapped whole and lives as long as somebody has it mapped. Ranks of one process share one mapping, so
// that an address means the same to all of them.
class Segment {
 public:
  static std::shared_ptr<Segment> create(size_t bytes);
  static std::shared_ptr<Segment> attach(const SharedFile& file, size_t bytes);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  const SharedFile& file() const { return file_; }

 private:
  Segment(const SharedFile& file, int descriptor, size_t bytes);
  const SharedFile file_;
  const int descriptor_;
  const size_t bytes_;
  std::byte* data_;
};

}  // namespace chorale::transport::shm
