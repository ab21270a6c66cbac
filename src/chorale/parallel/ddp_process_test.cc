// Ranks that are processes, on one host and on several, and ranks that die.
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <set>
#include <thread>

#include "chorale/base/comm_error.h"
#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/comm/world.h"
#include "chorale/models/cnn.h"
#include "chorale/models/formula_test_util.h"
#include "chorale/optim/optim.h"
#include "chorale/parallel/sync_batch_norm.h"
#include "chorale/parallel/zoo_test_util.h"

namespace chorale::parallel {
namespace {

using namespace std::chrono_literals;

TEST(DdpProcesses, TrainAsThreadsDo) {
  const auto train = [](comm::Group& group) {
    DistributedDataParallel ddp(seeded(Net(), group.rank()), group);
    Net reference = nn::clone(ddp.module());
    const int64_t rows = 2 * group.size();
    parity_loop(ddp, reference, pattern({rows, 2}, 1), pattern({rows, 4}, 2), 2, 2 * group.rank());
  };
  for (int status : comm::run_processes(3, train)) EXPECT_EQ(status, 0);
}

// ---- the same bits however ranks are connected

// Twenty steps whose every sum rounds, in buckets small and large; the bits of the parameters at the end.
int64_t trained_bits(const comm::Group& group) {
  set_thread_count(1);  // kernels sum differently when they share the work
  nn::Sequential model = models::fashion_cnn();
  models::fill_by_formula(model);
  convert_sync_batchnorm(model, group);
  DistributedDataParallel ddp(model, group, {.bucket_cap_mb = 0.25});
  optim::AdamW optimizer(ddp.named_parameters(), {.lr = 1e-3});
  for (int step = 0; step < 20; ++step) {
    optimizer.zero_grad();
    const Tensor target = Tensor::from<int64_t>({(step + group.rank()) % 10, (step * 7) % 10}, {2});
    backward(cross_entropy(ddp(pattern({2, 1, 28, 28}, 100 * step + group.rank())), target));
    optimizer.step();
  }
  return bits_of(ddp);
}
// A hash of the results of ranks that are threads; it has to be the same for all of them.
int64_t bits_of_threads(int size) {
  std::vector<int64_t> bits(static_cast<size_t>(size));
  run_ranks(size, [&](comm::Group& group) { bits[static_cast<size_t>(group.rank())] = trained_bits(group); });
  EXPECT_EQ(std::set(bits.begin(), bits.end()).size(), 1);
  return bits[0];
}

TEST(SameBits, InEveryRunOfThreadsProcessesAndHosts) {
  const int64_t bits = bits_of_threads(3);
  const auto body = [&](comm::Group& group) { EXPECT_EQ(trained_bits(group), bits) << group.backend(); };
  EXPECT_EQ(comm::run_processes(3, body), (std::vector<int>{0, 0, 0}));
  comm::run_hosts({0, 0, 1}, body);
}

// A rank of a job on several nodes, which tests/hosts_test.py starts.
TEST(SameBits, DISABLED_OnThisNode) {
  comm::World world;
  world.init("env://");
  const comm::Group& group = world.group();
  const int64_t bits = trained_bits(group), expected = bits_of_threads(group.size());
  EXPECT_EQ(bits, expected);
  std::cout << concat(bits == expected ? "same bits" : "other bits", " over ", group.backend(), "\n") << std::flush;
}

// ---- deaths

// What a process has that could outlive it: sockets and files that it may write to, other processes.
class Belongings {
 public:
  Belongings() {
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    std::error_code gone;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
      inherited_.insert(std::filesystem::read_symlink(entry.path(), gone));
  }
  ~Belongings() { prctl(PR_SET_CHILD_SUBREAPER, 0); }
  Belongings(const Belongings&) = delete;
  Belongings& operator=(const Belongings&) = delete;

  // Looks again and again until the ranks have ended.
  void watch(const comm::RunningRanks& ranks) {
    const auto ended = [](pid_t pid) {
      siginfo_t info{};
      return waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid != 0;
    };
    while (!std::all_of(ranks.pids.begin(), ranks.pids.end(), ended)) {
      for (pid_t pid : ranks.pids) look(concat("/proc/", pid));
      std::this_thread::sleep_for(5ms);
    }
  }
  // Whether it came early enough to see the memory that ranks share.
  bool saw_arenas() const { return saw_arenas_; }
  void expect_gone() const {
    for (const std::string& file : files_) EXPECT_FALSE(std::filesystem::exists(file)) << file;
    for (const char* table : {"/proc/net/unix", "/proc/net/tcp", "/proc/net/tcp6"}) {
      std::ifstream lines(table);
      for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        for (std::string word; words >> word;) EXPECT_FALSE(sockets_.contains(word)) << table << ": " << line;
      }
    }
    EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1) << "a process is left";
  }

