// Inside distributed autograd: the contexts of one worker, what is recorded in them, and backward.
//
// Note [Recording]
// A message that is sent inside a context and carries tensors that need gradients leaves a send node, behind the nodes
// of those tensors, and its receiver puts a receive node before them: one node, an output for each tensor. The function
// that a message calls runs in the same context, and so does what it calls; its answer is recorded the same way.
//
// Note [Fast backward]
// Every send node of a context gets its gradients exactly once. A worker expects all of them from the start; the first
// message of a backward starts its part and is answered when that, and all that follows from it, is done; later
// messages are answered at once. Gradients for the worker that is to get the answer travel with it, if there is nothing
// else to wait for: a hop there and back costs one round. A result that nobody uses sends nothing back, and its worker
// waits for ever.
//
// Note [Smart backward]
// The same, but no worker waits for gradients that will not come, in one of two ways.
//
// Accounted: each worker, as soon as it takes part, looks which of its receive nodes nothing leads to that may still
// get a gradient, and says so to the workers behind them; these withdraw the send node and look again. So every hop
// gets one message, as in the fast mode, and one that nobody uses costs a word instead of its gradients. It needs every
// worker that has received something to take part. A worker takes part when anybody that got something from it does, so
// this suffices: whoever has received something has sent something afterwards. (Otherwise take, of all hops that got no
// message, the one that was received last. Its receiver takes part, because of what it has sent later; all that could
// lead there was received later still, and is settled. So it gets its message.) The worker that opened a context knows
// whether that holds: the answer to a call says how many workers the callee knows of, itself included, that have
// received something last, and how many of its calls are not answered (Contexts::report()).
//
// Marked, where it does not hold, where an answer is missing, or where another worker begins: it asks first which
// gradients will come at all. From the roots it follows its graph to the receive nodes, marks these hops at the workers
// behind them, and so on; every mark is answered when all that follows from it is marked. Then the workers are told
// (settle) to expect the marked ones only: others are withdrawn. Marking looks at the graph alone, so the gradients are
// on their way meanwhile. Marks carry the number of the backward.
//
// Nothing that is withdrawn runs or is freed.
//
// Note [Ends of contexts]
// A context ends where it was opened; the workers that were called in it are told, and tell those that they have
// called. The word must not overtake a call, which would begin the context anew, for ever. So a worker is told when all
// calls to it are answered or have failed, and until then the context does not begin again here. An answer never begins
// one. When a worker dies, those that it opened end everywhere, and of the others each worker ends what nobody but the
// dead one had called it in: nobody else will say it.
#pragma once

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include "chorale/autograd/autograd.h"
#include "chorale/dist_autograd/courier.h"

namespace chorale::dist_autograd {

enum class Mode : uint8_t { kSmart, kFast };

class Contexts;
class Run;

struct Marking {
  uint64_t run = 0;
  std::set<uint64_t> sends{}, receives{};
  bool settled = false;
};

// What a worker knows of another that it has called in a context.
struct CalledWorker {
  int64_t in_flight = 0;            // calls that may yet reach it
  int64_t open = 0;                 // calls that it has not answered, those that failed among them
  uint64_t version = 0, loose = 0;  // its last report
};

// One context on one worker.
struct ContextState {
  explicit ContextState(uint64_t number) : id(number) {}
  const uint64_t id;
  std::atomic<bool> released{false};
  autograd::GradientMap gradients;

  std::mutex mutex;                                                         // of what follows
  std::map<uint64_t, base::Intrusive<autograd::Node>> sends{}, receives{};  // by hop
  // Send nodes that were differentiated without retain_graph: no backward expects them, but marks may still follow
  // them.
  std::map<uint64_t, base::Intrusive<autograd::Node>> differentiated{};
  std::set<int> known{};       // workers that have a part of it
  std::set<int> callers{};     // that have called this worker in it
  std::shared_ptr<Run> run{};  // the backward that is under way here
  uint64_t aborted = 0;        // the last one that failed
  uint64_t ended = 0;          // the last one that has ended here
  Marking marking{};
  // Note [Smart backward]
  std::map<int, CalledWorker> called{};
  bool is_loose = false;  // it has received something, and sent nothing since
  uint64_t version = 0;   // of what it would report
};

// What has a gradient: of a sparse tensor the values, otherwise the tensor itself.
inline const Tensor& differentiable(const Tensor& x) { return x.is_sparse() ? x.sparse().values : x; }

// Puts the thread into a context.
class Scope {
 public:
  // 0: into none.
  Scope(Contexts& contexts, uint64_t id);
  ~Scope();
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;
  uint64_t id() const { return id_; }
  static uint64_t current();

