// What distributed autograd sends, and the courier that carries it. This layer knows no wire; rpc implements the
// courier.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <vector>

#include "chorale/base/deadline.h"
#include "chorale/tensor/tensor.h"

namespace chorale::dist_autograd {

// Which nodes a message between workers makes: tensors that need gradients leave one worker through a send node and
// enter the other through a receive node, both under the number of the hop.
struct Mark {
  uint64_t context = 0;  // 0: the message belongs to none
  uint64_t hop = 0;      // 0: no tensor in it needs a gradient
};

// The gradients of the tensors of one hop, on their way back.
struct Gradients {
  uint64_t context = 0, run = 0;
  uint64_t hop = 0;  // 0: none
  bool retain_graph = false;
  bool accounted = false;  // Note [Smart backward]
  std::vector<Tensor> tensors{};
  std::vector<uint64_t> absent{};  // hops that get none
};

// The gradients of one hop that travel with an answer, which says the rest; without tensors the hop gets none.
struct ReturnedGradients {
  uint64_t hop = 0;
  std::vector<Tensor> tensors{};
};

// Note [Smart backward]: hops over which gradients will come back.
struct Marks {
  uint64_t context = 0, run = 0;
  std::vector<uint64_t> hops{};
};

struct Notice {
  enum class Kind : uint8_t { kSettle, kAbort, kCleanup };
  Kind kind = Kind::kCleanup;
  uint64_t context = 0, run = 0;
  bool here_only = false;  // of kCleanup: it has not ended where it was opened, as far as the sender knows
};

// Something that a thread waits for.
class Latch {
 public:
  virtual ~Latch() = default;
  virtual void open() = 0;
  // False when the deadline has passed.
  virtual bool wait(Deadline deadline) = 0;
};

class Courier {
 public:
  using Done = std::function<void(std::vector<ReturnedGradients> gradients, const std::exception_ptr& error)>;
  using Marked = std::function<void(const std::vector<int>& workers, const std::exception_ptr& error)>;

  // The answer comes when the other worker has taken them, or is done with its part of the backward; it may have
  // gradients for this one.
  virtual void send(int to, Gradients gradients, Done done) = 0;
  // The answer says which workers were reached.
  virtual void send(int to, Marks marks, Marked done) = 0;
  virtual void send(int to, Notice notice) = 0;
  virtual std::unique_ptr<Latch> make_latch() = 0;

 protected:
  ~Courier() = default;
};

}  // namespace chorale::dist_autograd
