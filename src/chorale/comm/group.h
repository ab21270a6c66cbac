// Ranks that work together: threads of one process, processes of one host, processes of several hosts. A Group is this
// rank's end of it.
//
// Rules that hold for all calls:
// - Every member makes the same calls in the same order, with equal arguments where they must be equal; otherwise all
//   get a CommError that names each rank's call.
// - Roots, sources and destinations are global ranks (those of the world), whatever the group.
// - A call returns a Work at once and is done when that is waited for. Calls of a group run in order.
// - On a rank outside the group calls do nothing and return an empty Work.
// - Tensors may have any strides; spans and tensors must be on the CPU. Sums follow Note [Order of sums] in
//   vec/combine.h: the same bits on all ranks, from run to run, for threads, processes and hosts.
// - Peers reduce tensors in place where the allocator's memory can be shared: in a process that a launcher started as
//   one of several ranks, or that called cpu_allocator().set_source(shared_pages()) before its first tensor. All other
//   memory is copied on the way.
// - After a failure the group is broken: every later call throws a CommError. Build a new one. (Parcels fail alone.)
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "chorale/comm/net/net_options.h"
#include "chorale/comm/work.h"
#include "chorale/transport/store/store.h"

namespace chorale::comm {

struct GroupOptions {
  // How long a call may take that names no deadline of its own. The default is CHORALE_TIMEOUT in seconds, else 30
  // minutes.
  std::optional<std::chrono::milliseconds> timeout = {};
  // Payloads are verified by their receivers, which costs time. The default is CHORALE_CHECKSUM, 0 or 1, else no.
  // Set for the world; its other groups do as it does.
  std::optional<bool> checksum = {};
  // Faults on purpose: a plan or a seed (transport/fabric/chaos.h). The default is CHORALE_CHAOS, else none. It belongs
  // to the world.
  std::optional<std::string> chaos = {};
  // What connects the hosts of the default group (transport/fabric/fabric_name.h); empty: CHORALE_FABRIC, else tls
  // between hosts.
  std::string fabric = {};
  // Used between hosts. Set for the world; its other groups do as it does.
  NetOptions net = {};
  // Where connect() makes a group that is a part of somebody else's job, the global ranks of its members, ascending.
  // Empty: 0, 1, …. Between hosts they stay 0, 1, …: a fabric knows its ranks by these.
  std::vector<int> members = {};
};

struct CallOptions {
  uint64_t tag = 0;                                  // part of the fingerprint, for callers that know more
  std::optional<std::chrono::milliseconds> timeout;  // of this call
};

struct ParcelOptions {
  std::optional<std::chrono::milliseconds> timeout = {};  // of this parcel; otherwise the group's
  uint64_t most_bytes = uint64_t{1} << 30;
};

inline constexpr int kAnySource = -1;

struct GroupState;
class P2POp;

class Group {
 public:
  Group() = default;  // of no rank: what a rank outside gets
  // Meets `size` ranks at the store under this name. The store may have seen meetings of this name before, also of
  // ranks that are gone: none is taken for another (transport/store/meeting.h). The group is of this process only: in a
  // forked child of it every call throws a StateError.
  static Group connect(transport::Store& store, const std::string& name, int rank, int size,
                       const GroupOptions& options = {});
  // A Group that was moved from is an error in every call but note_exception() and destroy(): as a group of no rank it
  // would leave sums out without a word. It may be assigned to.
  Group(Group&& other) noexcept
      : state_(std::move(other.state_)), moved_from_(std::exchange(other.moved_from_, true)) {}
  Group& operator=(Group&& other) noexcept {
    std::shared_ptr<GroupState> state = std::move(other.state_);
    moved_from_ = std::exchange(other.moved_from_, true);
    state_ = std::move(state);
    return *this;
  }
  // Leaves the group. Works that are still held keep it alive until they are done.
  ~Group() = default;
  void destroy() { state_.reset(); }