 private:
  uint64_t id_;
  Contexts* before_contexts_;
  uint64_t before_;
};

class Contexts {
 public:
  // Numbers begin behind `before`.
  Contexts(int worker, Courier& courier, Mode mode, uint64_t before = 0)
      : worker_(worker),
        courier_(courier),
        mode_(mode),
        next_context_(before + 1),
        next_hop_(before + 1),
        next_run_(before + 1) {}

  // ---- contexts

  uint64_t open();
  // Forgets it here and on all workers that have a part of it, but for one that has said so. False when there is none.
  bool close(uint64_t id, int said_by = -1);
  // A worker has ended, all of whose contexts have numbers of at most `last`.
  void forget_worker(int worker, uint64_t last = UINT64_MAX);
  // Null when there is none.
  std::shared_ptr<ContextState> find(uint64_t id) const;
  // RpcError (kUnknownContext) when there is none.
  std::shared_ptr<ContextState> get(uint64_t id) const;
  uint64_t most_id() const { return static_cast<uint64_t>(worker_) << 48 | ((uint64_t{1} << 48) - 1); }

  // ---- recording (Note [Recording])

  // What a message says that this thread is about to send. `forced`: it belongs to the thread's context even if no
  // tensor in it needs a gradient, because its answer may have some.
  Mark sending(const std::vector<Tensor>& tensors, int to, bool forced);
  // Gives the received tensors that require gradients their history. A request may begin the context on this worker.
  enum class Came : uint8_t { kRequest, kAnswer };
  void received(const Mark& mark, int from, const std::vector<Tensor>& tensors, Came as);
  // A request is about to be sent to a worker in a context. False: it has ended meanwhile.
  bool asked(uint64_t context, int whom);
  // What an answer says of this worker and of those that it has called; 0: nothing.
  uint64_t report(uint64_t context, int to);
  // The request was answered, and this is what its answer says; 0: it failed. Called once for each request.
  void answered(uint64_t context, int by, uint64_t report);

  // ---- backward

  void backward(uint64_t context, const std::vector<Tensor>& roots, bool retain_graph);
  // What other workers send.
  void came(int from, const Gradients& gradients, const Courier::Done& answer);
  void came(const Marks& marks, const Courier::Marked& answer);
  void came(int from, const Notice& notice);

  // Fails the backwards that are under way here.
  void fail_backwards(const std::exception_ptr& error);

  struct Counts {
    size_t contexts = 0, backwards = 0;
  };
  Counts counts() const;
  int worker() const { return worker_; }
  Courier& courier() { return courier_; }

 private:
  friend class Run;
  static constexpr size_t kShards = 64;  // a power of two
  struct Shard {
    mutable std::mutex mutex;
    std::unordered_map<uint64_t, std::shared_ptr<ContextState>> contexts;
    // Note [Ends of contexts]: those that have ended here, and the calls that are in flight in them, by worker.
    struct Ending {
      std::map<int, int64_t> in_flight;
      bool here_only = false;
    };
    std::unordered_map<uint64_t, Ending> ending;
  };
  const Shard& shard_of(uint64_t id) const { return shards_[id % kShards]; }
  Shard& shard_of(uint64_t id) { return shards_[id % kShards]; }
  bool end(uint64_t id, int said_by, bool here_only);
  // A worker will not say when this context ends.
  void lose_caller(ContextState& context, int worker);
  // Null when it has ended.
  std::shared_ptr<ContextState> get_or_begin(uint64_t id);
  std::vector<std::shared_ptr<ContextState>> all() const;
  void mark(const std::shared_ptr<ContextState>& context, uint64_t run, std::vector<autograd::Node*> from,
            const Courier::Marked& done);
  void settle(const std::shared_ptr<ContextState>& context, uint64_t run);
  bool is_accounted(const ContextState& context) const;  // with its lock
  void abort(const std::shared_ptr<ContextState>& context, uint64_t run);

  const int worker_;
  Courier& courier_;
  const Mode mode_;
  std::atomic<uint64_t> next_context_, next_hop_, next_run_;
  std::array<Shard, kShards> shards_;
  std::mutex gone_mutex_;
  std::map<int, uint64_t> gone_;  // workers, and the last number of their contexts
};

}  // namespace chorale::dist_autograd
