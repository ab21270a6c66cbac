// Ranks that share a GPU. Without more, processes take turns on it in slices of time; NVIDIA's MPS lets them run side
// by side.
#pragma once

#include <functional>
#include <map>
#include <string>

#include "chorale/launch/guardian.h"
#include "chorale/launch/process.h"

namespace chorale::launch {

// GPUs that ranks of this node may use: those that CUDA_VISIBLE_DEVICES lists, else all.
int count_gpus();

// A daemon of MPS for the ranks of one launcher, with a folder of its own.
class Mps {
 public:
  using Say = std::function<void(const std::string&)>;
  // Starts one where several of the ranks share a GPU, MPS is installed, none runs for the user already
  // (CUDA_MPS_PIPE_DIRECTORY) and CHORALE_MPS is not 0; says so. Where that fails, the ranks run without.
  Mps(int ranks, Guardian& guardian, const Say& say);
  // Ends it. Its clients have ended before.
  ~Mps();
  Mps(const Mps&) = delete;
  Mps& operator=(const Mps&) = delete;

  // Variables for the ranks; empty where there is no daemon.
  std::map<std::string, std::string> environment() const;

 private:
  bool has_come_up() const;
  bool has_ended() const;
  void ask_to_quit() noexcept;
  void end() noexcept;

  Guardian& guardian_;
  std::string program_, folder_;
  StartedProcess daemon_;
};

}  // namespace chorale::launch
