#include "chorale/comm/device_calls.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include "chorale/base/error.h"
#include "chorale/base/log.h"
#include "chorale/comm/call_builder.h"
#include "chorale/device/peers.h"
#include "chorale/tensor/device_copy.h"

namespace chorale::comm {
namespace {

// Streams of groups that are gone: those live as long as the process.
struct IdleStreams {
  std::mutex mutex;
  std::vector<Stream> streams;
};
IdleStreams& idle_streams() {
  static auto* const all = new IdleStreams;
  return *all;
}
Stream take_stream(Device device) {
  IdleStreams& all = idle_streams();
  const std::lock_guard lock(all.mutex);
  const auto idle =
      std::find_if(all.streams.begin(), all.streams.end(), [&](const Stream& one) { return one.device == device; });
  if (idle == all.streams.end()) return make_stream(device);
  const Stream found = *idle;
  all.streams.erase(idle);
  return found;
}

void say_once(const std::string& text) {
  static std::mutex mutex;
  static auto* const said = new std::set<std::string>;
  const std::lock_guard lock(mutex);
  if (said->insert(text).second) log_info(text);
}

// What ranks tell each other when a group first meets a device.
struct Card {
  std::array<std::byte, 16> identity{};
  bool shares = false, has_library = false;
  std::array<char, 160> why{};  // it has no library
};

Card own_card(Device device) {
  Card card;
  // A rank that cannot answer must not leave the others waiting.
  try {
    if (PeerMemory* const memory = find_peer_memory(device.type)) {
      card.identity = memory->identity(device);
      card.shares = true;
    }
    DeviceCollectives* const library = find_collectives(device.type);
    if (!library) return card;
    card.identity = library->identity(device);
    const std::string why = library->why_not();
    card.has_library = why.empty();
    std::copy_n(why.data(), std::min(why.size(), card.why.size() - 1), card.why.data());
  } catch (const std::exception& error) {
    card.shares = card.has_library = false;
    const std::string_view why = error.what();
    std::copy_n(why.data(), std::min(why.size(), card.why.size() - 1), card.why.data());
  }
  return card;
}

// One behind the other on the host, a row for each rank.
Tensor host_row(size_t bytes) { return Tensor::empty({static_cast<int64_t>(bytes)}, DType::kU8); }
std::byte* row_bytes(const Tensor& row) { return static_cast<std::byte*>(row.raw()); }

// Memory of the device as a tensor of bytes.
Tensor seen_as_bytes(const void* data, size_t bytes, Device device) {
  const Shape sizes{static_cast<int64_t>(bytes)};
  return Tensor::on(Storage::wrap(const_cast<void*>(data), bytes, device), sizes, contiguous_strides(sizes), 0,
                    DType::kU8);
}

DeviceChunk on_device(const Chunk& chunk) { return {chunk.data, chunk.bytes}; }
std::vector<DeviceChunk> on_device(const SmallVector<Chunk, 2>& chunks) {
  std::vector<DeviceChunk> all;
  for (const Chunk& chunk : chunks) all.push_back(on_device(chunk));
  return all;
}

bool reduces(CallKind kind) {
  return kind == CallKind::kReduce || kind == CallKind::kAllReduce || kind == CallKind::kReduceScatter;
}

// Both sides must agree before the device is asked: it would wait for the rest.
void check_sizes(const Membership& who, int from, uint64_t given, size_t taken) {
  if (given == taken) return;
  throw CallFailed{
      concat("rank ", who.global(from), " gives ", given, " bytes where rank ", who.own_global(), " takes ", taken),
      who.global(from)};
}

}  // namespace

// ---- which way

GroupDevices::GroupDevices(const std::shared_ptr<GroupState>& state, Device device, std::chrono::milliseconds timeout)
    : device_(device), row_(host_row(sizeof(Card) * (static_cast<size_t>(state->size()) + 1))), engine_(state->engine) {
  const Card card = own_card(device);
  std::memcpy(row_bytes(row_), &card, sizeof(card));
  Operations* const collecting = std::exchange(state->collecting, nullptr);  // this call is not one of a scope
  CallBuilder call(state, CallKind::kAllGather, {.tag = 0, .timeout = timeout});
  call.set_dtype(DType::kU8);
  call.set_count(sizeof(Card));
  call.operation().traced = false;
  call.operation().keep.push_back(row_.storage());
  call.give({row_bytes(row_), sizeof(Card)});
  for (int r = 0; r < state->size(); ++r)
    call.take({row_bytes(row_) + sizeof(Card) * (static_cast<size_t>(r) + 1), sizeof(Card)});
  question_ = call.launch();
  state->collecting = collecting;
}

GroupDevices::~GroupDevices() {
  const auto engine = engine_.lock();
  if (comm_ && engine && engine->is_broken()) comm_->abort();
  comm_.reset();
  if (!stream_.handle) return;
  IdleStreams& all = idle_streams();
  const std::lock_guard lock(all.mutex);
  all.streams.push_back(stream_);
}

GroupDevices::Way GroupDevices::way(const std::shared_ptr<GroupState>& state) {
  if (answered_) return way_;
  question_.wait();
  answered_ = true;
  question_ = {};  // it holds the engine, which holds calls, which hold this
  decide(*state);
  if (way_ == Way::kHost) return way_;
  stream_ = take_stream(device_);
  if (way_ == Way::kShared) lent_ = std::make_unique<LentMemory>(device_, state->timeout);
  return way_;
}

void GroupDevices::decide(const GroupState& state) {
  const auto size = static_cast<size_t>(state.size());
  std::vector<Card> cards(size);
  std::memcpy(cards.data(), row_bytes(row_) + sizeof(Card), size * sizeof(Card));
  const auto all = [&](auto&& has) { return std::all_of(cards.begin(), cards.end(), has); };
  std::set<std::array<std::byte, 16>> different;
  for (const Card& card : cards) different.insert(card.identity);
  if (different.size() == 1 && size <= PeerMemory::kMostSources && state.engine->shares_host() &&
      all([](const Card& card) { return card.shares; })) {
    way_ = Way::kShared;
  } else if (different.size() == size) {
    if (all([](const Card& card) { return card.has_library; })) {
      way_ = Way::kBetween;
    } else if (state.rank() == 0) {
      say_why_not(state);
    }
  }
}

void GroupDevices::say_why_not(const GroupState& state) const {
  for (int r = 0; r < state.size(); ++r) {
    Card card;
    std::memcpy(&card, row_bytes(row_) + sizeof(Card) * (static_cast<size_t>(r) + 1), sizeof(card));
    if (card.has_library || card.why[0] == 0) continue;
    card.why.back() = 0;
    say_once(concat("calls between ranks with a ", type_name(device_.type), " each go through the host: rank ",
                    state.membership().global(r), " says: ", card.why.data()));
    return;
  }
}

void GroupDevices::abort() noexcept {
  if (comm_) comm_->abort();
}

DeviceCollectives::Id GroupDevices::make_id() {
  try {
    return find_collectives(device_.type)->make_id();
  } catch (const std::exception& error) {
    trouble_ = error.what();  // the call says so: then all ranks learn of it
    return {};
  }
}

void GroupDevices::begin(const Membership& who, const DeviceCollectives::Id& id) {
  try {
    if (trouble_.empty()) comm_ = find_collectives(device_.type)->begin(id, device_, who.rank, who.size());
  } catch (const std::exception& error) {
    trouble_ = error.what();
  }
}

DeviceComm& GroupDevices::comm(const Membership& who) {
  if (!comm_) throw CallFailed{trouble_, who.own_global()};
  return *comm_;
}

// ---- a call

DeviceCall::DeviceCall(const std::shared_ptr<GroupState>& state, const Operation& operation)
    : devices_(state->devices),
      who_(state->membership()),
      kind_(operation.kind),
      root_(operation.root),
      reduction_(operation.reduction),
      dtype_(operation.dtype) {}
DeviceCall::~DeviceCall() = default;

Chunk DeviceCall::chunk_of(const Tensor& tensor, bool read, bool written) {
  CHORALE_CHECK(tensor.device() == devices_->device(), "[", name_of(kind_), "] a tensor is on ", tensor.device(),
                ", the group's others on ", devices_->device(), ": a group uses one device of each rank");
  Tensor used = tensor;
  if (!tensor.is_contiguous()) {
    used = Tensor::empty(tensor.sizes(), tensor.dtype(), tensor.device());
    if (read) copy_between_devices(tensor, used);
    if (written) packed_.emplace_back(used, tensor);
    if (written) record_stream(tensor, devices_->stream());
  }
  // After a failure nobody waits for what the stream still does with it.
  record_stream(used, devices_->stream());
  keep_.push_back(used);
  return {static_cast<std::byte*>(used.raw()), static_cast<size_t>(used.elems()) * used.elem_bytes()};
}

void DeviceCall::tell(Operation& operation, std::span<const std::byte> own, size_t each) {
  give = std::exchange(operation.give, {});
  take = std::exchange(operation.take, {});
  const auto size = static_cast<size_t>(who_.size());
  sent_ = host_row(own.size());
  told_ = host_row(each * size);
  std::memcpy(row_bytes(sent_), own.data(), own.size());
  operation.kind = gives_one_chunk(kind_) ? CallKind::kAllGather : CallKind::kAllToAll;
  operation.dtype = DType::kU8;
  operation.reduction = Reduction{Reduce::kNone};
  operation.root = -1;
  for (size_t at = 0; at < own.size(); at += each) operation.give.push_back({row_bytes(sent_) + at, each});
  for (size_t r = 0; r < size; ++r) operation.take.push_back({row_bytes(told_) + r * each, each});
}

template <class T>
T DeviceCall::told_by(int rank) const {
  T told;
  std::memcpy(&told, row_bytes(told_) + static_cast<size_t>(rank) * sizeof(T), sizeof(T));
  return told;
}

void DeviceCall::unpack() const {
  const StreamScope scope(devices_->stream());
  for (const auto& [from, to] : packed_) copy_between_devices(from, to);
}

namespace {

// Note [Calls between devices]
class CallBetweenDevices final : public DeviceCall {
 public:
  using DeviceCall::DeviceCall;

