#include "chorale/comm/run_ranks_test_util.h"

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <iostream>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/base/generator.h"
#include "chorale/base/generator_scope.h"
#include "chorale/base/parallel_for.h"
#include "chorale/comm/mpi/mpi_engine.h"
#include "chorale/transport/store/file_store.h"
#include "chorale/transport/store/memory_store.h"

namespace chorale::comm {
namespace {

// Dumps of groups that tests break go to a folder that is removed with the test program.
class FlightFolder {
 public:
  FlightFolder() {
    if (config::env("CHORALE_FLIGHT_DIR")) return;
    char name[] = "/tmp/chorale-flights-XXXXXX";
    if (!mkdtemp(name)) return;
    path_ = name;
    setenv("CHORALE_FLIGHT_DIR", name, 1);
  }
  ~FlightFolder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }

 private:
  std::string path_;
};
void provide_flight_folder() { static const FlightFolder folder; }

// How often this test has called run_processes: parent and child count alike.
int next_call() {
  static std::string test;
  static int calls = 0;
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  const std::string name = concat(info->test_suite_name(), ".", info->name());
  if (name != test) {
    test = name;
    calls = 0;
  }
  return calls++;
}

[[noreturn]] void run_child(int size, const std::function<void(Group&)>& body, const GroupOptions& options) {
  const int rank = std::stoi(*config::env("CHORALE_TEST_RANK"));
  int status = 0;
  try {
    transport::FileStore store(*config::env("CHORALE_TEST_STORE"));
    Group group = Group::connect(store, "world", rank, size, options);
    body(group);
  } catch (const std::exception& error) {
    std::cerr << "rank " << rank << " threw: " << error.what() << std::endl;
    status = 1;
  }
  if (testing::Test::IsSkipped()) status = kSkipped;
  if (testing::Test::HasFailure()) status = 1;
  std::cerr.flush();
  _exit(status);
}

pid_t start_rank(int rank, int size, int call, const std::string& store) {
  const auto* info = testing::UnitTest::GetInstance()->current_test_info();
  const std::string filter = concat("--gtest_filter=", info->test_suite_name(), ".", info->name());
  std::vector<std::string> environment{concat("CHORALE_TEST_RANK=", rank), concat("CHORALE_TEST_CALL=", call),
                                       concat("CHORALE_TEST_STORE=", store), concat("WORLD_SIZE=", size)};
  std::vector<char*> variables;
  for (char** variable = environ; *variable; ++variable) {
    // A rank runs this very test, whichever part of the tests is run here.
    const std::string_view text(*variable);
    const bool dropped =
        text.starts_with("WORLD_SIZE=") || text.starts_with("GTEST_TOTAL_SHARDS=") || text.starts_with("GTEST_SHARD_");
    if (!dropped) variables.push_back(*variable);
  }
  for (std::string& variable : environment) variables.push_back(variable.data());
  variables.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t child = fork();
  if (child != 0) return child;
  // Nothing is left behind when the test itself is killed.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);
  dup2(STDERR_FILENO, STDOUT_FILENO);
  const char* arguments[] = {"rank", filter.c_str(), "--gtest_brief=1", nullptr};
  execve("/proc/self/exe", const_cast<char**>(arguments), variables.data());
  _exit(127);
}

// Under mpirun this process is one of the ranks, and so it is in every test whose ranks are as many.
std::optional<int> ranks_of_mpirun() {
  const auto size = config::env("OMPI_COMM_WORLD_SIZE");
  return size ? std::optional(std::stoi(*size)) : std::nullopt;
}
// The test goes on behind the call, and ends as a skipped one.
void skip_under_mpirun(const std::string& needed) {
  GTEST_SKIP() << "needs " << needed << ", and mpirun has started " << *ranks_of_mpirun() << " ranks";
}
void run_rank_of_mpirun(int size, const std::function<void(Group&)>& body, GroupOptions options) {
  if (size != *ranks_of_mpirun()) return skip_under_mpirun(concat(size, " ranks"));
  transport::MemoryStore unused;
  options.fabric = "mpi";
  Group group = Group::connect(unused, "world", std::stoi(*config::env("OMPI_COMM_WORLD_RANK")), size, options);
  // Small pieces, so that small data has several.
  if (const auto bytes = config::env("CHORALE_TEST_MPI_PIECE"))
    dynamic_cast<MpiEngine&>(*group.engine()).set_piece_bytes(std::stoul(*bytes));
  body(group);
}

void run_threads(int size, const std::function<void(Group&)>& body,
                 const std::function<GroupOptions(int rank)>& options) {
  provide_flight_folder();
  transport::MemoryStore store;
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      set_thread_count(1);  // ranks share the cores: threads of their own would only wait for one another
      // Each draws numbers of its own, as a process would.
      Generator numbers(rank == 0 ? 0 : Generator().fork(static_cast<uint64_t>(rank)).state().seed);
      const GeneratorScope scope(numbers);
      try {
        Group group = Group::connect(store, "world", rank, size, options(rank));
        body(group);
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (!first) first = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace

void run_ranks(int size, const std::function<void(Group&)>& body, const GroupOptions& options) {
  if (ranks_of_mpirun()) {
    provide_flight_folder();
    return run_rank_of_mpirun(size, body, options);
  }
  run_threads(size, body, [&](int) { return options; });
}

std::vector<int> sizes_to_run(const std::vector<int>& sizes) {
  const std::optional<int> there = ranks_of_mpirun();
  if (!there) return sizes;
  if (std::find(sizes.begin(), sizes.end(), *there) != sizes.end()) return {*there};
  skip_under_mpirun("another number of ranks");
  return {};
}

void run_hosts(const std::vector<int>& hosts, const std::function<void(Group&)>& body, const GroupOptions& options) {
  if (ranks_of_mpirun()) return skip_under_mpirun("threads as hosts");
  const transport::Secret secret = transport::Secret::generate();
  run_threads(static_cast<int>(hosts.size()), body, [&](int rank) {
    GroupOptions own = options;
    own.net.secret = secret;
    own.net.address = "127.0.0.1";
    own.net.host = static_cast<uint64_t>(hosts[static_cast<size_t>(rank)]);
    return own;
  });
}

bool is_rank_process() { return config::env("CHORALE_TEST_RANK").has_value(); }

std::vector<int> run_processes(int size, const std::function<void(Group&)>& body, const GroupOptions& options,
                               const std::function<void(const RunningRanks&)>& meanwhile) {
  provide_flight_folder();
  if (ranks_of_mpirun()) {
    skip_under_mpirun("processes of its own");
    return std::vector<int>(static_cast<size_t>(size), 0);
  }
  const int call = next_call();
  if (is_rank_process()) {
    if (std::stoi(*config::env("CHORALE_TEST_CALL")) != call) return std::vector<int>(static_cast<size_t>(size), 0);
    run_child(size, body, options);
  }
  char store[] = "/tmp/chorale-test-XXXXXX";
  close(mkstemp(store));
  RunningRanks ranks;
  for (int rank = 0; rank < size; ++rank) ranks.pids.push_back(start_rank(rank, size, call, store));
  if (meanwhile) meanwhile(ranks);
  std::vector<int> results;
  for (pid_t pid : ranks.pids) {
    int status = 0;
    waitpid(pid, &status, 0);
    results.push_back(WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status));
  }
  std::filesystem::remove(store);
  return results;
}

void run_threads_and_processes(int size, const std::function<void(Group&)>& body, const GroupOptions& options) {
  if (!is_rank_process()) run_ranks(size, body, options);
  if (ranks_of_mpirun()) return;
  EXPECT_EQ(run_processes(size, body, options), std::vector<int>(static_cast<size_t>(size), 0));
}

void run_everywhere(int size, const std::function<void(Group&)>& body, const GroupOptions& options) {
  if (!is_rank_process() && size > 1 && !ranks_of_mpirun()) {
    std::vector<int> hosts(static_cast<size_t>(size));
    std::fill(hosts.begin() + (size + 1) / 2, hosts.end(), 1);
    run_hosts(hosts, body, options);
  }
  run_threads_and_processes(size, body, options);
}

std::string message_blaming(int culprit, const std::function<void()>& call) {
  try {
    call();
  } catch (const CommError& error) {
    EXPECT_EQ(error.failure().peer, culprit) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error";
  return {};
}

void expect_sums_in_order(Group& group) {
  const auto value = [](int rank, int64_t i) { return 1.0f / static_cast<float>(1 + 3 * rank + i % 1009); };
  const std::function<float(int, int, int64_t)> sum = [&](int begin, int end, int64_t i) {
    if (end - begin == 1) return value(begin, i);
    int left = 1;
    while (2 * left < end - begin) left *= 2;
    return sum(begin, begin + left, i) + sum(begin + left, end, i);
  };
  // Sizes that go in a slot, in place or staged, and in more pieces than one.
  for (int64_t count : {1, 5, 3000, 200'000}) {
    const Tensor ours = Tensor::empty({count}, DType::kF32);
    std::vector<float> foreign(static_cast<size_t>(count));
    for (int64_t i = 0; i < count; ++i)
      ours.data<float>()[i] = foreign[static_cast<size_t>(i)] = value(group.rank(), i);
    group.all_reduce(ours).wait();
    group.all_reduce(std::span(foreign)).wait();
    for (int64_t i = 0; i < count; ++i) {
      const float expected = sum(0, group.size(), i);
      ASSERT_EQ(ours.data<float>()[i], expected) << i << " of " << count;
      ASSERT_EQ(foreign[static_cast<size_t>(i)], expected) << i << " of " << count;
    }
  }
}

}  // namespace chorale::comm
