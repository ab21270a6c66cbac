// Streams of results; and what an agent shows of its calls: figures, traces, the last calls for `chorale flight`.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <csignal>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <semaphore>
#include <sstream>
#include <thread>

#include "chorale/rpc/context_test_util.h"
#include "chorale/rpc/figures.h"
#include "chorale/rpc/stream.h"
#include "chorale/trace/trace.h"

namespace chorale::rpc {
namespace {

using namespace std::chrono_literals;
using dist_autograd::Context;
using nlohmann::json;
using testing::HasSubstr;
using Kind = RpcErrorKind;

// ---- streams

std::atomic<int> bodies{0};
struct Counted {
  Counted() { ++bodies; }
  ~Counted() { --bodies; }
};

Stream<int64_t> count(int64_t from, int64_t to) {
  const Counted counted;
  for (int64_t i = from; i < to; ++i) co_yield i;
}
Stream<Tensor> powers(Tensor x, int64_t most) {
  Tensor power = x;
  for (int64_t i = 0; i < most; ++i) {
    co_yield power;
    power = mul(power, x);
  }
}
Stream<int64_t> fails_at(int64_t last) {
  for (int64_t i = 0;; ++i) {
    if (i == last) throw StateError("no more of this");
    co_yield i;
  }
}

std::vector<Served> streams() {
  std::vector<Served> all = stream_functions<count>();
  for (const auto& more : {stream_functions<powers>(), stream_functions<fails_at>()})
    all.insert(all.end(), more.begin(), more.end());
  return all;
}

TEST(Streams, GiveOneResultAfterTheOtherToEachOfTheirCallers) {
  run_agents(3, for_tests(streams()), [](Agent& agent, comm::Group& group) {
    const int64_t from = 100 * group.rank();
    for (const std::string& to : {next(agent), agent.info().name}) {
      RemoteStream<int64_t> numbers = stream<count>(agent, to, from, from + 50);
      RemoteStream<Tensor> tensors = stream<powers>(agent, to, full({2}, 2, DType::kF32), 3);
      for (int64_t i = 0; i < 50; ++i) ASSERT_EQ(numbers.next(), std::optional(from + i));
      EXPECT_EQ(numbers.next(), std::nullopt);
      EXPECT_EQ(numbers.next(), std::nullopt);
      for (const float expected : {2.0f, 4.0f, 8.0f})
        EXPECT_EQ(tensors.next()->to_vector<float>(), std::vector<float>(2, expected));
      EXPECT_EQ(tensors.next(), std::nullopt);
    }
  });
}

TEST(Streams, ThrowWhatTheirFunctionThrew) {
  run_agents(2, for_tests(streams()), [](Agent& agent, comm::Group& group) {
    RemoteStream<int64_t> numbers = stream<fails_at>(agent, next(agent), 2);
    EXPECT_EQ(numbers.next(), std::optional<int64_t>(0));
    EXPECT_EQ(numbers.next(), std::optional<int64_t>(1));
    EXPECT_THAT(text_of(Kind::kRemote, 1 - group.rank(), [&] { numbers.next(); }), HasSubstr("no more of this"));
    EXPECT_EQ(numbers.next(), std::nullopt);
  });
}

TEST(Streams, EndOnTheirWorkerWhenTheCallerLetsGo) {
  bodies = 0;
  run_agents(2, for_tests(streams()), [](Agent& agent, comm::Group&) {
    {
      RemoteStream<int64_t> numbers = stream<count>(agent, next(agent), 0, int64_t{1} << 40);
      EXPECT_EQ(numbers.next(), std::optional<int64_t>(0));
      EXPECT_GE(bodies, 1);
    }
    agent.barrier();
    expect_soon("no body is left", [] { return bodies == 0; });
    agent.barrier();
  });
}

// ---- what is seen of calls

int64_t add_ints(int64_t a, int64_t b) { return a + b; }
Tensor plus(const Tensor& a, const Tensor& b) { return add(a, b); }
void throws() { throw StateError("on purpose"); }
void sleeps(int64_t ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }
void ends_process() { raise(SIGKILL); }
std::binary_semaphore gate_of_observed(0);
void waits_at_gate() { gate_of_observed.acquire(); }
// A list at namespace scope may be made before other variables are: nothing in it waits for that.
constinit const Served kAddInts = remote<add_ints>;
const std::vector<Served> kObserved{kAddInts,
                                    remote<plus>,
                                    remote<throws>,
                                    remote<sleeps>,
                                    remote<ends_process>,
                                    remote<own_figures>,
                                    remote<waits_at_gate>};

TEST(Figures, CountCallsBytesAndTimeOfEachPair) {
  run_agents(3, for_tests(kObserved), [](Agent& agent, comm::Group& group) {
    const int there = (group.rank() + 1) % 3;
    const Tensor x = pattern({1000}, 1);
    for (int i = 0; i < 20; ++i) agent.call<plus>(there, x, x);
    agent.call<sleeps>(there, 30);
    text_of(Kind::kRemote, [&] { agent.call<throws>(there); });
    const Future<void> under_way = agent.call_async<sleeps>(there, 200);
    const std::vector<CallFigures> figures = agent.debug().calls;
    under_way.wait();
    ASSERT_EQ(figures.size(), 1u);
    EXPECT_EQ(figures[0].worker, there);
    EXPECT_EQ(figures[0].calls, 22);
    EXPECT_EQ(figures[0].failed, 1);
    EXPECT_EQ(figures[0].in_flight, 1);
    EXPECT_GE(figures[0].bytes_sent, 20 * 8000);
    EXPECT_LT(figures[0].bytes_sent, 20 * 8000 + 24 * 300);  // with names and types of functions
    EXPECT_GE(figures[0].bytes_received, 20 * 4000);
    EXPECT_GT(figures[0].p50_us, 0);
    EXPECT_LE(figures[0].p50_us, figures[0].p99_us);  // how much less depends on the machine
    EXPECT_GE(figures[0].p99_us, 29'000);
  });
}

TEST(Figures, BecomeLinesOfMetrics) {
  run_agents(2, for_tests(kObserved), [](Agent& agent, comm::Group& group) {
    const int there = 1 - group.rank();
    for (int i = 0; i < 3; ++i) agent.call<add_ints>(there, i, 2);
    const RRef<int64_t> kept = agent.remote<add_ints>(there, 1, 1);
    EXPECT_EQ(kept.to_here(), 2);
    agent.barrier();
    const WorkerFigures own = figures_of(agent), other = agent.call<own_figures>(there);
    EXPECT_EQ(own.name, agent.info().name);
    EXPECT_EQ(other.name, agent.info(there).name);
    for (const WorkerFigures& figures : {own, other}) {
      EXPECT_EQ(figures.owned_references, 1);
      EXPECT_EQ(figures.held_references, 1);
      ASSERT_EQ(figures.pairs.size(), 1u);
    }
    EXPECT_GE(other.served, 1);  // the call that asks
    std::istringstream lines(metrics_lines(own, 7, 1.5));
    std::string line;
    ASSERT_TRUE(std::getline(lines, line));
    const auto pair = nlohmann::json::parse(line);
    EXPECT_EQ(pair["kind"], "calls");
    EXPECT_EQ(pair["step"], 7);
    EXPECT_EQ(pair["from"], agent.info().name);
    EXPECT_EQ(pair["to"], agent.info(there).name);
    EXPECT_EQ(pair["calls"], 5);  // three, the remote one and its fetch
    EXPECT_GT(pair["p99_us"], 0);
    ASSERT_TRUE(std::getline(lines, line));
    const auto worker = nlohmann::json::parse(line);
    EXPECT_EQ(worker["kind"], "worker");
    EXPECT_EQ(worker["name"], agent.info().name);
    EXPECT_EQ(worker["owned_references"], 1);
    EXPECT_FALSE(std::getline(lines, line));
    agent.barrier();
  });
}

TEST(Flight, HasTheLastCallsOfAWorker) {
  run_agents(2, for_tests(kObserved), [](Agent& agent, comm::Group& group) {
    const int there = 1 - group.rank();
    agent.call<add_ints>(there, 1, 2);
    text_of(Kind::kRemote, [&] { agent.call<throws>(there); });
    const auto record = nlohmann::json::parse(agent.flight_record());
    EXPECT_EQ(record["format"], "chorale-flight-1");
    EXPECT_EQ(record["rank"], group.rank());
    const auto& calls = record["remote_calls"];
    ASSERT_EQ(calls.size(), 2u);
    EXPECT_THAT(calls[0]["function"].get<std::string>(), HasSubstr("add_ints"));
    EXPECT_EQ(calls[0]["state"], "done");
    EXPECT_EQ(calls[0]["to"], there);
    EXPECT_EQ(calls[1]["state"], "failed");
    for (int i = 0; i < 1500; ++i) agent.call<add_ints>(there, i, 2);
    const auto later = nlohmann::json::parse(agent.flight_record())["remote_calls"];
    EXPECT_EQ(later.size(), CallLog::kCalls);
    EXPECT_EQ(later.back()["number"], 1502);
  });
}

TEST(Flight, IsWrittenWhenAWorkerDiesInACall) {
  const std::vector<int> ends = run_agent_processes(2, for_tests(kObserved), [](Agent& agent, comm::Group& group) {
    if (group.rank() == 1) std::this_thread::sleep_for(60s);
    const std::string text = text_of(Kind::kConnection, 1, [&] { agent.call<ends_process>(1); });
    const std::string mark = "; the last calls: ";
    ASSERT_THAT(text, HasSubstr(mark));
    const std::filesystem::path path = text.substr(text.find(mark) + mark.size());
    EXPECT_GT(std::filesystem::file_size(path), 100u);
    std::filesystem::remove(path);
    agent.shutdown_now();
  });
  EXPECT_EQ(ends, (std::vector<int>{0, -SIGKILL}));
}

// spec: test_dist_autograd_profiling
TEST(Traces, HaveCallsAndTheirBackward) {
  trace::start();
  run_agents(4, for_tests(kObserved), [](Agent& agent, comm::Group& group) {
    if (group.rank() > 0) return;
    const Tensor x = wanting(pattern({3, 3}, 1)), y = wanting(pattern({3, 3}, 2));
    Context context(agent);
    context.backward({sum(agent.call<plus>(1, x, y))});
  });
  std::map<std::string, std::vector<trace::Event>> of_worker0;
  for (const trace::Event& event : trace::stop()) {
    if (event.rank == 0) of_worker0[event.name].push_back(event);
  }
  const auto time = [&](const std::string& name) {
    EXPECT_EQ(of_worker0[name].size(), 1u) << name;
    return of_worker0[name].empty() ? 0ns : of_worker0[name][0].end - of_worker0[name][0].start;
  };
  const auto backward = time("dist_autograd:backward");
  EXPECT_LT(time("dist_autograd:send"), backward);
  EXPECT_LT(time("dist_autograd:receive"), backward);
  EXPECT_GT(time("rpc:" + detail::function_name<plus>()), 0ns);
}

TEST(Traces, CountWhatIsQueuedAndWhichReferencesLive) {
  trace::start();
  // One thread: what comes while it runs something is queued.
  AgentOptions options = for_tests(kObserved);
  options.threads = options.most_threads = 1;
  std::atomic<const Agent*> other = nullptr;
  run_agents(2, options, [&](Agent& agent, comm::Group& group) {
    if (group.rank() == 1) {
      other = &agent;
      return agent.barrier();
    }
    const RRef<int64_t> kept = agent.remote<add_ints>(1, 1, 1);
    EXPECT_EQ(kept.to_here(), 2);
    const Future<void> under_way = agent.call_async<waits_at_gate>(1);
    const std::vector<Future<int64_t>> behind{agent.call_async<add_ints>(1, 1, 2), agent.call_async<add_ints>(1, 3, 4)};
    while (!other || other.load()->debug().queued < 2) std::this_thread::yield();
    gate_of_observed.release();
    EXPECT_EQ(wait_all(behind), (std::vector<int64_t>{3, 7}));
    under_way.wait();
    agent.barrier();
  });
  std::map<int, std::map<std::string, int64_t>> most;  // by rank
  json curves = json::array();
  const std::vector<trace::Event> events = trace::stop();
  for (const trace::Event& event : events) {
    if (event.kind != trace::Kind::kCounts) continue;
    EXPECT_EQ(event.name, "rpc");
    for (const auto& [name, count] : event.counts) most[event.rank][name] = std::max(most[event.rank][name], count);
  }
  EXPECT_EQ(most[0]["references held"], 1);
  EXPECT_EQ(most[0]["references owned"], 0);
  EXPECT_EQ(most[1]["references held"], 0);
  EXPECT_EQ(most[1]["references owned"], 1);
  EXPECT_EQ(most[1]["queued"], 2);
  const json timeline = json::parse(trace::chrome_json(events));
  for (const json& row : timeline["traceEvents"]) {
    if (row["ph"] == "C" && row["pid"] == 1) curves.push_back(row["args"]["references owned"]);
  }
  ASSERT_THAT(curves, testing::Contains(1));
  EXPECT_EQ(curves.back(), 0);  // the last word is that it is gone
}

}  // namespace
}  // namespace chorale::rpc