  void seal(Operation& operation) override {
    begins_ = devices_->take_beginning();
    const size_t size = gives_one_chunk(kind_) ? 1 : static_cast<size_t>(who_.size());
    std::vector<uint64_t> sizes(size);
    for (size_t r = 0; r < std::min(size, operation.give.size()); ++r) sizes[r] = operation.give[r].bytes;
    operation.print.variant |= kOnDevice;
    if (begins_) {
      First first;
      if (who_.rank == 0) first.id = devices_->make_id();
      std::vector<First> all(size, first);
      for (size_t r = 0; r < size; ++r) all[r].bytes = sizes[r];
      tell(operation, std::as_bytes(std::span(all)), sizeof(First));
    } else {
      tell(operation, std::as_bytes(std::span(sizes)), sizeof(uint64_t));
    }
    ready_.record(current_stream(devices_->device()));
  }

  bool step() override {
    if (std::exchange(begins_, false)) {
      begun_ = true;
      devices_->begin(who_, told_by<First>(0).id);
    }
    DeviceComm& comm = devices_->comm(who_);
    if (stage_ == Stage::kPut && ended_.done()) return true;
    if (!comm.settled() || stage_ == Stage::kPut) return false;
    if (stage_ == Stage::kNew) {
      if (kind_ == CallKind::kAllToAll || kind_ == CallKind::kAllGather) {
        for (int r = 0; r < who_.size(); ++r)
          check_sizes(who_, r, begun_ ? told_by<First>(r).bytes : told_by<uint64_t>(r),
                      take[static_cast<size_t>(r)].bytes);
      }
      ready_.wait(devices_->stream());
      ask(comm, devices_->stream());
      stage_ = Stage::kAsked;
      if (!comm.settled()) return false;
    }
    unpack();
    ended_.record(devices_->stream());
    stage_ = Stage::kPut;
    return ended_.done();
  }
  void abandon() noexcept override { devices_->abort(); }
  bool has_begun() const override { return ready_.done(); }

