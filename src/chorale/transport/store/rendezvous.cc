#include "chorale/transport/store/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <functional>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "chorale/base/comm_error.h"
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/base/shared_object.h"
#include "chorale/transport/host_identity.h"
#include "chorale/transport/interface.h"
#include "chorale/transport/launcher_variables.h"
#include "chorale/transport/mpi/mpi.h"
#include "chorale/transport/store/file_store.h"
#include "chorale/transport/store/prefix_store.h"
#include "chorale/transport/store/store_server.h"
#include "chorale/transport/store/tcp_store.h"

namespace chorale::transport {
namespace {

using namespace std::chrono_literals;

struct Url {
  std::string scheme;
  std::string place;
  std::map<std::string, int> query;  // rank and world_size
};

Url parse_url(std::string_view text) {
  const size_t colon = text.find("://");
  CHORALE_CHECK(colon != std::string_view::npos, "[rendezvous] expected env://, tcp://HOST:PORT or file:///PATH, not '",
                text, "'");
  Url url{std::string(text.substr(0, colon)), {}, {}};
  std::string_view rest = text.substr(colon + 3);
  const size_t mark = rest.find('?');
  url.place = rest.substr(0, mark);
  rest = mark == std::string_view::npos ? "" : rest.substr(mark + 1);
  while (!rest.empty()) {
    const std::string_view pair = rest.substr(0, rest.find('&'));
    rest.remove_prefix(std::min(rest.size(), pair.size() + 1));
    const size_t equals = pair.find('=');
    const std::string name(pair.substr(0, equals));
    const std::string_view digits = equals == std::string_view::npos ? "" : pair.substr(equals + 1);
    int number = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
    CHORALE_CHECK(
        (name == "rank" || name == "world_size") && error == std::errc() && end == digits.data() + digits.size(),
        "[rendezvous] expected rank=NUMBER or world_size=NUMBER, not '", pair, "' (in '", text, "')");
    CHORALE_CHECK(url.query.emplace(name, number).second, "[rendezvous] ", name, " is given twice in '", text, "'");
  }
  return url;
}

// From the options, the URL or the launcher; `variable` is what to set otherwise.
int required(const char* name, const char* variable, std::optional<int> option, const Url& url,
             std::optional<int> found) {
  const auto in_url = url.query.find(name);
  CHORALE_CHECK(!option || in_url == url.query.end(), "[rendezvous] ", name, " is given twice: ", option.value_or(0),
                " as an option, ", in_url == url.query.end() ? 0 : in_url->second, " in the URL");
  if (in_url != url.query.end()) option = in_url->second;
  if (!option) option = found;
  CHORALE_CHECK(option, "[rendezvous] the ", name, " is not known: ", variable,
                " is not set, nor is another launcher's variable; start the ranks with chorale run, or set it");
  return *option;
}

// Every rank introduces itself; what does not fit together is found here rather than in the first collective.
void introduce(Store& store, int rank, int world_size, Deadline deadline) {
  const std::string size = std::to_string(world_size);
  const std::string agreed = store.compare_set("rendezvous/world_size", "", size, deadline);
  CHORALE_CHECK(agreed == size, "[rendezvous] this rank (", rank, ") expects a world of ", size,
                " ranks, another one of ", agreed);
  const std::string me =
      concat("process ", getpid(), " on ", host_name(), ", ", Deadline::Clock::now().time_since_epoch().count());
  const std::string who = store.compare_set(concat("rendezvous/rank/", rank), "", me, deadline);
  CHORALE_CHECK(who == me, "[rendezvous] rank ", rank, " is there already (", who.substr(0, who.rfind(',')),
                "); is a job still running, or a file left from one that was killed?");
}

struct HostedStore {
  HostedStore(const Endpoint& place, const std::optional<Secret>& secret, Deadline deadline)
      : server(place, secret), client(std::in_place, server.endpoint(), secret, deadline) {}
  ~HostedStore() {
    client.reset();
    server.wait_for_clients_to_leave(within(5s));
  }
  HostedStore(const HostedStore&) = delete;
  HostedStore& operator=(const HostedStore&) = delete;

