// Remote references (spec/rpc-and-distributed-autograd.md, B5).
#include "chorale/rpc/rref.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <latch>
#include <thread>

#include "chorale/api/api.h"
#include "chorale/dist_autograd/context.h"
#include "chorale/rpc/agents_test_util.h"

namespace chorale::rpc {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using Kind = RpcErrorKind;

Tensor plus(const Tensor& a, const Tensor& b) { return add(a, b); }
Tensor ones_plus(double x) { return add(ones({2, 2}), x); }
Tensor sum_of_refs(const RRef<Tensor>& a, const RRef<Tensor>& b) { return add(a.to_here(), b.to_here()); }
Tensor ref_plus(const RRef<Tensor>& a, double x) { return add(a.to_here(), x); }
RRef<Tensor> ref_on(int64_t worker, double x) { return here().remote<ones_plus>(worker, x); }
std::vector<RRef<Tensor>> refs_on(int64_t worker) {
  return {here().remote<ones_plus>(worker, 1), here().remote<ones_plus>(worker, 2)};
}
Tensor nested_fetch(int64_t worker, double x) { return here().remote<ones_plus>(worker, x).to_here(); }
RRef<int64_t> local_ref(int64_t x) { return here().reference(x); }
RRef<int64_t> kept;  // by one worker at a time
void hold(const RRef<int64_t>& x) { kept = x; }
void let_go() { kept = {}; }
int64_t value_plus(const RRef<int64_t>& x, int64_t y) { return x.to_here() + y; }
std::vector<RRef<Tensor>> forward_chain(int64_t ttl, const RRef<Tensor>& rref) {
  Agent agent = here();
  if (ttl == 0) return {rref};
  return {agent.remote<ref_plus>(agent.info(), rref, 0)};
}
void raises() { throw StateError("expected error"); }
void sleeps(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }
bool confirmed(const RRef<Tensor>& a) { return a.is_confirmed(); }
ReferenceCounts counts_of() { return here().debug().references; }
std::vector<int64_t> numbers_here() {
  const ReferenceCounts c = counts_of();
  return {static_cast<int64_t>(c.owners), static_cast<int64_t>(c.forks), static_cast<int64_t>(c.pending_users)};
}

RRef<Tensor> late_ref(int64_t ms) {
  sleeps(ms);
  return here().reference(ones({2, 2}));
}
int64_t nobody_serves_this(const RRef<Tensor>& a, const RRef<Tensor>& b) { return a.id() == b.id() ? 1 : 0; }

int64_t takes_a_dtype(const RRef<Tensor>&, DType, const RRef<Tensor>&) { return 0; }

// An object that stays where it is.
class Counter {
 public:
  explicit Counter(int64_t start) : value_(start) {}
  int64_t add(int64_t x) { return value_ += x; }
  int64_t value() const { return value_; }
  Future<int64_t> later(int64_t x) { return here().call_async<&Counter::twice>(here().info(), x); }
  static int64_t twice(int64_t x) { return 2 * x; }
  Counter(const Counter&) = delete;
  Counter(Counter&&) = default;

