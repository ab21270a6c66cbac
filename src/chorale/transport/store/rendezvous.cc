#include "chorale/transport/store/rendezvous.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <thread>
#include <utility>
#include <vector>

#include "chorale/base/comm_error.h"
#include "chorale/base/config.h"
#include "chorale/base/error.h"
#include "chorale/base/forks.h"
#include "chorale/base/log.h"
#include "chorale/base/shared_object.h"
#include "chorale/transport/host_identity.h"
#include "chorale/transport/interface.h"
#include "chorale/transport/launcher_variables.h"
#include "chorale/transport/mpi/mpi.h"
#include "chorale/transport/store/file_store.h"
#include "chorale/transport/store/meeting.h"
#include "chorale/transport/store/memory_store.h"
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

// Takes the number from the options, the URL or the launcher; `variable` is what to set otherwise.
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

// A server of this process, and its own client.
struct HostedStore {
  HostedStore(const Endpoint& place, const std::optional<Secret>& secret, Deadline deadline)
      : server(place, secret), client(std::in_place, server.endpoint(), secret, deadline) {}
  // A rank that is still connected has to read how a meeting ended that failed.
  ~HostedStore() {
    client.reset();
    if (!all_have_left) server.wait_for_clients_to_leave(within(5s));
  }
  HostedStore(const HostedStore&) = delete;
  HostedStore& operator=(const HostedStore&) = delete;

  StoreServer server;
  std::optional<TcpStore> client;
  bool all_have_left = false;
};

// Where the ranks meet.
struct Place {
  std::shared_ptr<Store> store;
  std::string where;       // for messages
  std::string store_host;  // empty: this one
  std::string run = {};    // of the launcher
  // What this rank does when it drops its store; `left` says how many of the meeting have done so.
  std::function<void(const Meeting& meeting, const std::function<int64_t()>& left)> leave =
      [](const Meeting&, const std::function<int64_t()>&) {};
};

// How many have left.
constexpr const char* kLeft = "rendezvous/left";

// The entries of the meeting. They are of the process that met the others: a forked child of it leaves nothing, and
// lets connections and threads alone, which are its parent's.
std::shared_ptr<Store> store_of(const Place& place, const Meeting& meeting) {
  struct Stay {
    Place place;
    Meeting meeting;
    PrefixStore view;
    base::ForkMark made;
  };
  auto* stay = new Stay{place, meeting, PrefixStore(concat("rendezvous/", meeting.token), place.store), {}};
  return {&stay->view, [stay](Store*) {
            if (stay->made.is_foreign()) return;
            try {
              stay->view.add(kLeft, 1, within(5s));
              stay->place.leave(stay->meeting, [&] { return stay->view.add(kLeft, 0, within(5s)); });
            } catch (const Error&) {  // at the end of a job others may be gone: no reason to fail
            }
            delete stay;
          }};
}

Place hosted_place(const Endpoint& place, const RendezvousResult& job, Deadline deadline) {
  const auto hosted = std::make_shared<HostedStore>(place, job.secret, deadline);
  Place found{std::shared_ptr<Store>(hosted, &*hosted->client), hosted->server.endpoint().text(), place.host};
  // Rank 0 leaves last: it would take the store from under the others. A rank that connects again meanwhile, for the
  // next meeting, is not waited for.
  found.leave = [hosted, size = job.world_size](const Meeting&, const auto& left) {
    const Deadline patience = within(5s);
    while (left() < size && hosted->server.clients() > 1 && !patience.passed()) std::this_thread::sleep_for(2ms);
    hosted->all_have_left = true;
  };
  return found;
}

// The store of `host`, as its client. What the user has named, `where`, is said when nobody answers there.
std::shared_ptr<TcpStore> store_of_others(const Endpoint& place, const RendezvousResult& job, std::string_view host,
                                          std::string_view where, Deadline deadline) {
  constexpr auto kPatience = 3s;
  const std::string errand =
      concat("[rendezvous] rank ", job.rank, " of ", job.world_size, " looks for ", host, " at ", where, ": ");
  const auto look = [&](Deadline until) { return std::make_shared<TcpStore>(place, job.secret, until); };
  try {
    return look(deadline.earlier(within(kPatience)));
  } catch (const StoreLost&) {
    throw;
  } catch (const CommError& problem) {
    if (deadline.passed()) throw CommError(errand + problem.what());
    log_info(errand + problem.what());
  }
  try {
    return look(deadline);
  } catch (const StoreLost&) {
    throw;
  } catch (const CommError& problem) {
    throw CommError(errand + problem.what());
  }
}