  bool is_member() const {
    if (moved_from_) [[unlikely]]
      raise_moved_from();
    return state_ != nullptr;
  }
  // -1 outside the group.
  int rank() const;
  int size() const;
  // Throws InvalidArgument outside the group.
  const std::string& name() const;
  std::string backend() const;
  const std::vector<int>& members() const;  // global ranks, ascending
  int global_rank(int group_rank) const;
  int group_rank(int global_rank) const;
  std::chrono::milliseconds timeout() const;
  // The number of the last collective that was started.
  int64_t sequence_number() const;
  // This rank throws, or has just caught, an exception with this text. Should it leave, end or keep the others waiting
  // before its next call, then their errors say so.
  void note_exception(const std::string& what) const;
  // True once a call has failed.
  bool is_broken() const;
  // True when all ranks are known to be on one host; over MPI only a rank alone is.
  bool is_on_one_host() const;
  // True when calls move on while all threads of the caller do something else; otherwise they move in waits and in
  // other calls of this rank, and a ProgressThread may help.
  bool moves_by_itself() const;
  // The last 1,000 calls of this rank as JSON text.
  std::string flight_record() const;

  // ---- groups out of this one. Every member of this group calls these, in the same order, also those that will not be
  // in the new one. Ranks are global.

  // Group ranks follow ascending global ranks, not the order of the list.
  Group new_group(std::vector<int> ranks, const GroupOptions& options = {}) const;
  // Consecutive groups of this many ranks.
  struct Subgroups {
    std::vector<Group> groups;  // in the same order on all ranks
    int own = -1;               // the one this rank is in; -1: none
  };
  Subgroups new_subgroups(int group_size, const GroupOptions& options = {}) const;
  Subgroups new_subgroups(const std::vector<std::vector<int>>& lists, const GroupOptions& options = {}) const;
  // The ranks that pass the same color.
  Group split(int64_t color, const GroupOptions& options = {}) const;
  Group duplicate(const GroupOptions& options = {}) const;

  // ---- collectives

  Work barrier(const CallOptions& options = {}) const;
  // Blocks. Rank 0 of the group finds out which ranks do not come in time and throws a CommError that names the lowest
  // such rank, or all of them with `wait_for_all` (each then has the full time). The others throw too.
  void monitored_barrier(std::chrono::milliseconds timeout, bool wait_for_all = false) const;

  Work broadcast(const Tensor& tensor, int root, const CallOptions& options = {}) const;
  // Only the root's tensor is defined afterwards.
  Work reduce(const Tensor& tensor, int root, Reduction reduction = {}, const CallOptions& options = {}) const;
  Work all_reduce(const Tensor& tensor, Reduction reduction = {}, const CallOptions& options = {}) const;
  template <class T>
  Work broadcast(std::span<T> data, int root, const CallOptions& options = {}) const {
    return broadcast_span(raw(data), root, options);
  }
  template <class T>
  Work all_reduce(std::span<T> data, Reduction reduction = {}, const CallOptions& options = {}) const {
    return all_reduce_span(raw(data), reduction, options);
  }

  // The sum of sparse tensors, coalesced; equal indices of several ranks add up. Blocks.
  Tensor sparse_all_reduce(const Tensor& tensor, const CallOptions& options = {}) const;

  // The result goes into one tensor per rank, whose sizes may differ, or into one tensor, chunk behind chunk.
  Work all_gather(const std::vector<Tensor>& outputs, const Tensor& input, const CallOptions& options = {}) const;
  Work all_gather_into(const Tensor& output, const Tensor& input, const CallOptions& options = {}) const;
  template <class T>
  Work all_gather_into(std::span<T> output, std::span<const T> input, const CallOptions& options = {}) const {
    return all_gather_spans(raw(output), raw(input), options);
  }
  // The root passes one output per rank, the others none.
  Work gather(const std::vector<Tensor>& outputs, const Tensor& input, int root = 0,
              const CallOptions& options = {}) const;
  Work scatter(const Tensor& output, const std::vector<Tensor>& inputs, int root = 0,
               const CallOptions& options = {}) const;
  Work reduce_scatter(const Tensor& output, const std::vector<Tensor>& inputs, Reduction reduction = {},
                      const CallOptions& options = {}) const;
  Work reduce_scatter_from(const Tensor& output, const Tensor& input, Reduction reduction = {},
                           const CallOptions& options = {}) const;
  Work all_to_all(const std::vector<Tensor>& outputs, const std::vector<Tensor>& inputs,
                  const CallOptions& options = {}) const;
  // Rows of dimension 0 are split: evenly, or as the lists say (one number per rank).
  Work all_to_all_single(const Tensor& output, const Tensor& input, std::span<const int64_t> output_splits = {},
                         std::span<const int64_t> input_splits = {}, const CallOptions& options = {}) const;