 private:
  int64_t value_;
};

const std::vector<Served> kServes{remote<plus>,
                                  remote<ones_plus>,
                                  remote<sum_of_refs>,
                                  remote<ref_plus>,
                                  remote<ref_on>,
                                  remote<refs_on>,
                                  remote<nested_fetch>,
                                  remote<local_ref>,
                                  remote<value_plus>,
                                  remote<hold>,
                                  remote<let_go>,
                                  remote<forward_chain>,
                                  remote<raises>,
                                  remote<sleeps>,
                                  remote<confirmed>,
                                  remote<numbers_here>,
                                  remote<make<Counter, int64_t>>,
                                  remote<&Counter::add>,
                                  remote<&Counter::value>,
                                  remote<&Counter::later>,
                                  remote<&Counter::twice>,
                                  remote<late_ref>,
                                  remote<takes_a_dtype>};

std::vector<float> four(float x) { return std::vector<float>(4, x); }
std::vector<float> values(const Tensor& x) { return x.to_vector<float>(); }

// spec: test_builtin_remote_ret, test_builtin_remote_self, test_multi_builtin_remote_ret, test_py_udf_remote
// spec: test_multi_py_udf_remote, test_self_py_udf_remote
TEST(RRefs, StandForResults) {
  run_agents_in_any_order(4, for_tests(kServes), [](Agent& agent, comm::Group&) {
    for (const To& to : {To(next(agent)), To(agent.info())}) {
      EXPECT_EQ(values(agent.remote_op(to, "add", {ones({2, 2}), ones({2, 2})}).to_here()[0]), four(2));
      std::vector<RRef<Tensor>> all;
      all.reserve(10);
      for (int i = 0; i < 10; ++i) all.push_back(agent.remote<ones_plus>(to, i));
      for (int i = 0; i < 10; ++i)
        EXPECT_EQ(values(all[static_cast<size_t>(i)].to_here()), four(static_cast<float>(1 + i)));
    }
    const RRef<Tensor> own = agent.remote<ones_plus>(agent.info(), 4);
    EXPECT_EQ(values(own.local_value()), four(5));
    EXPECT_TRUE(own.is_owner());
    EXPECT_EQ(own.to_here().raw(), own.local_value().raw());
  });
}

// Where the value is, no message is sent, and in a context nothing is recorded.
TEST(RRefs, OfTheOwnWorkerAreReadWithoutAMessage) {
  run_agents(1, for_tests(kServes), [](Agent& agent, comm::Group&) {
    const Tensor x = set_requires_grad(ones({2, 2}));
    const RRef<Tensor> own = agent.reference(x);
    const int64_t before = agent.debug().requests;
    dist_autograd::Context context(agent);
    EXPECT_EQ(own.to_here().raw(), x.raw());
    EXPECT_EQ(own.to_here(std::chrono::nanoseconds(1)).raw(), x.raw());
    EXPECT_EQ(agent.debug().requests, before);
    context.backward({sum(mul(own.to_here(), 3))});
    EXPECT_EQ(values(context.gradient(x)), four(3));
    const auto state = static_cast<dist_autograd::Contexts&>(agent).get(context.id());
    EXPECT_TRUE(state->sends.empty() && state->receives.empty() && state->known.empty());
  });
}

// spec: test_self_remote_rref_as_rpc_arg, test_self_remote_rref_as_self_rpc_arg, test_self_remote_rref_as_remote_arg
// spec: test_self_remote_rref_as_self_remote_arg
TEST(RRefs, OfTheOwnWorkerCanBePassedOn) {
  run_agents_in_any_order(4, for_tests(kServes), [](Agent& agent, comm::Group&) {
    const RRef<Tensor> own = agent.remote<ones_plus>(agent.info(), 1);
    for (const To& to : {To(next(agent)), To(agent.info())}) {
      EXPECT_EQ(values(agent.call<ref_plus>(to, own, 10)), four(12));
      EXPECT_EQ(values(agent.remote<ref_plus>(to, own, 20).to_here()), four(22));
      EXPECT_EQ(values(agent.call_async<sum_of_refs>(to, own, own).wait()), four(4));
    }
  });
}

// spec: test_py_rref_args, test_py_rref_args_user_share, test_py_rpc_rref_args, test_remote_same_worker
TEST(RRefs, CanBeArgumentsForTheOwnerAndForOthers) {
  run_agents_in_any_order(4, for_tests(kServes), [](Agent& agent, comm::Group&) {
    const std::string owner = next(agent), third = next(agent, 2);
    const RRef<Tensor> a = agent.remote<ones_plus>(owner, 2), b = agent.remote<ones_plus>(owner, 1);
    EXPECT_EQ(values(agent.remote<sum_of_refs>(owner, a, b).to_here()), four(5));  // ones * 2 + 3
    const RRef<Tensor> c = agent.remote<ones_plus>(owner, 3), d = agent.remote<ones_plus>(owner, 7);
    EXPECT_EQ(values(agent.remote<sum_of_refs>(third, c, d).to_here()), four(12));  // ones * 2 + 10
    EXPECT_EQ(values(agent.call<sum_of_refs>(third, c, d)), four(12));
    EXPECT_EQ(values(agent.remote<ref_plus>(owner, a, 2).to_here()), four(5));  // ones + 4
  });
}

// spec: test_nested_remote, test_nested_rref, test_nested_rref_stress
TEST(RRefs, ComeBackFromOthers) {
  run_agents_in_any_order(4, for_tests(kServes), [](Agent& agent, comm::Group& group) {
    const int third = (group.rank() + 2) % 4;
    EXPECT_EQ(values(agent.call<nested_fetch>(next(agent), third, 3)), four(4));
    std::vector<RRef<std::vector<RRef<Tensor>>>> lists;
    lists.reserve(20);
    for (int i = 0; i < 20; ++i) lists.push_back(agent.remote<refs_on>(next(agent), third));
    for (const auto& list : lists) {
      const std::vector<RRef<Tensor>> two = list.to_here();
      ASSERT_EQ(two.size(), 2u);
      EXPECT_EQ(values(two[0].to_here()), four(2));
      EXPECT_EQ(values(two[1].to_here()), four(3));
      EXPECT_EQ(two[0].owner().id, third);
    }
  });
}

// spec: test_rpc_return_rref, test_return_local_rrefs, test_pass_local_rrefs, test_local_rref_no_fork
TEST(RRefs, ToLocalValuesAreReturnedAndPassed) {
  run_agents_in_any_order(4, for_tests(kServes), [](Agent& agent, comm::Group& group) {
    EXPECT_EQ(values(agent.call<ref_on>(next(agent), (group.rank() + 2) % 4, 3).to_here()), four(4));
    for (int64_t x : {1, 2, 3}) {
      const RRef<int64_t> there = agent.call<local_ref>(next(agent), x + 10);
      EXPECT_EQ(there.owner().name, next(agent));
      EXPECT_EQ(there.to_here(), x + 10);
    }
    const RRef<int64_t> own = agent.reference<int64_t>(80);
    EXPECT_EQ(agent.call<value_plus>(next(agent), own, 10), 90);
    EXPECT_EQ(agent.reference<int64_t>(35).local_value(), 35);
  });
}

TEST(RRefs, GoAroundTheRing) {
  run_agents_in_any_order(4, for_tests(kServes), [](Agent& agent, comm::Group& group) {
    RRef<Tensor> rref = agent.reference(add(ones({2, 2}), 1));
    for (int ttl = 8; ttl > 0; --ttl) {
      rref = agent.remote<forward_chain>((group.rank() + ttl) % 4, ttl, rref).to_here().at(0);
    }
    EXPECT_EQ(values(rref.to_here()), four(2));
  });
}

// spec: test_call_method_on_rref, test_py_class_constructor, test_py_class_instance_method, test_py_class_method
// spec: test_async_class_method
TEST(RRefs, MethodsOfTheirObjectsCanBeCalled) {
  run_agents_in_any_order(4, for_tests(kServes), [](Agent& agent, comm::Group&) {
    const RRef<Counter> counter = agent.remote<make<Counter, int64_t>>(next(agent), 10);
    agent.call<&Counter::add>(counter, 2);
    agent.call_async<&Counter::add>(counter, 5).wait();
    agent.remote<&Counter::add>(counter, 7).to_here();
    EXPECT_EQ(agent.call<&Counter::value>(counter), 24);
    EXPECT_EQ(agent.call<&Counter::later>(counter, 21), 42);
    static_assert(!Sendable<Counter>);
    text_of(Kind::kNotOwner, [&] { counter.local_value(); });
  });
}

// spec: test_remote_with_exception, test_remote_throw
TEST(RRefs, KeepTheErrorOfTheirFunction) {
  run_agents_in_any_order(4, for_tests(kServes), [](Agent& agent, comm::Group& group) {
    for (const int there : {(group.rank() + 1) % 4, group.rank()}) {
      const RRef<std::monostate> rref = agent.remote<raises>(there);
      for (int i = 0; i < 2; ++i) {
        EXPECT_THAT(text_of(Kind::kRemote, there, [&] { rref.to_here(); }), HasSubstr("expected error"));
      }
    }
  });
}

// spec: test_local_value_not_on_owner, test_rref_str
TEST(RRefs, SayWhoTheyAre) {
  run_agents(4, for_tests(kServes), [](Agent& agent, comm::Group& group) {
    const int there = (group.rank() + 1) % 4;
    const RRef<int64_t> own = agent.reference<int64_t>(1);
    const RRef<Tensor> user = agent.remote<ones_plus>(there, 1);
    const std::string id = concat("(created_on=", group.rank(), ", local_id=");
    EXPECT_EQ(concat(own), concat("OwnerRRef", id, "0)"));
    EXPECT_EQ(concat(user), concat("UserRRef", id, "1) fork ", id, "2)"));
    EXPECT_THAT(text_of(Kind::kNotOwner, there, [&] { user.local_value(); }),
                AllOf(HasSubstr(id + "1)"), HasSubstr(id + "2)"), HasSubstr(concat("worker", group.rank())),
                      HasSubstr(concat("worker", there))));
  });
}

// spec: test_owner_equality, test_rref_get_future
TEST(RRefs, KnowTheirOwnerAndWhenTheyAreMade) {
  run_agents(4, for_tests(kServes), [](Agent& agent, comm::Group&) {
    const RRef<Tensor> a = agent.remote<ones_plus>(next(agent), 1), b = agent.remote<ones_plus>(next(agent), 1),
                       c = agent.remote<ones_plus>(next(agent, 2), 1);
    EXPECT_EQ(a.owner(), b.owner());
    EXPECT_NE(a.owner(), c.owner());
    std::unordered_map<WorkerInfo, int> by_owner{{a.owner(), 1}};
    ++by_owner[b.owner()];
    ++by_owner[c.owner()];
    EXPECT_EQ(by_owner.size(), 2u);
    a.created().wait();
    EXPECT_TRUE(a.is_confirmed());
    agent.reference(1).created().wait();
  });
}

// spec: test_user_rrefs_confirmed, test_user_rrefs_confirmed_remote
TEST(RRefs, AreConfirmedBeforeAFunctionSeesThem) {
  run_agents_in_any_order(4, for_tests(kServes), [](Agent& agent, comm::Group&) {
    for (int i = 0; i < 5; ++i) {
      const RRef<Tensor> rref = agent.remote<ones_plus>(next(agent, 2), 1);
      EXPECT_TRUE(agent.call<confirmed>(next(agent), rref));
      EXPECT_TRUE(agent.remote<confirmed>(next(agent), rref).to_here());
    }
  });
}

// spec: test_rref_context_debug_info
TEST(RRefs, AreCounted) {
  run_agents(4, for_tests(kServes), [](Agent& agent, comm::Group& group) {
    const int there = (group.rank() + 1) % 4;
    const auto there_soon = [&](int64_t owners, int64_t forks) {
      expect_soon("the numbers there", [&] {
        return agent.call<numbers_here>(there) == std::vector<int64_t>{owners, forks, 0};
      });
    };
    const auto own = [&] { return agent.debug().references; };
    if (group.rank() == 0) {
      {
        const RRef<int64_t> local = agent.reference<int64_t>(3);
        EXPECT_EQ(own().owners, 0u);
        EXPECT_EQ(own().pending_users, 0u);
        agent.call<hold>(there, local);  // shared once
        EXPECT_EQ(own().owners, 1u);
        EXPECT_EQ(own().forks, 1u);
        EXPECT_EQ(own().pending_users, 0u);
        agent.call<let_go>(there);
      }
      expect_soon("nobody holds it", [&] { return own().owners == 0 && own().forks == 0; });
      there_soon(0, 0);
      {
        const RRef<Tensor> a = agent.remote<ones_plus>(there, 1), b = agent.remote<ones_plus>(there, 2);
        a.to_here();
        b.to_here();
        there_soon(2, 2);
        EXPECT_EQ(own().pending_users, 0u);
      }
      there_soon(0, 0);
    }
    agent.barrier();
  });
}

// spec: test_rref_leak, test_ignore_rref_leak
TEST(RRefs, ThatAreLeftAtTheEndAreReported) {
  for (bool check : {true, false}) {
    AgentOptions options = for_tests(kServes);
    options.check_leaks = check;
    options.delete_references = false;
    comm::run_ranks(4, [&](comm::Group& group) {
      Agent agent(group, options);
      const int before = (group.rank() + 3) % 4;
      const RRef<Tensor> held = agent.remote<ones_plus>(next(agent), 1);
      held.to_here();
      agent.barrier();
      if (check) {
        EXPECT_THAT(text_of(Kind::kReferenceLeak, group.rank(), [&] { agent.shutdown(); }),
                    AllOf(HasSubstr(concat("(created_on=", before, ", local_id=0)")),
                          HasSubstr(concat("held by worker ", before))));
      } else {
        agent.shutdown();
      }
      EXPECT_FALSE(agent.is_running());
    });
  }
}

struct Holder {
  std::shared_ptr<Holder> self;
  RRef<Tensor> rref;
};

// spec: test_non_garbage_collected_user_rref_due_to_local_circular_dependency, test_use_rref_after_shutdown
TEST(RRefs, AreDeletedAtShutdownEvenIfHeld) {
  comm::run_ranks(4, [&](comm::Group& group) {
    auto holder = std::make_shared<Holder>();
    holder->self = holder;  // nothing ever lets go of it
    Agent agent(group, for_tests(kServes));
    holder->rref = agent.remote<ones_plus>(next(agent), 1);
    EXPECT_EQ(values(holder->rref.to_here()), four(2));
    agent.shutdown();
    text_of(Kind::kReferenceDeleted, [&] { holder->rref.to_here(); });
    Writer writer(agent.core().get(), (group.rank() + 1) % 4);
    text_of(Kind::kReferenceDeleted, [&] { write(writer, holder->rref); });
    holder->self.reset();
  });
}

// spec: test_rref_timeout
TEST(RRefs, WhoseCallTakesTooLongHaveFailed) {
  AgentOptions options = for_tests(kServes);
  options.check_leaks = false;
  run_agents(4, options, [](Agent& agent, comm::Group& group) {
    const int there = (group.rank() + 1) % 4;
    const RRef<std::monostate> slow = agent.remote<sleeps>(To(there).within(10ms), 300);
    text_of(Kind::kTimeout, there, [&] { slow.created().wait(); });
    text_of(Kind::kReferenceFailed, there, [&] { slow.to_here(); });
    expect_soon("the owner has it all the same", [&] {
      return agent.call<numbers_here>(there) == std::vector<int64_t>{1, 1, 0};
    });
    agent.barrier();
  });
}

// spec: x_duplicate_control_messages
TEST(RRefs, ControlMessagesMayComeTwice) {
  AgentOptions options = for_tests(kServes);
  options.faults.repeat = {MessageKind::kForkRequest, MessageKind::kChildAccept, MessageKind::kUserDelete};
  run_agents_in_any_order(4, options, [](Agent& agent, comm::Group&) {
    for (int i = 0; i < 5; ++i) {
      const RRef<Tensor> a = agent.remote<ones_plus>(next(agent, 2), i);
      EXPECT_EQ(values(agent.call<ref_plus>(next(agent), a, 1)), four(static_cast<float>(2 + i)));
      EXPECT_EQ(values(agent.call<ref_plus>(next(agent, 2), a, 1)), four(static_cast<float>(2 + i)));
    }
    agent.barrier();
    expect_soon("nothing is left", [&] {
      const ReferenceCounts counts = agent.debug().references;
      return counts.owners == 0 && counts.forks == 0 && counts.pending_children == 0 && counts.pending_users == 0;
    });
  });
}

// spec: x_delete_before_create
TEST(RRefs, ThatAreDroppedBeforeTheyAreMadeLeaveNothing) {
  AgentOptions options = for_tests(kServes);
  options.faults.delay = {{MessageKind::kRemoteCall, 20ms}};
  const auto drop = [](Agent& agent) {
    for (int i = 0; i < 5; ++i) agent.remote<ones_plus>(next(agent), i);  // dropped at once
  };
  run_agents(4, options, [&](Agent& agent, comm::Group&) {
    drop(agent);
    EXPECT_EQ(agent.debug().references.users, 0u);
    agent.barrier();
    expect_soon("nothing is left", [&] {
      const ReferenceCounts counts = agent.debug().references;
      return counts.owners == 0 && counts.forks == 0 && counts.pending_users == 0;
    });
  });
  run_agents_in_any_order(4, for_tests(kServes), [&](Agent& agent, comm::Group&) { drop(agent); });
}

// What cannot be asked for is on no list.
TEST(RRefs, OfCallsThatCannotBeSentLeaveNothing) {
  run_agents(4, for_tests(kServes), [](Agent& agent, comm::Group& group) {
    for (const To& to : {To(next(agent)), To(agent.info())}) {
      EXPECT_THROW(agent.remote<value_plus>(to, RRef<int64_t>(), 1), InvalidArgument);
      EXPECT_THROW(agent.remote<ones_plus>(To(to).within(-1s), 1), InvalidArgument);
      EXPECT_THROW(agent.remote_op(To(to).within(-1s), "add", {ones({2}), ones({2})}), InvalidArgument);
    }
    const ReferenceCounts left = agent.debug().references;
    EXPECT_EQ(left.owners + left.forks + left.pending_users + left.pending_children, 0u);
    group.barrier().wait();
  });
}

// Neither among the arguments of a call that is refused, in whole or half way, nor in an answer that comes too late,
// nor in a call that could not be sent.
TEST(RRefs, ThatNobodyTookComeBack) {
  run_agents(3, for_tests(kServes), [](Agent& agent, comm::Group& group) {
    const auto no_dtype = static_cast<DType>(200);  // can be written, and not read
    const auto nothing_is_left = [&](const char* what) {
      expect_soon(what, [&] {
        const ReferenceCounts counts = agent.debug().references;
        return counts.owners == 0 && counts.forks == 0 && counts.pending_children == 0 && counts.pending_users == 0;
      });
      agent.barrier();
    };
    for (const To& to : {To(next(agent)), To(next(agent, 2)), To(agent.info())}) {
      {
        // A reference of another worker, which may be the one that is called, and one of this worker.
        const RRef<Tensor> user = agent.remote<ones_plus>(next(agent), 1), own = agent.reference(ones({2, 2}));
        text_of(Kind::kUnknownFunction, [&] { agent.call<nobody_serves_this>(to, user, own); });
        text_of(Kind::kUnknownFunction, [&] { agent.remote<nobody_serves_this>(to, own, user).to_here(); });
        text_of(Kind::kRemote, [&] { agent.call<takes_a_dtype>(to, user, no_dtype, own); });
        text_of(Kind::kRemote, [&] { agent.remote<takes_a_dtype>(to, own, no_dtype, user).to_here(); });
        EXPECT_EQ(values(agent.call<sum_of_refs>(to, user, own)), four(3));
        EXPECT_EQ(agent.debug().references.pending_children, 0u);
        Writer dropped(agent.core().get(), (group.rank() + 1) % 3);
        write(dropped, user);
        write(dropped, own);
      }
      agent.barrier();
      nothing_is_left("after calls that were refused");
    }
    text_of(Kind::kTimeout, [&] { agent.call<late_ref>(To(next(agent)).within(1ms), 50); });
    agent.barrier();
    nothing_is_left("after an answer that came too late");
  });
}

}  // namespace
}  // namespace chorale::rpc
