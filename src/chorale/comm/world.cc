#include "chorale/comm/world.h"

#include <algorithm>
#include <iostream>

#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/base/exit_status.h"
#include "chorale/comm/leaving.h"

namespace chorale::comm {

void World::init(std::shared_ptr<transport::Store> store, int rank, int size, const GroupOptions& options) {
  CHORALE_CHECK_STATE(!is_initialized(), "[world] the default group exists already; destroy it first");
  CHORALE_CHECK(store, "[world] a store is needed to meet the other ranks");
  group_ = Group::connect(*store, "world", rank, size, options);
  store_ = std::move(store);
}

void World::init(std::string_view url, const transport::RendezvousOptions& where, const GroupOptions& options) {
  CHORALE_CHECK_STATE(!is_initialized(), "[world] the default group exists already; destroy it first");
  transport::RendezvousOptions patient = where;
  if (!patient.timeout) patient.timeout = options.timeout;
  const transport::RendezvousResult found = transport::rendezvous(url, patient);
  GroupOptions reachable = options;
  if (!reachable.net.secret) reachable.net.secret = found.secret;
  if (reachable.net.address.empty()) reachable.net.address = found.address;
  init(found.store, found.rank, found.world_size, reachable);
}

Group& World::group() {
  CHORALE_CHECK_STATE(is_initialized(), "[world] there is no default group; call init() first");
  return group_;
}

void World::destroy() {
  CHORALE_CHECK_STATE(is_initialized(), "[world] there is no default group to destroy");
  const std::shared_ptr<transport::Store> store = std::move(store_);  // until all have left: one rank may serve it
  leave(group_);
}

World::~World() {
  if (!is_initialized() || std::uncaught_exceptions() > exceptions_at_birth_) return;
  try {
    destroy();
  } catch (const std::exception& error) {
    std::cerr << concat(error.what(), "\n") << std::flush;
    end_with_failure();
  }
}

transport::Store& World::store() {
  CHORALE_CHECK_STATE(store_, "[world] there is no store; call init() first");
  return *store_;
}

std::string parse_backend(std::string_view name) {
  std::string lower;
  for (char c : name) lower += c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  for (const char* known : {"shm", "tls", "ucx", "mpi", "nccl"}) {
    if (lower == known) return lower;
  }
  throw InvalidArgument(concat("[backend] '", name, "' is no backend; there are shm, tls, ucx, mpi and nccl"));
}

std::string relevant_environment() {
  std::string text;
  for (const char* name : {"RANK",
                           "LOCAL_RANK",
                           "WORLD_SIZE",
                           "LOCAL_WORLD_SIZE",
                           "MASTER_ADDR",
                           "MASTER_PORT",
                           "OMP_NUM_THREADS",
                           "CUDA_VISIBLE_DEVICES",
                           "GLOO_SOCKET_IFNAME",
                           "NCCL_SOCKET_IFNAME",
                           "NCCL_DEBUG",
                           "NCCL_TOPO_DUMP_FILE",
                           "TORCH_NCCL_ASYNC_ERROR_HANDLING",
                           "TORCH_DISTRIBUTED_DEBUG",
                           "CHORALE_ALGORITHMS",
                           "CHORALE_CHAOS",
                           "CHORALE_CHECKSUM",
                           "CHORALE_CONGESTION",
                           "CHORALE_DEBUG",
                           "CHORALE_FABRIC",
                           "CHORALE_FLIGHT_DIR",
                           "CHORALE_IFACE",
                           "CHORALE_KEEP_ALIVE",
                           "CHORALE_TIMEOUT"}) {
    text += concat("env:", name, "=", config::env(name).value_or("N/A"), "\n");
  }
  return text;
}

}  // namespace chorale::comm