 private:
  void ask(DeviceComm& comm, Stream stream) {
    const auto size = static_cast<size_t>(who_.size()), root = static_cast<size_t>(root_);
    const DeviceReduction how{dtype_, reduction_.op, reduction_.factor};
    switch (kind_) {
      case CallKind::kAllReduce:
        return comm.all_reduce(on_device(give[0]), on_device(take[0]), how, stream);
      case CallKind::kReduce:
        return comm.reduce(on_device(give[0]), take.empty() ? DeviceChunk{} : on_device(take[0]), root_, how, stream);
      case CallKind::kReduceScatter:
        return comm.reduce_scatter(on_device(give), on_device(take[0]), how, stream);
      case CallKind::kBroadcast:
        return comm.broadcast(on_device(give.empty() ? take[0] : give[0]), root_, stream);
      case CallKind::kAllGather:
        return comm.all_gather(on_device(give[0]), on_device(take), stream);
      case CallKind::kAllToAll:
        return comm.exchange(on_device(give), on_device(take), stream);
      case CallKind::kGather: {
        std::vector<DeviceChunk> gives(size), takes(size);
        gives[root] = on_device(give[0]);
        if (!take.empty()) takes = on_device(take);
        return comm.exchange(gives, takes, stream);
      }
      case CallKind::kScatter: {
        std::vector<DeviceChunk> gives(size), takes(size);
        takes[root] = on_device(take[0]);
        if (!give.empty()) gives = on_device(give);
        return comm.exchange(gives, takes, stream);
      }
      default:
        CHORALE_INVARIANT(false, name_of(kind_), " is no call between devices");
    }
  }

