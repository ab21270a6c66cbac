// Averages gradients over ranks while they are being computed: gradients that belong together travel in one bucket, and
// a bucket is reduced as soon as its last gradient is there. It knows no modules and no automatic differentiation; the
// owner of the gradients tells it when one is ready (GradientOwner, mark_ready).
//
// Note [Bucket order]
// Every rank reduces the same buckets in the same order, that of their indices, whatever the order in which gradients
// become ready: a bucket that is full early waits for those before it. Gradients become ready from the last layer to
// the first, so buckets are first numbered from the last parameter to the first, and after the first backward by the
// order that was seen on rank 0.
//
// Note [Sparse gradients]
// A gradient that is announced as sparse has a bucket of its own, without memory. How many entries there are differs
// from rank to rank and is told first, which makes its reduction a call that blocks: all of them come at the end of
// backward, in the order of their buckets, behind everything that overlaps it. The average is a sparse gradient on all
// ranks, also on those whose own was dense (a table used as a matrix too).
//
// Note [Elsewhere]
// The gradients of a backward may go elsewhere than usual (to a context of distributed autograd, of which there may be
// several). They are copied into the buckets and out of them then, because the usual ones, which may be views of the
// buckets, must stay as they are.
//
// Note [Owners]
// Gradients may have owners (ZeRO, stage 2): a rank keeps the averages of its own only. There is no memory of buckets
// then. The gradients of a bucket are reduced where backward left them, each to its owner, in one call, and all other
// ranks drop theirs. A bucket waits for the one before it, so that a rank has its averages and the gradients of two
// buckets. The sums follow the tree of an all-reduce: the bits are the same.
//
// Used by one thread at a time; the group belongs to it alone.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "chorale/comm/progress_thread.h"
#include "chorale/reducer/bucket_assignment.h"
#include "chorale/reducer/bucket_layout.h"
#include "chorale/reducer/grad_bucket.h"

namespace chorale::reducer {

// What happens to parameters that got no gradient in a backward.
enum class FindUnused : uint8_t {
  kAuto,  // they are found at the end of backward; buckets follow the order of gradients
  kOn,    // the same, but buckets stay as they are: for graphs that change from step to step
  kOff,   // it is an error at the next forward
};

// Which thread moves the reductions that are under way while backward computes.
enum class Progress : uint8_t {
  kAuto,    // kGroup between hosts, kHelper where every rank has a core to spare for it, else kCaller
  kCaller,  // backward's own thread, whenever it starts a further bucket, and at the end
  kHelper,  // a thread of its own
  kGroup,   // a thread that the group has anyway, between hosts; there the others are not needed, and not made
};

struct ReducerOptions {
  // Bytes after which a bucket is full; none: 1 MiB for the first, so that reducing starts early, and 25 MiB.
  std::optional<size_t> bucket_cap_bytes{};
  FindUnused find_unused = FindUnused::kAuto;
  // Gradients are views of the buckets: no second copy of them, and nothing to move.
  bool gradient_as_bucket_view = true;
  // The same parameters are used in the same way in every step.
  bool static_graph = false;
  // The dtype in which floating gradients are reduced, if not in their own.
  std::optional<DType> reduce_dtype{};
  Progress progress = Progress::kAuto;
};

struct GradientInfo {
  std::string name;
  Shape sizes;
  Strides strides;
  DType dtype = DType::kF32;
  // Note [Sparse gradients]
  bool sparse = false;
  Device device{};  // of the parameter; its bucket lies there, too
};

// Has the gradients. Indices are those of the list given to the reducer.
class GradientOwner {
 public:
  virtual ~GradientOwner() = default;
  // Undefined where there is none.
  virtual Tensor gradient(size_t index) = 0;
  virtual void set_gradient(size_t index, const Tensor& gradient) = 0;
  // Where a gradient is best written when there is none yet: into its bucket.
  virtual void set_destination(size_t index, const Tensor& view) = 0;
  // The gradient is the average now.
  virtual void complete(size_t index) = 0;
  // Called before a backward whose gradients go elsewhere (Note [Elsewhere]): a gradient that lies in `view` gets
  // memory of its own.
  virtual void move_out(size_t /*index*/, const Tensor& /*view*/) {}
};

class Reducer {
 public:
  using Clock = std::chrono::steady_clock;