// Rank 0 hosts the store, unless there is one already: a process that rank 0 has started, with the same environment,
// meets the others at its parent's. `where` is what the user has named.
Place socket_place(const Endpoint& place, const std::string& where, const RendezvousResult& job, Deadline deadline) {
  try {
    if (job.rank == 0) return hosted_place(place.is_unix() ? place : listening_place(place), job, deadline);
  } catch (const AddressInUse& problem) {
    log_info(concat("[rendezvous] rank 0 meets the others at the store that is there: ", problem.what()));
  }
  return {store_of_others(place, job, "rank 0", where, deadline), place.text(), place.host};
}

Endpoint unix_place(std::string_view job) { return Endpoint::unix_socket(concat("chorale-", geteuid(), "-", job)); }

// TCP with a secret, a Unix socket without.
Place tcp_place(const Endpoint& place, const RendezvousResult& job, Deadline deadline) {
  CHORALE_CHECK(job.secret || is_local_host(place.host), "[rendezvous] the store is on another host, ", place.text(),
                ", and the job has no secret: set CHORALE_SECRET_FILE to a file with the same secret on every node");
  Place found = socket_place(job.secret ? place : unix_place(std::to_string(place.port)), place.text(), job, deadline);
  found.store_host = place.host;
  if (!job.secret) found.where = concat(place.text(), " (", found.where, ")");  // what the user has named comes first
  return found;
}

Place file_place(const std::string& path, const RendezvousResult& job) {
  CHORALE_CHECK(path.starts_with('/'), "[rendezvous] file:// needs an absolute path, file:///PATH, not '", path, "'");
  const auto file = std::make_shared<FileStore>(path);
  Place found{file, "file " + path, ""};
  // The last one removes it, unless there is a later meeting in it.
  found.leave = [file, size = job.world_size](const Meeting& meeting, const auto& left) {
    if (left() == size) file->remove_file_if(meeting.record_key, meeting.record, within(5s));
  };
  return found;
}

// Under mpirun on several hosts, without a secret and without a place, rank 0 makes both, and MPI tells the others. The
// secret is then as safe as MPI's network is.
Place place_by_mpi(RendezvousResult& job, Deadline deadline) {
  struct Invitation {
    char secret[32];
    char place[96];  // empty: rank 0 could not host the store
  } invitation{};
  Place found;
  std::exception_ptr trouble;
  if (job.rank == 0) {
    try {
      job.secret = Secret::generate();
      found = hosted_place(Endpoint::tcp(own_address(""), 0), job, deadline);
      CHORALE_INVARIANT(
          job.secret->bytes().size() == sizeof(invitation.secret) && found.where.size() < sizeof(invitation.place),
          "an invitation to ", found.where, " is too long");
      job.secret->bytes().copy(invitation.secret, sizeof(invitation.secret));
      found.where.copy(invitation.place, sizeof(invitation.place));
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
  if (job.rank != 0) {
    job.secret = Secret::from_bytes({invitation.secret, sizeof(invitation.secret)});
    const Endpoint endpoint = Endpoint::parse(place);
    found = {std::make_shared<TcpStore>(endpoint, job.secret, deadline), place, endpoint.host};
  }
  explicit_bzero(&invitation, sizeof(invitation));
  return found;
}

// The launcher's store outlives starts of the job: each has entries of its own.
Place launcher_place(const Endpoint& place, const RendezvousResult& job, Deadline deadline) {
  return {std::make_shared<PrefixStore>(concat("start ", restart_count()),
                                        store_of_others(place, job, "the launcher", place.text(), deadline)),
          place.text(), place.host};
}

Place place_by_variables(const LauncherVariables& found, RendezvousResult& job, Deadline deadline) {
  if (found.store) return launcher_place(Endpoint::parse(*found.store), job, deadline);
  const bool one_host = found.local_size == job.world_size;
  if (!job.secret && !one_host && !found.master_addr && Mpi::started_by_mpi() &&
      shared_object_availability(kMpiObject).yes)
    return place_by_mpi(job, deadline);
  if (!job.secret && one_host && !found.job.empty() && !config::env("MASTER_ADDR"))
    return socket_place(unix_place(found.job), concat("this host, as ", found.job), job, deadline);
  CHORALE_CHECK(found.master_addr, "[rendezvous] MASTER_ADDR is not set: the host of rank 0");
  CHORALE_CHECK(found.master_port, "[rendezvous] MASTER_PORT is not set: a free port on the host of rank 0");
  CHORALE_CHECK(job.secret || !found.local_size || one_host, "[rendezvous] ", found.local_size.value_or(0), " of ",
                job.world_size,
                " ranks are on this host, and the job has no secret: set CHORALE_SECRET_FILE to a file "
                "with the same secret on every node");
  auto port = *found.master_port;
  // torchrun's own agent listens at MASTER_PORT.
  if (config::env("TORCHELASTIC_USE_AGENT_STORE") == "True") ++port;
  return tcp_place(Endpoint::tcp(*found.master_addr, port), job, deadline);
}

Place place_of(const Url& url, const LauncherVariables& found, RendezvousResult& job, Deadline deadline) {
  if (url.scheme == "env") {
    CHORALE_CHECK(url.place.empty(), "[rendezvous] env:// takes no place, but has '", url.place, "'");
    Place place = place_by_variables(found, job, deadline);
    place.run = found.run;
    return place;
  }
  if (url.scheme == "tcp") return tcp_place(Endpoint::parse(url.place), job, deadline);
  CHORALE_CHECK(url.scheme == "file", "[rendezvous] expected env://, tcp:// or file://, not '", url.scheme, "://'");
  return file_place(url.place, job);
}

// Whether not one of the variables is there: the program was started by hand. A few of them are a mistake.
bool nobody_launched(const LauncherVariables& found) {
  return !found.rank && !found.world_size && !found.local_rank && !found.local_size && !found.master_addr &&
         !found.master_port && !found.store;
}

}  // namespace

std::chrono::milliseconds default_timeout() {
  const auto text = config::env("CHORALE_TIMEOUT");
  if (!text) return 30min;
  char* end = nullptr;
  const double seconds = std::strtod(text->c_str(), &end);
  CHORALE_CHECK(*end == 0 && seconds > 0 && seconds < 1e9, "[group] CHORALE_TIMEOUT is '", *text,
                "'; it takes a number of seconds, such as 1800");
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1e3));
}

