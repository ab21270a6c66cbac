#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <immintrin.h>
#include <netinet/tcp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <optional>
#include <thread>

#include "chorale/api/api.h"
#include "chorale/app/bench/bench.h"
#include "chorale/app/bench/rpc.h"
#include "chorale/base/parallel_for.h"
#include "chorale/dist_autograd/context.h"
#include "chorale/rpc/agent.h"
#include "chorale/transport/store/file_store.h"

namespace chorale::app {

const std::vector<RpcCase>& rpc_cases() {
  static const std::vector<RpcCase> cases{
      {"call/add/4", 4, 12, 1, 25, 504},
      {"call/add/4096", 4096, 3 * 4096, 1, 25, 467},
      {"call/add/1048576", 1 << 20, 3 << 20, 1, 5, 909},
      {"call/add/67108864", 64 << 20, 3 * (64 << 20), 1, 5, 177'000},
      {"remote/fetch/4096", 4096, 3 * 4096, 2, 25, 878},
      {"calls/64 in flight/4096", 4096, 3 * 4096, 0, 60, 373},
      {"autograd/hop/4096", 4096, 5 * 4096, 2, 25, 1084},
      {"server/round/1048576", 1 << 20, 2 << 20, 2, 5, 1076},
  };
  return cases;
}

namespace {

using BenchClock = std::chrono::steady_clock;

Tensor add_two(const Tensor& x, const Tensor& y) { return add(x, y); }
Tensor& served_weights() {
  static Tensor weights = ones({1 << 18});
  return weights;
}
Tensor fetch_weights() { return served_weights(); }
void push_gradient(const Tensor& gradient) {
  const NoGrad quiet;
  sub_(served_weights(), gradient, 0.1);
}

struct Times {
  double p50 = 0, p99 = 0;
};

double since(BenchClock::time_point start) {
  return std::chrono::duration<double, std::micro>(BenchClock::now() - start).count();
}

Times timed(const std::function<void()>& call, double seconds) {
  for (int i = 0; i < 3; ++i) call();
  std::vector<double> us;
  const auto end = BenchClock::now() + std::chrono::duration<double>(seconds);
  while (us.size() < 10 || (BenchClock::now() < end && us.size() < 20'000)) {
    const auto start = BenchClock::now();
    call();
    us.push_back(since(start));
  }
  std::sort(us.begin(), us.end());
  return {us[us.size() / 2], us[us.size() * 99 / 100]};
}

std::function<void()> prepare_rpc_case(const RpcCase& c, rpc::Agent& agent) {
  const std::string name = c.name;
  const auto x = ones({c.bytes / 4}), y = ones({c.bytes / 4});
  if (name.starts_with("call/add")) return [=, &agent] { agent.call<add_two>(1, x, y); };
  if (name.starts_with("remote/fetch")) return [=, &agent] { agent.remote<add_two>(1, x, y).to_here(); };
  if (name.starts_with("calls/64")) {
    return [=, &agent] {
      std::vector<rpc::Future<Tensor>> all;
      all.reserve(64);
      for (int i = 0; i < 64; ++i) all.push_back(agent.call_async<add_two>(1, x, y));
      for (const auto& one : all) one.wait();
    };
  }
  if (name.starts_with("autograd/hop")) {
    return [n = c.bytes / 4, &agent] {
      dist_autograd::Context context(agent);
      const Tensor a = set_requires_grad(ones({n})), b = set_requires_grad(ones({n}));
      context.backward({sum(agent.call<add_two>(1, a, b))});
      context.gradients();
    };
  }
  return [&agent] { agent.call<push_gradient>(1, agent.call<fetch_weights>(1)); };
}

// ---- floors

// A cache line that two processes hand to and fro.
class SharedLine {
 public:
  explicit SharedLine(const std::string& path) {
    const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHORALE_CHECK_STATE(file >= 0 && ftruncate(file, 4096) == 0, "[bench] cannot make ", path);
    void* const memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    CHORALE_CHECK_STATE(memory != MAP_FAILED, "[bench] cannot map ", path);
    turn_ = static_cast<std::atomic<uint32_t>*>(memory);
  }
  ~SharedLine() { munmap(turn_, 4096); }
  SharedLine(const SharedLine&) = delete;
  SharedLine& operator=(const SharedLine&) = delete;
  // Microseconds there and back.
  double trip(int rank) {
    constexpr uint32_t kTrips = 20'000;
    const auto start = BenchClock::now();
    for (uint32_t i = 0; i < kTrips; ++i) {
      while (turn_->load(std::memory_order_acquire) != 2 * i + static_cast<uint32_t>(rank)) _mm_pause();
      turn_->store(2 * i + static_cast<uint32_t>(rank) + 1, std::memory_order_release);
    }
    return since(start) / kTrips;
  }

 private:
  std::atomic<uint32_t>* turn_ = nullptr;
};

// A bare connection between two hosts.
double socket_trip(const RpcRank& options) {
  constexpr uint16_t kPort = 29514;
  constexpr int kTrips = 2000;
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_port = htons(kPort);
  CHORALE_CHECK(inet_pton(AF_INET, options.address.c_str(), &place.sin_addr) == 1,
                "[bench] no address: ", options.address);
  int connection = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  if (options.rank == 0) {
    const int listener = connection;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    CHORALE_CHECK_STATE(
        bind(listener, reinterpret_cast<sockaddr*>(&place), sizeof place) == 0 && listen(listener, 1) == 0,
        "[bench] cannot listen on ", options.address);
    connection = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    close(listener);
  } else {
    for (int i = 0; i < 500 && connect(connection, reinterpret_cast<sockaddr*>(&place), sizeof place) != 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  setsockopt(connection, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  char four[4] = {};
  std::vector<double> us;
  for (int i = 0; i < kTrips; ++i) {
    const auto start = BenchClock::now();
    if (options.rank == 0) CHORALE_CHECK_STATE(send(connection, four, 4, 0) == 4, "[bench] the connection broke");
    CHORALE_CHECK_STATE(recv(connection, four, 4, MSG_WAITALL) == 4, "[bench] the connection broke");
    if (options.rank == 1) CHORALE_CHECK_STATE(send(connection, four, 4, 0) == 4, "[bench] the connection broke");
    us.push_back(since(start));
  }
  close(connection);
  return median(us);
}

// One copy between memory that is warm.
double copy_us(int64_t bytes) {
  const Tensor from = ones({bytes / 4}), to = ones({bytes / 4});
  return timed([&] { std::memcpy(to.raw(), from.raw(), static_cast<size_t>(bytes)); }, 0.05).p50;
}

// What call/add does, by hand: the bytes of two tensors to the other rank by the group itself, and of their sum back.
double fabric_us(const comm::Group& group, int64_t bytes) {
  const Tensor x = ones({bytes / 4}), y = ones({bytes / 4}), z = ones({bytes / 4});
  const auto once = [&] {
    if (group.rank() == 0) {
      group.send(x, 1);
      group.send(y, 1);
      group.recv(z, 1);
    } else {
      group.recv(x, 0);
      group.recv(y, 0);
      group.send(add_two(x, y), 0);
    }
  };
  once();
  std::vector<double> us;
  for (int i = 0; i < 10; ++i) {
    const auto start = BenchClock::now();
    once();
    us.push_back(since(start));
  }
  return median(us);
}

}  // namespace

void run_rpc_rank(const RpcRank& options) {
  set_thread_count(1);
  transport::FileStore store(options.store);
  const bool hosts = !options.address.empty();
  const comm::Group group = comm::Group::connect(store, "bench", options.rank, 2);
  const double trip = hosts ? socket_trip(options) : SharedLine(options.store + ".line").trip(options.rank);
  rpc::Agent agent(group, {.serves = {rpc::remote<add_two>, rpc::remote<fetch_weights>, rpc::remote<push_gradient>}});
  for (const RpcCase& c : rpc_cases()) {
    if (!picks(options.only, c.name)) continue;
    // Between hosts the floor of a small call is a bare socket's round trip, that of a large one what the fabric takes.
    double floor = 0;
    if (!hosts) {
      if (options.rank == 0) floor = c.trips * trip + copy_us(c.copied);
    } else if (c.bytes > 4096) {
      floor = static_cast<double>(c.copied) / static_cast<double>(3 * c.bytes) * fabric_us(group, c.bytes);
    } else {
      floor = std::max(c.trips, 1) * trip;
    }
    if (options.rank == 0) {
      const double per_call = c.trips == 0 ? 64 : 1;
      const Times times = timed(prepare_rpc_case(c, agent), options.seconds);
      fmt::print("{}\t{:.3f}\t{:.3f}\t{:.3f}\n", c.name, times.p50 / per_call, times.p99 / per_call, floor);
      std::fflush(stdout);
    }
    agent.barrier();
  }
  agent.shutdown();
}

}  // namespace chorale::app