  // Several in one work.
  Work all_reduce_coalesced(const std::vector<Tensor>& tensors, Reduction reduction = {},
                            const CallOptions& options = {}) const;
  // outputs[i][r] gets rank r's inputs[i].
  Work all_gather_coalesced(const std::vector<std::vector<Tensor>>& outputs, const std::vector<Tensor>& inputs,
                            const CallOptions& options = {}) const;

  // ---- point-to-point

  // Blocking; to oneself is an InvalidArgument.
  void send(const Tensor& tensor, int destination, uint64_t tag = 0) const;
  // Returns the global rank of the sender; -1 outside the group.
  int recv(const Tensor& tensor, int source = kAnySource, uint64_t tag = 0) const;
  Work isend(const Tensor& tensor, int destination, uint64_t tag = 0, const CallOptions& options = {}) const;
  Work irecv(const Tensor& tensor, int source = kAnySource, uint64_t tag = 0, const CallOptions& options = {}) const;

  // Parcels: messages whose receiver knows neither their size nor, perhaps, their sender, and which fail alone: the
  // group goes on (Note [Parcels] in comm/message_queue.h). Several threads may send and receive at once. There are
  // none over MPI: InvalidArgument.

  // The bytes of a tensor, of at most most_bytes of options. Done when they are on their way. The work throws CommError
  // when the receiver is gone or does not take it in time.
  Work send_parcel(const Tensor& bytes, int destination, uint64_t tag = 0, const ParcelOptions& options = {}) const;
  // result() is one tensor of bytes (u8), source_rank() is its sender. The work throws CommError when nothing comes
  // in time, when something larger or damaged comes, and once for every rank that has gone (if `source` is one:
  // always).
  Work receive_parcel(int source = kAnySource, uint64_t tag = 0, const ParcelOptions& options = {}) const;

  const std::shared_ptr<Engine>& engine() const;

 private:
  friend class Coalescing;
  explicit Group(std::shared_ptr<GroupState> state) : state_(std::move(state)) {}

  struct Span {
    std::byte* data = nullptr;
    int64_t elems = 0;
    DType dtype = DType::kU8;
  };
  template <class T>
  static Span raw(std::span<T> data) {
    using Element = std::remove_const_t<T>;
    return {reinterpret_cast<std::byte*>(const_cast<Element*>(data.data())), static_cast<int64_t>(data.size()),
            dtype_of<Element>};
  }
  Work broadcast_span(Span data, int root, const CallOptions& options) const;
  Work all_reduce_span(Span data, Reduction reduction, const CallOptions& options) const;
  Work all_gather_spans(Span output, Span input, const CallOptions& options) const;
  Subgroups subgroups(const std::vector<std::vector<int>>& lists, const GroupOptions& options) const;
  [[noreturn]] static void raise_moved_from();
  // Throws InvalidArgument outside the group.
  const GroupState& member_state(const char* what) const;

  std::shared_ptr<GroupState> state_;
  bool moved_from_ = false;
};

// One message of a batch.
class P2POp {
 public:
  static P2POp send(const Group& group, const Tensor& tensor, int destination, uint64_t tag = 0) {
    return {CallKind::kSend, group, tensor, destination, tag};
  }
  static P2POp recv(const Group& group, const Tensor& tensor, int source, uint64_t tag = 0) {
    return {CallKind::kRecv, group, tensor, source, tag};
  }
  // Throws InvalidArgument for a kind that is not a message.
  P2POp(CallKind kind, const Group& group, const Tensor& tensor, int peer, uint64_t tag = 0);

 private:
  friend std::vector<Work> batch_isend_irecv(const std::vector<P2POp>& operations);
  CallKind kind_;
  const Group* group_;
  Tensor tensor_;
  int peer_;
  uint64_t tag_;
};
// Starts all of them; one work each. All must be of one group, and there must be at least one.
std::vector<Work> batch_isend_irecv(const std::vector<P2POp>& operations);

}  // namespace chorale::comm
