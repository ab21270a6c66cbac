#include "chorale/comm/sim_collectives_test_util.h"

#include <condition_variable>
#include <cstring>
#include <functional>
#include <vector>

#include "chorale/base/error.h"
#include "chorale/device/runtime.h"
#include "chorale/device/sim/sim_device.h"
#include "chorale/vec/combine.h"

namespace chorale::comm {
namespace {

using Chunks = std::vector<DeviceChunk>;

std::byte* seen(const DeviceChunk& chunk) { return static_cast<std::byte*>(sim::open(chunk.data)); }

}  // namespace

// Where the devices of a communicator meet: each call in two rounds, before and after everybody has read.
struct SimCollectives::Meeting {
  std::mutex mutex;
  std::condition_variable changed;
  int size = 0, here = 0;
  std::map<int, std::vector<Chunks>> given;  // by call: what each rank gives
  std::map<int, int> came, left;             // by call
};

namespace {

class SimComm final : public DeviceComm {
 public:
  SimComm(SimCollectives& library, std::shared_ptr<SimCollectives::Meeting> meeting, int rank)
      : library_(library), meeting_(std::move(meeting)), rank_(rank), size_(static_cast<size_t>(meeting_->size)) {
    if (library_.script.no_init && rank == library_.script.rank) return;
    const std::lock_guard lock(meeting_->mutex);
    ++meeting_->here;
  }
  ~SimComm() override {
    if (!*aborted_) ++library_.ended;
  }

  bool settled() override {
    CHORALE_CHECK_STATE(!*aborted_, "the communicator was aborted");
    const auto& script = library_.script;
    CHORALE_CHECK_STATE(script.fails_at == 0 || rank_ != script.rank || calls_ < script.fails_at,
                        "an asynchronous error of the simulated library");
    const std::lock_guard lock(meeting_->mutex);
    return meeting_->here == meeting_->size;
  }
  void abort() noexcept override {
    const std::lock_guard lock(meeting_->mutex);
    if (!aborted_->exchange(true)) ++library_.aborted;
    meeting_->changed.notify_all();
  }

  void all_reduce(DeviceChunk in, DeviceChunk out, const DeviceReduction& how, Stream stream) override {
    put(stream, {in}, out, how, [](const Chunks& theirs) { return theirs[0]; });
  }
  void reduce(DeviceChunk in, DeviceChunk out, int root, const DeviceReduction& how, Stream stream) override {
    put(stream, {in}, rank_ == root ? out : DeviceChunk{}, how, [](const Chunks& theirs) { return theirs[0]; });
  }
  void reduce_scatter(std::span<const DeviceChunk> in, DeviceChunk out, const DeviceReduction& how,
                      Stream stream) override {
    put(stream, Chunks(in.begin(), in.end()), out, how,
        [rank = static_cast<size_t>(rank_)](const Chunks& theirs) { return theirs[rank]; });
  }
  void broadcast(DeviceChunk data, int root, Stream stream) override {
    Chunks takes(size_);
    if (rank_ != root) takes[static_cast<size_t>(root)] = data;
    move(stream, rank_ == root ? Chunks(size_, data) : Chunks(size_), takes);
  }
  void all_gather(DeviceChunk in, std::span<const DeviceChunk> out, Stream stream) override {
    move(stream, Chunks(size_, in), Chunks(out.begin(), out.end()));
  }
  void exchange(std::span<const DeviceChunk> give, std::span<const DeviceChunk> take, Stream stream) override {
    move(stream, Chunks(give.begin(), give.end()), Chunks(take.begin(), take.end()));
  }

 private:
  using Read = std::function<void(const std::vector<Chunks>& all, std::vector<std::byte>& result)>;
  using Write = std::function<void(const std::vector<std::byte>& result)>;

