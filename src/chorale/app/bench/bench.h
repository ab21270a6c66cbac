// What the benchmarks share: timing, peers that run as other processes, and the report (docs/dev/bench.md).
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace chorale::app {

// Seconds that `run` takes `count` times.
double seconds_of(const std::function<void()>& run, int64_t count);
// How often to run it so that one measurement takes about this long; runs it a few times to find out.
int64_t calibrate(const std::function<void()>& run, double target_seconds);

double median(std::vector<double> values);

// Peak resident memory of this program. (getrusage() would count what the process had before exec.)
double peak_mib();

// A program that answers one line for each line it gets.
class PeerProcess {
 public:
  // Starts it; throws StateError when it cannot be started or says nothing.
  explicit PeerProcess(const std::vector<std::string>& command);
  ~PeerProcess();
  PeerProcess(const PeerProcess&) = delete;
  PeerProcess& operator=(const PeerProcess&) = delete;

  const std::string& greeting() const { return greeting_; }
  // Throws StateError when it died.
  std::string ask(const std::string& line);

 private:
  std::string read_line();
  int pid_ = -1;
  int to_ = -1;
  int from_ = -1;
  std::string buffered_;
  std::string greeting_;
};

struct BenchRow {
  std::string name;  // says everything that identifies it
  std::string unit;
  double ours = 0;
  std::map<std::string, double> peers;  // in the same unit
  nlohmann::json extra = nlohmann::json::object();
};

// `--only`: does it pick the case of this name?
inline bool picks(const std::string& only, const std::string& name) { return name.find(only) != std::string::npos; }
// Throws InvalidArgument with the names of all cases when it picks none of them.
void check_only(const std::string& only, const std::vector<std::string>& names);

// `--against`: says what is wrong with a list of peers, separated by commas, or nothing; for CLI11's check(). No peer
// and "none" are always right. A name that ends with '=' stands for all words that begin so.
std::function<std::string(const std::string&)> one_of_peers(std::vector<std::string> known);

// The object that `--json` writes.
nlohmann::json bench_report(const std::string& bench, const std::vector<BenchRow>& rows);
void write_json(const std::string& path, const nlohmann::json& report);

// The path of this program, chorale-bench, for starting it again.
std::string program_path();
// The folder bench/peers of the repository this program was built in; empty when it is not there (an installed
// program).
std::string peers_folder();

}  // namespace chorale::app