 private:
  void look(const std::string& process) {
    std::error_code gone;
    for (const auto& entry : std::filesystem::directory_iterator(process + "/fd", gone)) {
      const std::string target = std::filesystem::read_symlink(entry.path(), gone);
      // The output of the test is no such file, nor is the record of the last calls, which is meant to stay.
      if (inherited_.contains(target) || target.find("/chorale-flight") != std::string::npos) continue;
      if (target.starts_with("socket:[")) sockets_.insert(target.substr(8, target.size() - 9));
      if (target.starts_with("/memfd:chorale")) saw_arenas_ = true;
      if (target.starts_with("/tmp/") || target.starts_with("/dev/shm/")) files_.insert(target);
    }
    std::ifstream maps(process + "/maps");
    for (std::string line; std::getline(maps, line);) {
      const size_t path = line.find("/dev/shm/");
      if (path != std::string::npos) files_.insert(line.substr(path));
    }
  }
  std::set<std::string> sockets_, files_, inherited_;
  bool saw_arenas_ = false;
};

// Rank 1 dies in this phase of its second step; the others name it.
enum class Phase { kConstruction, kForward, kBackward, kHook, kOptimizer, kJoin };

struct DiesInForward : nn::Module {
  Linear lin{4, 4};
  bool dies = false;
  CHORALE_MODULE(DiesInForward, lin)
  Tensor forward(const Tensor& x) {
    if (dies) raise(SIGKILL);
    return lin(x);
  }
};

void train_until(const comm::Group& group, Phase phase) {
  const bool victim = group.rank() == 1;
  const auto die_in = [&](Phase now) {
    if (victim && now == phase) raise(SIGKILL);
  };
  die_in(Phase::kConstruction);
  DistributedDataParallel ddp(seeded(DiesInForward(), 1), group);
  optim::Sgd optimizer(ddp.named_parameters(), {.lr = 0.1});
  int step = 0;
  if (phase == Phase::kHook) {
    ddp.register_comm_hook({"dying", [&](GradBucket& bucket) {
                              if (step == 1) die_in(Phase::kHook);
                              return bucket.group().all_reduce(bucket.buffer()).future();
                            }});
  }
  if (phase == Phase::kBackward) {
    after_accumulate(ddp.module().lin.weight, [&](const Tensor&) {
      if (step == 1) die_in(Phase::kBackward);
    });
  }
  const auto steps = [&](int count) {
    for (step = 0; step < count; ++step) {
      ddp.module().dies = victim && phase == Phase::kForward && step == 1;
      optimizer.zero_grad();
      backward(sum(ddp(ones({1, 4}))));
      if (step == 1) die_in(Phase::kOptimizer);
      optimizer.step();
    }
  };
  if (phase == Phase::kJoin) {
    join({&ddp}, {}, [&] {
      steps(victim ? 2 : 4);
      die_in(Phase::kJoin);
    });
  } else {
    steps(4);
  }
}

class Deaths : public testing::TestWithParam<Phase> {};
INSTANTIATE_TEST_SUITE_P(DdpProcesses, Deaths,
                         testing::Values(Phase::kConstruction, Phase::kForward, Phase::kBackward, Phase::kHook,
                                         Phase::kOptimizer, Phase::kJoin));

TEST_P(Deaths, SurvivorsNameTheRankThatDiedAndNothingIsLeft) {
  const auto body = [](comm::Group& group) {
    const auto start = std::chrono::steady_clock::now();
    try {
      train_until(group, GetParam());
      ADD_FAILURE() << "no error";
    } catch (const CommError& error) {
      EXPECT_EQ(error.failure().peer, 1) << error.what();
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, 5s);
  };
  Belongings belongings;
  const std::vector<int> ends =
      comm::run_processes(3, body, {}, [&](const comm::RunningRanks& ranks) { belongings.watch(ranks); });
  EXPECT_EQ(ends, (std::vector<int>{0, -SIGKILL, 0}));
  EXPECT_TRUE(belongings.saw_arenas());
  belongings.expect_gone();
}

}  // namespace
}  // namespace chorale::parallel