  // What the first call tells: with it the communicator begins.
  struct First {
    DeviceCollectives::Id id{};  // rank 0's
    uint64_t bytes = 0;
  };
  enum class Stage { kNew, kAsked, kPut };
  Stage stage_ = Stage::kNew;
  bool begins_ = false, begun_ = false;  // it is the first one; and that is behind it
  Event ready_, ended_;
};

// Note [Calls on a shared device]
class CallOnSharedDevice final : public DeviceCall {
 public:
  using DeviceCall::DeviceCall;

  void seal(Operation& operation) override {
    constexpr size_t kApart = 256;  // bytes: kernels read from such places
    const size_t count = gives_one_chunk(kind_) ? 1 : static_cast<size_t>(who_.size());
    std::vector<Place> places(count);
    size_t total = 0;
    for (size_t r = 0; r < std::min(count, operation.give.size()); ++r) {
      places[r].offset = total;
      places[r].bytes = operation.give[r].bytes;
      total += (operation.give[r].bytes + kApart - 1) / kApart * kApart;
    }
    const Device device = devices_->device();
    lent_ = devices_->lent().lend(total);
    for (size_t r = 0; r < count; ++r) {
      places[r].memory = lent_.memory;
      if (places[r].bytes == 0) continue;
      // NOLINTNEXTLINE(performance-no-int-to-ptr): an address that travelled
      void* const to = reinterpret_cast<void*>(lent_.memory.address + places[r].offset);
      copy_between_devices(seen_as_bytes(operation.give[r].data, places[r].bytes, device),
                           seen_as_bytes(to, places[r].bytes, device));
    }
    // Waits for this rank's own work, and for no other rank. What is written later may still be read by that work, too.
    synchronize(current_stream(device));
    operation.print.variant |= kOnDevice;
    tell(operation, std::as_bytes(std::span(places)), sizeof(Place));
  }

