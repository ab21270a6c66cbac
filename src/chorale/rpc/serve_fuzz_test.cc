// What an agent does with the requests of others: whatever is in them, they are answered.
#include <algorithm>

#include "chorale/api/api.h"
#include "chorale/rpc/agent.h"
#include "chorale/rpc/core.h"
#include "chorale/testing/fuzz_test_util.h"
#include "chorale/transport/store/memory_store.h"

namespace chorale::rpc {
namespace {

using Kind = MessageKind;

int64_t total(const std::vector<int64_t>& numbers, const std::map<std::string, Tensor>& tensors,
              const RRef<Tensor>& x) {
  return static_cast<int64_t>(numbers.size() + tensors.size()) + x.owner().id;
}
Tensor doubled(const Tensor& x) { return add(x, x); }

// One worker, which asks itself.
struct Alone {
  Alone() {
    transport::MemoryStore store;
    agent.emplace(comm::Group::connect(store, "fuzz", 0, 1),
                  AgentOptions{.serves = {remote<total>, remote<doubled>}, .threads = 2, .most_threads = 2});
  }
  ~Alone() { agent->shutdown_now(); }
  std::optional<Agent> agent;
};
Agent& agent() {
  static Alone alone;
  return *alone.agent;
}

// A kind, and what comes behind it.
std::string seed(Kind kind, const std::function<void(Writer&)>& fill) {
  Writer writer(agent().core().get(), 0);
  fill(writer);
  std::string text(1, static_cast<char>(kind));
  text.append(reinterpret_cast<const char*>(writer.payload.data()), writer.payload.size());
  return text;
}

template <auto F>
void name_of_function(Writer& writer) {
  write(writer, detail::function_name<F>());
  write(writer, detail::signature_of<decltype(F)>());
}

std::vector<std::string> seeds() {
  const auto numbers = [](size_t count) {
    return [count](Writer& writer) {
      for (size_t i = 0; i < count; ++i) writer.number<uint64_t>(i + 1);
    };
  };
  const auto gradients = [](Writer& writer) {
    for (const uint64_t number : {1, 2, 3}) writer.number(number);
    write(writer, true);
    write(writer, false);
    write(writer, std::vector<Tensor>{});
    write(writer, std::vector<uint64_t>{4, 5});
  };
  const auto marks = [](Writer& writer) {
    writer.number<uint64_t>(1);
    writer.number<uint64_t>(2);
    write(writer, std::vector<uint64_t>{4, 5});
  };
  const auto notice = [](Writer& writer) {
    writer.number<uint64_t>(1);
    writer.number<uint64_t>(2);
    write(writer, true);
  };
  return {seed(Kind::kCall,
               [](Writer& writer) {
                 name_of_function<total>(writer);
                 write(writer, std::vector<int64_t>{1, 2, 3});
                 write(writer, std::map<std::string, Tensor>{{"none", {}}});
                 // A reference: owner, parent, its number and that of the fork, its type.
                 write(writer, ForkData{0, 0, 7, 8, value_type<Tensor>().name});
               }),
          seed(Kind::kRemoteCall,
               [](Writer& writer) {
                 writer.number<uint64_t>(1);
                 writer.number<uint64_t>(2);
                 name_of_function<doubled>(writer);
                 write(writer, Tensor());
               }),
          seed(Kind::kOp,
               [](Writer& writer) {
                 write<std::string>(writer, "add");
                 write(writer, std::vector<Tensor>{{}, {}});
               }),
          seed(Kind::kFetch,
               [](Writer& writer) {
                 writer.number<uint64_t>(1);
                 write(writer, value_type<Tensor>().name);
               }),
          seed(Kind::kGather,
               [](Writer& writer) {
                 write<std::string>(writer, "worker0/0");
                 writer.number<uint64_t>(2);
               }),
          seed(Kind::kRefBackward,
               [](Writer& writer) {
                 writer.number<uint64_t>(1);
                 writer.number<uint64_t>(2);
                 write(writer, true);
               }),
          seed(Kind::kUserDelete, numbers(2)),
          seed(Kind::kForkRequest, numbers(2)),
          seed(Kind::kChildAccept, numbers(1)),
          seed(Kind::kType, numbers(1)),
          seed(Kind::kHello, numbers(0)),
          seed(Kind::kLeave, numbers(0)),
          seed(Kind::kGradient, gradients),
          seed(Kind::kMark, marks),
          seed(Kind::kSettle, notice),
          seed(Kind::kAbort, notice),
          seed(Kind::kCleanup, notice)};
}

// These wait for something that may never be.
bool may_wait(Kind kind) {
  return kind == Kind::kFetch || kind == Kind::kType || kind == Kind::kRefBackward || kind == Kind::kGather;
}

CHORALE_FUZZ(RpcRequests, seeds()) {
  if (input.empty() || static_cast<uint8_t>(input[0]) >= kMessageKinds ||
      !is_request(Kind{static_cast<uint8_t>(input[0])}))
    return;
  const auto kind = Kind{static_cast<uint8_t>(input[0])};
  Message message{.kind = kind};
  const auto* bytes = reinterpret_cast<const std::byte*>(input.data());
  message.payload.resize(input.size() - 1);
  std::copy(bytes + 1, bytes + input.size(), reinterpret_cast<std::byte*>(message.payload.data()));
  Core& core = *agent().core();
  Future<void> answered(std::make_shared<Future<void>::State>(core.helper()));
  const auto done = [answered](const std::exception_ptr&) { answered.state()->try_set({}); };
  if (is_control(kind)) {
    core.send_control(0, std::move(message), done);
  } else {
    core.request(0, std::move(message), {.timeout = Timeout(0)},
                 [done](const Message&, const std::exception_ptr& error) { done(error); });
  }
  if (!may_wait(kind)) answered.wait(within(std::chrono::seconds(20)));
}

}  // namespace
}  // namespace chorale::rpc