  void put(Stream stream, Chunks gives, DeviceChunk out, const DeviceReduction& how,
           const std::function<DeviceChunk(const Chunks&)>& of_me) {
    meet(
        stream, std::move(gives),
        [how, out, of_me](const std::vector<Chunks>& all, std::vector<std::byte>& result) {
          if (out.bytes == 0) return;
          result.resize(out.bytes);
          std::vector<const void*> sources;
          for (const Chunks& theirs : all) sources.push_back(seen(of_me(theirs)));
          void* const to = result.data();
          vec::combine(how.op, how.dtype, sources, {&to, 1}, static_cast<int64_t>(out.bytes / size_of(how.dtype)),
                       how.factor);
        },
        [out](const std::vector<std::byte>& result) {
          if (out.bytes > 0) std::memcpy(seen(out), result.data(), out.bytes);
        });
  }
  void move(Stream stream, Chunks gives, const Chunks& takes) {
    meet(
        stream, std::move(gives),
        [takes, rank = static_cast<size_t>(rank_)](const std::vector<Chunks>& all, std::vector<std::byte>& result) {
          for (size_t r = 0; r < takes.size(); ++r) {
            const DeviceChunk& given = all[r][rank];
            if (takes[r].bytes == 0) continue;
            const size_t at = result.size();
            result.resize(at + takes[r].bytes);
            std::memcpy(result.data() + at, seen(given), std::min(given.bytes, takes[r].bytes));
          }
        },
        [takes](const std::vector<std::byte>& result) {
          size_t at = 0;
          for (const DeviceChunk& take : takes) {
            if (take.bytes > 0) std::memcpy(seen(take), result.data() + at, take.bytes);
            at += take.bytes;
          }
        });
  }

  void meet(Stream stream, Chunks gives, Read read, Write write) {
    const int call = ++calls_;
    ++library_.calls;
    const auto& script = library_.script;
    const bool hangs = script.hangs_at == call && script.rank == rank_;
    sim::put(stream, [meeting = meeting_, aborted = aborted_, call, hangs, rank = rank_, gives = std::move(gives),
                      read = std::move(read), write = std::move(write)] {
      std::unique_lock lock(meeting->mutex);
      const auto everybody = [&](std::map<int, int>& counts) {
        meeting->changed.notify_all();
        meeting->changed.wait(lock, [&] { return *aborted || counts[call] == meeting->size; });
        return !*aborted;
      };
      if (hangs) meeting->changed.wait(lock, [&] { return aborted->load(); });
      if (*aborted) return;
      auto& given = meeting->given[call];
      given.resize(static_cast<size_t>(meeting->size));
      given[static_cast<size_t>(rank)] = gives;
      ++meeting->came[call];
      if (!everybody(meeting->came)) return;
      std::vector<std::byte> result;
      read(given, result);
      ++meeting->left[call];
      if (everybody(meeting->left)) write(result);
    });
  }

  SimCollectives& library_;
  const std::shared_ptr<SimCollectives::Meeting> meeting_;
  const int rank_;
  const size_t size_;
  int calls_ = 0;
  const std::shared_ptr<std::atomic<bool>> aborted_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace

std::array<std::byte, 16> SimCollectives::identity(Device device) {
  return {static_cast<std::byte>(device.index), std::byte{2}};
}
bool SimCollectives::can(const DeviceReduction& how) { return how.dtype != DType::kI16; }
DeviceCollectives::Id SimCollectives::make_id() {
  const std::lock_guard lock(mutex_);
  Id id{};
  ++last_id_;
  std::memcpy(id.data(), &last_id_, sizeof(last_id_));
  return id;
}
std::unique_ptr<DeviceComm> SimCollectives::begin(const Id& id, Device, int rank, int size) {
  CHORALE_CHECK_STATE(!script.refuses || rank != script.rank, "the simulated library does not begin");
  ++begun;
  const std::lock_guard lock(mutex_);
  auto& meeting = meetings_[id];
  if (!meeting) meeting = std::make_shared<Meeting>();
  {
    const std::lock_guard meeting_lock(meeting->mutex);
    meeting->size = size;
  }
  return std::make_unique<SimComm>(*this, meeting, rank);
}

std::array<std::byte, 16> SimPeers::identity(Device device) {
  return {static_cast<std::byte>(device.index), std::byte{1}};
}
PeerHandle SimPeers::make(Device device, size_t bytes) {
  ++made;
  const memory::Block block = runtime_of(device).allocator(device).allocate(bytes);
  return {1, reinterpret_cast<uint64_t>(block.data), bytes, {}};
}
const void* SimPeers::open(Device, const PeerHandle& handle) {
  ++opened;
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  return reinterpret_cast<const void*>(handle.address);
}
void SimPeers::sum(std::span<const void* const> sources, DType dtype, double factor, double divisor, void* out,
                   int64_t elems, Stream stream) {
  ++sums;
  sim::put(stream,
           [from = std::vector<const void*>(sources.begin(), sources.end()), dtype, factor, divisor, out, elems] {
             std::vector<const void*> seen_sources;
             seen_sources.reserve(from.size());
             for (const void* source : from) seen_sources.push_back(sim::open(source));
             void* const to = sim::open(out);
             vec::combine(divisor == 1 ? Reduce::kSum : Reduce::kAverage, dtype, seen_sources, {&to, 1}, elems, factor);
           });
}

}  // namespace chorale::comm