  StoreServer server;
  std::optional<TcpStore> client;
};

std::shared_ptr<Store> socket_store(const Endpoint& place, const RendezvousResult& job, Deadline deadline) {
  std::shared_ptr<Store> store;
  if (job.rank == 0) {
    const auto hosted =
        std::make_shared<HostedStore>(place.is_unix() ? place : listening_place(place), job.secret, deadline);
    store = std::shared_ptr<Store>(hosted, &*hosted->client);
  } else {
    store = std::make_shared<TcpStore>(place, job.secret, deadline);
  }
  introduce(*store, job.rank, job.world_size, deadline);
  return store;
}

Endpoint unix_place(std::string_view job) { return Endpoint::unix_socket(concat("chorale-", geteuid(), "-", job)); }

// Where the ranks meet, and what the last of them does when it has dropped its store.
struct Meeting {
  std::shared_ptr<Store> store;
  std::string store_host;
  std::function<void()> when_all_have_left = [] {};
};

// How many have left.
constexpr const char* kLeft = "rendezvous/left";

std::shared_ptr<Store> noticed_when_dropped(const Meeting& meeting, int world_size) {
  return {meeting.store.get(), [meeting, world_size](Store* store) {
            try {
              if (store->add(kLeft, 1, within(5s)) == world_size) meeting.when_all_have_left();
            } catch (const Error&) {  // at the end of a job others may be gone: no reason to fail
            }
          }};
}

// TCP with a secret, a Unix socket without.
Meeting meet_over_tcp(const Endpoint& place, const RendezvousResult& job, Deadline deadline) {
  CHORALE_CHECK(job.secret || is_local_host(place.host), "[rendezvous] the store is on another host, ", place.text(),
                ", and the job has no secret: set CHORALE_SECRET_FILE to a file with the same secret on every node");
  return {socket_store(job.secret ? place : unix_place(std::to_string(place.port)), job, deadline), place.host};
}

Meeting meet_in_file(const std::string& path, const RendezvousResult& job, Deadline deadline) {
  CHORALE_CHECK(path.starts_with('/'), "[rendezvous] file:// needs an absolute path, file:///PATH, not '", path, "'");
  const auto file = std::make_shared<FileStore>(path);
  introduce(*file, job.rank, job.world_size, deadline);
  return {file, "", [file] { file->remove_file(); }};
}

// The launcher's store outlives starts of the job, and worlds that a program makes and drops: each has entries of its
// own. The next world begins when all ranks have left the one before; whoever does not fit into one that is being left
// waits for it.
Meeting meet_at_launcher(const Endpoint& place, const RendezvousResult& job, Deadline deadline) {
  const auto start = std::make_shared<PrefixStore>("start " + config::env("TORCHELASTIC_RESTART_COUNT").value_or("0"),
                                                   std::make_shared<TcpStore>(place, job.secret, deadline));
  while (true) {
    const int64_t number = start->add("worlds before", 0, deadline);
    const auto world = std::make_shared<PrefixStore>(concat("world ", number), start);
    try {
      introduce(*world, job.rank, job.world_size, deadline);
      return {world, place.host, [start] { start->add("worlds before", 1, within(5s)); }};
    } catch (const InvalidArgument&) {
      if (deadline.passed() || !world->contains(kLeft, deadline)) throw;
    }
    std::this_thread::sleep_for(5ms);
  }
}

// Under mpirun on several hosts, without a secret and without a place: rank 0 makes both, and MPI tells the others. The
// secret is then as safe as MPI's network is.
Meeting meet_by_mpi(RendezvousResult& job, Deadline deadline) {
  struct Invitation {
    char secret[32];
    char place[96];  // empty: rank 0 could not host the store
  } invitation{};
  std::shared_ptr<HostedStore> hosted;
  std::exception_ptr trouble;
  if (job.rank == 0) {
    try {
      job.secret = Secret::generate();
      hosted = std::make_shared<HostedStore>(Endpoint::tcp(own_address(""), 0), job.secret, deadline);
      const std::string place = hosted->server.endpoint().text();
      CHORALE_INVARIANT(
          job.secret->bytes().size() == sizeof(invitation.secret) && place.size() < sizeof(invitation.place),
          "an invitation to ", place, " is too long");
      job.secret->bytes().copy(invitation.secret, sizeof(invitation.secret));
      place.copy(invitation.place, sizeof(invitation.place));
    } catch (const std::exception&) {
      trouble = std::current_exception();
    }
  }
  Mpi& mpi = Mpi::get();
  auto request = mpi.broadcast(mpi.world(), &invitation, sizeof(invitation), 0);
  while (!mpi.test(request)) {
    if (deadline.passed())
      throw CommError(concat("[rendezvous] not all ", job.world_size, " ranks that mpirun started came in time"));
    std::this_thread::sleep_for(1ms);
  }
  if (trouble) std::rethrow_exception(trouble);
  const std::string place(invitation.place, strnlen(invitation.place, sizeof(invitation.place)));
  if (place.empty()) throw CommError("[rendezvous] rank 0 could not host the store; it says why");
  Meeting meeting{nullptr, Endpoint::parse(place).host};
  if (job.rank == 0) {
    meeting.store = std::shared_ptr<Store>(hosted, &*hosted->client);
  } else {
    job.secret = Secret::from_bytes({invitation.secret, sizeof(invitation.secret)});
    meeting.store = std::make_shared<TcpStore>(Endpoint::parse(place), job.secret, deadline);
  }
  explicit_bzero(&invitation, sizeof(invitation));
  introduce(*meeting.store, job.rank, job.world_size, deadline);
  return meeting;
}

Meeting meet_by_variables(const LauncherVariables& found, RendezvousResult& job, Deadline deadline) {
  if (found.store) return meet_at_launcher(Endpoint::parse(*found.store), job, deadline);
  const bool one_host = found.local_size == job.world_size;
  if (!job.secret && !one_host && !found.master_addr && Mpi::started_by_mpi() &&
      shared_object_availability(kMpiObject).yes)
    return meet_by_mpi(job, deadline);
  if (!job.secret && one_host && !found.job.empty() && !config::env("MASTER_ADDR")) {
    return {socket_store(unix_place(found.job), job, deadline), ""};
  }
  CHORALE_CHECK(found.master_addr, "[rendezvous] MASTER_ADDR is not set: the host of rank 0");
  CHORALE_CHECK(found.master_port, "[rendezvous] MASTER_PORT is not set: a free port on the host of rank 0");
  CHORALE_CHECK(job.secret || !found.local_size || one_host, "[rendezvous] ", found.local_size.value_or(0), " of ",
                job.world_size,
                " ranks are on this host, and the job has no secret: set CHORALE_SECRET_FILE to a file "
                "with the same secret on every node");
  auto port = *found.master_port;
  // torchrun's own agent listens at MASTER_PORT.
  if (config::env("TORCHELASTIC_USE_AGENT_STORE") == "True") ++port;
  return meet_over_tcp(Endpoint::tcp(*found.master_addr, port), job, deadline);
}

void find_neighbours(RendezvousResult& result, Deadline deadline) {
  const std::string mine = host_identity();
  result.store->set(concat("rendezvous/host/", result.rank), mine, deadline);
  result.local_rank = 0;
  result.local_size = 0;
  for (int other = 0; other < result.world_size; ++other) {
    if (result.store->get(concat("rendezvous/host/", other), deadline) != mine) continue;
    if (other < result.rank) ++result.local_rank;
    ++result.local_size;
  }
}

}  // namespace

RendezvousResult rendezvous(std::string_view text, const RendezvousOptions& options) {
  const Deadline deadline = within(options.timeout);
  const Url url = parse_url(text);
  const bool rank_is_given = options.rank || url.query.contains("rank");
  const bool size_is_given = options.world_size || url.query.contains("world_size");
  // What is given wins: then it does not matter what launchers say, not even if they disagree.
  const bool asks_launchers = url.scheme == "env" || !rank_is_given || !size_is_given;
  const LauncherVariables found = asks_launchers ? find_launcher_variables() : LauncherVariables{};

  RendezvousResult result;
  result.rank = required("rank", "RANK", options.rank, url, found.rank);
  result.world_size = required("world_size", "WORLD_SIZE", options.world_size, url, found.world_size);
  CHORALE_CHECK(result.world_size >= 1 && result.rank >= 0 && result.rank < result.world_size, "[rendezvous] rank ",
                result.rank, " of ", result.world_size, ": a rank counts from 0 to world_size - 1");
  result.secret = options.secret ? options.secret : Secret::from_environment();

  Meeting meeting;
  if (url.scheme == "env") {
    CHORALE_CHECK(url.place.empty(), "[rendezvous] env:// takes no place, but has '", url.place, "'");
    meeting = meet_by_variables(found, result, deadline);
  } else if (url.scheme == "tcp") {
    meeting = meet_over_tcp(Endpoint::parse(url.place), result, deadline);
  } else if (url.scheme == "file") {
    meeting = meet_in_file(url.place, result, deadline);
  } else {
    throw InvalidArgument(concat("[rendezvous] expected env://, tcp:// or file://, not '", url.scheme, "://'"));
  }

  // Only ranks that were accepted count among those that leave.
  result.store = noticed_when_dropped(meeting, result.world_size);
  if (!rank_is_given && found.local_rank && found.local_size) {
    result.local_rank = *found.local_rank;
    result.local_size = *found.local_size;
    CHORALE_CHECK(
        result.local_rank >= 0 && result.local_rank < result.local_size && result.local_size <= result.world_size,
        "[rendezvous] local rank ", result.local_rank, " of ", result.local_size, " in a world of ", result.world_size,
        " cannot be");
  } else {
    find_neighbours(result, deadline);
  }
  result.address = result.local_size == result.world_size ? "127.0.0.1" : own_address(meeting.store_host);
  return result;
}

}  // namespace chorale::transport