RendezvousResult rendezvous(std::string_view text, const RendezvousOptions& options) {
  const Deadline deadline = within(options.timeout.value_or(default_timeout()));
  const Url url = parse_url(text);
  const bool rank_is_given = options.rank || url.query.contains("rank");
  const bool size_is_given = options.world_size || url.query.contains("world_size");
  // What is given wins: then it does not matter what launchers say, not even if they disagree.
  const bool asks_launchers = url.scheme == "env" || !rank_is_given || !size_is_given;
  const LauncherVariables found = asks_launchers ? find_launcher_variables() : LauncherVariables{};

  RendezvousResult result;
  if (url.scheme == "env" && !rank_is_given && !size_is_given && nobody_launched(found)) {
    log_info(
        "[rendezvous] no launcher's variables are set: this process is a world of one. Start several ranks with "
        "chorale run -n 2 PROGRAM");
    result.store = std::make_shared<MemoryStore>();
    result.address = "127.0.0.1";
    return result;
  }
  result.rank = required("rank", "RANK", options.rank, url, found.rank);
  result.world_size = required("world_size", "WORLD_SIZE", options.world_size, url, found.world_size);
  CHORALE_CHECK(result.world_size >= 1 && result.rank >= 0 && result.rank < result.world_size, "[rendezvous] rank ",
                result.rank, " of ", result.world_size, ": a rank counts from 0 to world_size - 1");
  result.secret = options.secret ? options.secret : Secret::from_environment();

  const std::string host = host_identity();
  Place place;
  Meeting meeting;
  // A store that goes before all have met was that of an earlier meeting: there will be another in its place.
  while (meeting.token.empty()) {
    try {
      place = place_of(url, found, result, deadline);
      meeting =
          meet(*place.store, {"rendezvous", place.where, result.rank, result.world_size, place.run}, host, deadline);
    } catch (const StoreLost&) {
      if (deadline.passed()) throw;
      std::this_thread::sleep_for(5ms);
    }
  }
  result.store = store_of(place, meeting);
  if (!rank_is_given && found.local_rank && found.local_size) {
    result.local_rank = *found.local_rank;
    result.local_size = *found.local_size;
    CHORALE_CHECK(
        result.local_rank >= 0 && result.local_rank < result.local_size && result.local_size <= result.world_size,
        "[rendezvous] local rank ", result.local_rank, " of ", result.local_size, " in a world of ", result.world_size,
        " cannot be");
  } else {
    const auto& hosts = meeting.told;
    result.local_rank = static_cast<int>(std::count(hosts.begin(), hosts.begin() + result.rank, host));
    result.local_size = static_cast<int>(std::count(hosts.begin(), hosts.end(), host));
  }
  result.address = result.local_size == result.world_size ? "127.0.0.1" : own_address(place.store_host);
  return result;
}

}  // namespace chorale::transport