  bool step() override {
    const Stream stream = devices_->stream();
    {
      const StreamScope scope(stream);
      read(stream);
    }
    unpack();
    synchronize(stream);
    devices_->lent().note_done(lent_);
    return true;
  }
  bool has_begun() const override { return true; }
  void abandon() noexcept override {}

 private:
  struct Place {
    PeerHandle memory;
    uint64_t offset = 0, bytes = 0;
  };
  const std::byte* at(int rank, const Place& place) const {
    if (place.offset > place.memory.bytes || place.bytes > place.memory.bytes - place.offset)
      throw CallFailed{concat("rank ", who_.global(rank), " gives ", place.bytes, " bytes at ", place.offset, " of ",
                              place.memory.bytes),
                       who_.global(rank)};
    const void* const memory = find_peer_memory(devices_->device().type)->open(devices_->device(), place.memory);
    return static_cast<const std::byte*>(memory) + place.offset;
  }
  void copy_from(int rank, const Chunk& to) const {
    const auto place = told_by<Place>(rank);
    check_sizes(who_, rank, place.bytes, to.bytes);
    if (to.bytes == 0) return;
    copy_between_devices(seen_as_bytes(at(rank, place), to.bytes, devices_->device()),
                         seen_as_bytes(to.data, to.bytes, devices_->device()));
  }
  void read(Stream stream) const {
    if (take.empty()) return;
    if (!reduces(kind_)) {
      if (take.size() == 1) return copy_from(root_ >= 0 ? root_ : 0, take[0]);
      for (int r = 0; r < who_.size(); ++r) copy_from(r, take[static_cast<size_t>(r)]);
      return;
    }
    if (take[0].bytes == 0) return;
    std::vector<const void*> sources;
    for (int r = 0; r < who_.size(); ++r) {
      const auto place = told_by<Place>(r);
      check_sizes(who_, r, place.bytes, take[0].bytes);
      sources.push_back(at(r, place));
    }
    find_peer_memory(devices_->device().type)
        ->sum(sources, dtype_, reduction_.factor, reduction_.op == Reduce::kAverage ? who_.size() : 1, take[0].data,
              static_cast<int64_t>(take[0].bytes / size_of(dtype_)), stream);
  }

  LentMemory::Lent lent_;
};

}  // namespace

std::shared_ptr<DeviceCall> begin_device_call(const std::shared_ptr<GroupState>& state, const Operation& operation,
                                              const Tensor& first) {
  const Device device = first.device();
  // What follows is the same on all ranks, or the call is an error anyway.
  if (operation.is_message() || state->size() < 2 || state->context->checksum || first.is_traced() ||
      (!find_peer_memory(device.type) && !find_collectives(device.type)))
    return nullptr;
  if (!state->devices) {
    const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(operation.timeout);
    state->devices = std::make_shared<GroupDevices>(state, device, timeout);
    return nullptr;
  }
  const GroupDevices::Way way = state->devices->way(state);
  if (way == GroupDevices::Way::kHost || device.type != state->devices->device().type) return nullptr;
  const Reduction& reduction = operation.reduction;
  if (way == GroupDevices::Way::kBetween) {
    if (!reduces(operation.kind) ||
        find_collectives(device.type)->can({operation.dtype, reduction.op, reduction.factor}))
      return std::make_shared<CallBetweenDevices>(state, operation);
    if (state->rank() == 0)
      say_once(concat("calls that combine ", operation.dtype, " by ", name_of(reduction.op),
                      " go through the host: the library between devices of the kind ", type_name(device.type),
                      " has no such reduction"));
    return nullptr;
  }
  if (!reduces(operation.kind) ||
      (is_floating(operation.dtype) && (reduction.op == Reduce::kSum || reduction.op == Reduce::kAverage)))
    return std::make_shared<CallOnSharedDevice>(state, operation);
  return nullptr;
}

}  // namespace chorale::comm