  Reducer(comm::Group group, GradientOwner& owner, std::vector<GradientInfo> gradients, const ReducerOptions& options);
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  // ---- one step, in this order

  // Throws StateError, naming the gradients that never came, when the backward before did not finish.
  void check_finished() const;
  // Makes new buckets once, after a backward that told the order of gradients, as rank 0 would have them. True if it
  // did it.
  bool rebuild_if_due();
  // Whether the next backward is to be reduced; otherwise gradients only accumulate.
  void expect_backward(bool reduced) { expecting_ = reduced; }
  // True for the first call in a backward that is reduced; end_backward() must then be called at its end. `elsewhere`:
  // the owner's gradients are others than usual until then (Note [Elsewhere]).
  bool begin_backward(bool elsewhere = false);
  // Gradient `index` is there (with what was accumulated before).
  void mark_ready(size_t index);
  // Waits for all buckets, and completes the gradients. Where gradients are missing and that is not allowed, it leaves
  // the reduction unfinished.
  void end_backward();

  // ---- what else can be asked for

  // StateError for a second one, and where gradients are sparse; InvalidArgument for one that cannot be called.
  void set_hook(CommHook hook);
  const CommHook* hook() const { return hook_.run ? &hook_ : nullptr; }
  // Note [Owners]: a rank of the group for each gradient. Before the first step; not with a hook or sparse gradients.
  void set_owners(std::vector<int> owners);
  const std::vector<int>& owners() const { return owners_; }
  // The number by which sums are divided; none: the group's size.
  void set_divisor(std::optional<int> divisor) { divisor_ = divisor; }
  // What a rank without inputs does while others run a backward that is reduced: zeros for everything, through the
  // same hook. `wanted`: the averages become this rank's gradients, too, for an optimizer that updates a part of the
  // parameters here; otherwise its gradients stay as they are.
  void shadow_backward(bool wanted = false);
  // Forgets a reduction that did not finish, and goes on in another group.
  void set_group(comm::Group group);
  // StateError after training has begun; a second time it does nothing and returns false.
  bool set_static_graph();

  // ---- what it did

  const comm::Group& group() const { return group_; }
  const ReducerOptions& options() const { return options_; }
  const std::vector<GradientInfo>& gradients() const { return gradients_; }
  size_t bucket_count() const { return buckets_.size(); }
  std::span<const size_t> bucket(size_t index) const { return buckets_[index].parameters; }
  size_t bucket_bytes(size_t index) const;
  bool has_rebuilt() const { return rebuilt_; }
  // Which thread moves reductions; not kAuto.
  Progress progress() const { return progress_; }
  // The order of the last reduced backward that recorded it.
  const std::vector<size_t>& ready_order() const { return ready_order_; }
  // The number of ranks that have used each parameter, since the backward before that was reduced.
  std::vector<int32_t> used_map() const;
  // Parameters without gradient in the last backward.
  const std::vector<size_t>& unused() const { return last_unused_; }
  // The set of used parameters never changed.
  bool looks_static() const { return looks_static_; }
  int64_t reductions() const { return reductions_; }

  // When the last reduced backward and its communication began and ended, while times are recorded.
  struct Times {
    Clock::time_point backward_start, backward_end, comm_start, comm_end;
  };
  void record_times(bool wanted) { recording_times_ = wanted; }
  const Times& times() const { return times_; }

