// How messages of an agent leave: at once or later, once or twice, or not at all if the faults say so; and the short
// way to the own worker.
#include "chorale/autograd/autograd.h"
#include "chorale/op/copy.h"
#include "chorale/rpc/core.h"

namespace chorale::rpc {

using namespace std::chrono_literals;

namespace {

// Copies of the tensors: their owner may write them before the message leaves.
void keep_values(Message& message) {
  const NoGrad quiet;
  const auto copy = [](const Tensor& x) {
    const Tensor own = clone(x);
    return requires_grad(x) ? set_requires_grad(own) : own;
  };
  for (Tensor& x : message.tensors) {
    x = x.is_sparse()
            ? Tensor::sparse_coo(clone(x.sparse().indices), copy(x.sparse().values), x.sizes(), x.sparse().coalesced)
            : copy(x);
  }
}

}  // namespace

void Core::send_later(std::chrono::nanoseconds delay, int to, Message message,
                      const std::function<void(Message)>& send) {
  if (to != own_) keep_values(message);
  ++delayed_;
  timer_.at(Deadline::Clock::now() + delay, [this, send, shared = std::make_shared<Message>(std::move(message))] {
    crew_->run([this, send, shared] {
      send(std::move(*shared));
      --delayed_;
      note_change();
    });
  });
}

std::chrono::nanoseconds Core::delay_of(MessageKind kind) {
  const Faults& faults = options_.faults;
  const auto found = faults.delay.find(kind);
  if (found != faults.delay.end()) return found->second;
  return faults.most_delay == 0ns ? 0ns
                                  : std::chrono::nanoseconds(draw() % static_cast<uint64_t>(faults.most_delay.count()));
}

// A number that follows from the seed of the faults, this worker and how many were drawn.
uint64_t Core::draw() {
  uint64_t x =
      options_.faults.seed + 0x9e3779b97f4a7c15 * (drawn_.fetch_add(1) * 256 + static_cast<uint64_t>(own_) + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

bool Core::fails_on_purpose(int to, const Message& message) {
  if (!options_.faults.fail.contains(message.kind)) return false;
  std::string key = concat(to, " ", name_of(message.kind), " ");
  key.append(reinterpret_cast<const char*>(message.payload.data()), message.payload.size());
  const std::lock_guard lock(mutex_);
  return failed_sends_[key]++ < options_.faults.times && (options_.faults.seed == 0 || draw() % 2 == 0);
}

void Core::send(int to, Message message, uint64_t id) {
  const Faults& faults = options_.faults;
  const bool twice = faults.repeat.contains(message.kind) && (faults.seed == 0 || draw() % 2 == 0);
  try {
    if (twice) deliver_again(to, message);
    deliver(to, std::move(message));
  } catch (const RpcError& error) {
    fail(id, error_of(error.kind(), to,
                      concat("[rpc] worker '", roster_.known(to).name, "' (", to, ") is gone: ", error.what())));
  } catch (const std::exception&) {
    fail(id, std::current_exception());
  }
}

void Core::deliver_again(int to, Message message) {
  const uint64_t most = 8 * static_cast<uint64_t>(options_.faults.most_delay.count());
  if (most == 0) return deliver(to, std::move(message));
  ++delayed_;
  timer_.at(Deadline::Clock::now() + std::chrono::nanoseconds(draw() % most),
            [this, to, shared = std::make_shared<Message>(std::move(message))] {
              crew_->run([this, to, shared] {
                try {
                  deliver(to, std::move(*shared));
                } catch (const RpcError&) {  // NOLINT(bugprone-empty-catch): its receiver has left
                }
                --delayed_;
                note_change();
              });
            });
}

// The short way: the same bytes, and no history.
void Core::stay_here(Message& message) {
  for (Tensor& x : message.tensors) {
    const Tensor& had = dist_autograd::differentiable(x);
    const Tensor bytes = had.alias();
    if (requires_grad(had)) set_requires_grad(bytes);
    x = x.is_sparse() ? Tensor::sparse_coo(x.sparse().indices, bytes, x.sizes(), x.sparse().coalesced) : bytes;
  }
}

void Core::record(Message& message, int to, bool forced) {
  const dist_autograd::Mark mark = contexts_.sending(message.tensors, to, forced);
  message.context = mark.context;
  message.hop = mark.hop;
}

void Core::deliver(int to, Message message) {
  if (to != own_) return post_.send(to, message);
  stay_here(message);
  Job job = sort({own_, std::move(message), {}});
  if (!job.task) return;
  if (job.is_short) {
    job.task();
  } else {
    crew_->run(std::move(job.task), job.chain);
  }
}

}  // namespace chorale::rpc