 private:
  struct Bucket {
    std::vector<size_t> parameters;
    Tensor buffer;               // flat, a part of an arena; the average where gradients are sparse
    std::vector<Tensor> views;   // of the buffer, in the shapes of the gradients
    size_t pending = 0;          // gradients that are not there yet
    std::vector<Tensor> sent{};  // to owners: what is on its way
    comm::Work work{};
    std::optional<comm::Future> future{};  // instead of the work, when there is a hook
    Clock::time_point launched{};          // for the trace
  };
  struct Place {
    size_t bucket = 0;
    Tensor view;                // in the bucket; where gradients have owners, the average until backward ends
    Tensor kept{};              // own average of the step before, until it is dropped
    bool is_gradient = true;    // the usual gradient itself is to be this view
    bool ready = false;         // in the bucket
    bool fired = false;         // in this backward
    bool used = false;          // since the last reduction
    uint32_t times = 0;         // static graph: how often it becomes ready in a backward,
    uint32_t times_so_far = 0;  // and did in this one
  };

  std::vector<size_t> limits(bool first) const;
  BucketLayout assign(std::span<const size_t> order) const;
  DType dtype_in_bucket(const GradientInfo& info) const;
  void make_buckets(const BucketLayout& layout);
  bool rebuilds() const;
  bool finds_unused() const;
  bool first_static_backward() const { return options_.static_graph && reductions_ == 0; }
  bool is_gradient(const Place& place) const { return place.is_gradient && !elsewhere_; }
  void put_into_bucket(size_t index);
  void arrived(size_t index);
  void mark_rest_unused();
  void launch_full_buckets();
  void launch(Bucket& bucket, size_t index);
  bool is_sparse(const Bucket& bucket) const { return gradients_[bucket.parameters[0]].sparse; }
  Tensor average_sparse(const Bucket& bucket, size_t index, const Tensor& own) const;
  comm::Future run_hook(const Bucket& bucket, size_t index, const Tensor& buffer);
  void wait_for(Bucket& bucket, size_t index);
  void note(Bucket& bucket, size_t index) const;
  bool is_own(size_t index) const { return owners_[index] == group_.rank(); }
  Tensor contribution(size_t index);
  void launch_to_owners(Bucket& bucket, size_t index, bool zeros = false);
  void end_to_owners(Bucket& bucket, size_t index);
  void take_from_owner(size_t index);
  void shadow_to_owners(bool wanted);
  void forget_kept();
  void launch_used_map();
  void finish();
  void take_out_of_bucket(size_t index);
  void start_over();
  void end_reduction();
  void forget_usage();
  void choose_progress();
  uint64_t tag(size_t part) const;
  double factor() const;
  std::string describe(std::span<const size_t> parameters) const;

  comm::Group group_;
  GradientOwner& owner_;
  const std::vector<GradientInfo> gradients_;
  ReducerOptions options_;
  CommHook hook_;
  std::vector<int> owners_;  // by gradient; empty: everybody keeps all
  int owner_count_ = 0;      // ranks of the group that they belong to
  std::optional<int> divisor_;

  BucketArenas arenas_;
  std::vector<Bucket> buckets_;
  std::vector<Place> places_;  // by parameter
  size_t next_ = 0;            // the bucket to be launched next
  size_t missing_ = 0;         // gradients that are not there yet
  bool expecting_ = false;     // the next backward is reduced
  bool running_ = false;       // a reduction has begun and is not finished
  bool elsewhere_ = false;     // in this backward: Note [Elsewhere]
  bool rebuilt_ = false;
  int64_t reductions_ = 0;  // finished ones, in this group

  std::vector<size_t> ready_order_;
  std::vector<size_t> last_unused_, before_unused_;
  bool looks_static_ = true;
  // Values of gradients that must survive if nobody used the parameter, although their bucket is reduced.
  std::vector<std::pair<size_t, Tensor>> preserved_;

  Tensor used_map_;  // i32, by parameter
  comm::Work used_work_;

  bool recording_times_ = false;
  Times times_;

  Progress progress_ = Progress::kCaller;
  std::unique_ptr<comm::ProgressThread> helper_;  // last: it ends before anything it moves
};

}  // namespace chorale::reducer
