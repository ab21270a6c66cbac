#include "chorale/comm/group_making.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ios>
#include <iostream>
#include <numeric>
#include <random>

#include "chorale/base/comm_error.h"
#include "chorale/base/config.h"
#include "chorale/base/env_number.h"
#include "chorale/base/error.h"
#include "chorale/base/forks.h"
#include "chorale/comm/call_builder.h"
#include "chorale/comm/core_watch.h"
#include "chorale/comm/flight_file.h"
#include "chorale/comm/group.h"
#include "chorale/comm/leaving.h"
#include "chorale/comm/mpi/mpi_engine.h"
#include "chorale/comm/net/net_engine.h"
#include "chorale/comm/shm/shm_engine.h"
#include "chorale/trace/trace.h"
#include "chorale/transport/fabric/fabric.h"
#include "chorale/transport/fabric/fabric_name.h"
#include "chorale/transport/store/epochs.h"
#include "chorale/transport/store/meeting.h"
#include "chorale/transport/store/rendezvous.h"

namespace chorale::comm {
namespace {

using namespace std::chrono_literals;

constexpr uint64_t kMagic = 0x43484f52414c4531;

std::shared_ptr<transport::Chaos> chaos_of(const GroupOptions& options, int rank, int size) {
  const auto text = options.chaos ? options.chaos : config::env("CHORALE_CHAOS");
  if (!text) return nullptr;
  const transport::ChaosPlan plan = transport::chaos_plan(*text, size);
  // What a seed means is worth knowing; a launcher hands on the whole plan and has said it.
  if (rank == 0 && transport::text_of(plan) != *text && !options.chaos)
    std::cerr << concat("[chaos] faults on purpose: ", transport::text_of(plan), "\n") << std::flush;
  return transport::Chaos::of_rank(plan, rank);
}

// What a rank tells the others when a group is made: its identity, the segment if it is the one that makes it for its
// host, and a random number: the segment's token, and that by which the group is known if it is the first of all.
struct Introduction {
  ShmIdentity identity;
  shm::SharedFile segment;
  uint64_t id = 0;
};
static_assert(std::is_trivially_copyable_v<Introduction>);

std::shared_ptr<shm::Segment> make_segment(int size, uint64_t token) {
  auto segment = shm::Segment::create(shm::GroupSegment::bytes_for(size));
  auto& header = shm::GroupSegment(segment, size).header();
  header.magic = kMagic;
  header.size = static_cast<uint32_t>(size);
  header.token = token;
  return segment;
}

// Takes this rank's place in the segment. Throws CommError when another process has it.
void claim_place(const shm::GroupSegment& segment, const Membership& membership) {
  shm::RankControl& own = segment.control(membership.rank);
  const shm::ProcessId& process = shm::this_process();
  int64_t holder = 0;
  if (!own.pid.compare_exchange_strong(holder, process.pid))
    throw CommError(concat("[new_group] process ", holder, " is ", who_is_this(membership), " already"),
                    {membership.own_global(), membership.own_global(), "new_group", -1});
  own.start_time.store(process.start_time);
}
// When all have come.
void check_places(const ShmGroup& group, const std::vector<ShmIdentity>& identities) {
  for (int peer = 0; peer < group.size; ++peer) {
    const shm::RankControl& control = group.segment.control(peer);
    const shm::ProcessId found{control.pid.load(), control.start_time.load()};
    const shm::ProcessId& expected = identities[static_cast<size_t>(peer)].process;
    if (found == expected) continue;
    const std::string text =
        concat("process ", found.pid, " attached as rank ", group.global(peer), ", which is process ", expected.pid);
    group.segment.record_failure({group.rank, group.global(peer), text});
    throw CommError(concat("[new_group] ", who_is_this(group.membership), ": ", text),
                    {group.global(group.rank), group.global(peer), "new_group", -1});
  }
}

// The group is there when all have attached: no rank can leave it before the last one has come. `epoch`: of a job whose
// ranks may change, where a rank that lives may have turned to the next one; null for others.
void wait_for_everybody(const ShmGroup& group, Deadline deadline, const transport::EpochStore* epoch) {
  const shm::GroupSegment& segment = group.segment;
  // A rank that gives up tells the others, or they would take its leaving for the reason.
  const auto give_up = [&](const std::string& text, int culprit) {
    segment.record_failure({group.rank, culprit, text});
    const auto first = segment.recorded_failure();
    throw CommError(concat("[new_group] ", who_is_this(group.membership), ": ", first.text),
                    {group.global(group.rank), first.culprit, "new_group", -1});
  };
  auto& attached = segment.header().attached;
  attached.fetch_add(1);
  const auto all_are_here = [&] { return attached.load() >= static_cast<uint32_t>(group.size); };
  constexpr int64_t kAttachYields = 200;
  auto next_look = Deadline::Clock::now() + 5ms;
  for (int64_t rounds = 0; !all_are_here(); ++rounds) {
    const auto before = Deadline::Clock::now();
    if (rounds < kAttachYields) {
      sched_yield();
      // On a busy machine a single yield may take long.
      if (Deadline::Clock::now() - before > CoreWatch::kGap) rounds = kAttachYields;
    } else {
      usleep(rounds < 2000 ? 100 : 2000);
    }
    if (Deadline::Clock::now() < next_look) continue;
    next_look = Deadline::Clock::now() + 5ms;
    for (int peer = 0; peer < group.size; ++peer) {
      if (!group.is_dead(peer)) continue;
      // Everybody may have come meanwhile, and one have gone on to its end: the next call will say so.
      if (all_are_here()) return;
      give_up(concat("rank ", group.global(peer), " ended while the group was made"), group.global(peer));
    }
    if (segment.failed() && !all_are_here()) give_up("", -1);
    if (epoch && epoch->is_over() && !all_are_here()) give_up("the ranks have changed while the group was made", -1);
    if (!deadline.passed()) continue;
    std::vector<int> missing;
    for (int peer = 0; peer < group.size; ++peer) {
      if (segment.control(peer).state.load() == shm::RankState::kAbsent) missing.push_back(group.global(peer));
    }
    std::string who;
    for (int peer : missing) who += concat(who.empty() ? "" : ", ", peer);
    give_up(concat("only ", attached.load(), " of ", group.size, " ranks came; missing: rank ", who),
            missing.empty() ? -1 : missing.front());
  }
}

uint64_t new_id() {
  std::random_device random;
  return uint64_t{random()} << 32 | random();
}

// `maker` made the segment.
std::shared_ptr<ShmEngine> join_host(std::shared_ptr<RankContext> context, const Membership& membership,
                                     const Introduction& maker, const std::vector<ShmIdentity>& identities,
                                     Deadline deadline, bool inner, const transport::EpochStore* epoch) {
  const int size = membership.size();
  std::shared_ptr<ShmEngine> engine;
  try {
    shm::GroupSegment segment(shm::Segment::attach(maker.segment, shm::GroupSegment::bytes_for(size)), size);
    const shm::GroupHeader& header = segment.header();
    if (header.magic != kMagic || header.size != static_cast<uint32_t>(size) || header.token != maker.id)
      throw CommError(concat("[new_group] the segment of group ", membership.name, " is not one of ours"));
    claim_place(segment, membership);
    engine = std::make_shared<ShmEngine>(std::move(context), membership, segment, identities, inner);
  } catch (const CommError& error) {
    if (error.failure().peer >= 0) throw;
    // The process of a peer is not there any more: say whose. The first member made the segment.
    size_t gone = 0;
    while (gone + 1 < identities.size() && shm::is_running(identities[gone].process)) ++gone;
    const int culprit = membership.members[gone];
    throw CommError(concat("[new_group] rank ", culprit, ": ", error.what()),
                    {membership.own_global(), culprit, "new_group", -1});
  }
  wait_for_everybody(engine->group(), deadline, epoch);
  check_places(engine->group(), identities);
  return engine;
}

std::vector<uint64_t> hosts_of(const std::vector<ShmIdentity>& identities) {
  std::vector<uint64_t> hosts;
  hosts.reserve(identities.size());
  for (const ShmIdentity& identity : identities) hosts.push_back(identity.host);
  return hosts;
}
std::vector<ShmIdentity> neighbours_of(const std::vector<ShmIdentity>& identities, const NetLayout& layout) {
  std::vector<ShmIdentity> neighbours;
  for (int rank : layout.neighbours()) neighbours.push_back(identities[static_cast<size_t>(rank)]);
  return neighbours;
}

// What this process has made is not its forked child's to end.
std::shared_ptr<GroupState> owned_here(std::shared_ptr<GroupState> state) {
  state->engine = base::kept_by_children(std::move(state->engine));
  return base::kept_by_children(std::move(state));
}

// `maker` made the segment of the members on this host, `id` is the first member's number.
std::shared_ptr<GroupState> join(std::shared_ptr<RankContext> context, const Membership& membership,
                                 const Introduction& maker, uint64_t id, const std::vector<ShmIdentity>& identities,
                                 std::chrono::milliseconds timeout, Deadline deadline,
                                 const transport::EpochStore* epoch = nullptr) {
  auto state = std::make_shared<GroupState>();
  state->context = context;
  state->timeout = timeout;
  state->identities = identities;
  NetLayout layout(hosts_of(identities), membership.rank);
  if (layout.host_count() == 1) {
    state->engine = join_host(std::move(context), membership, maker, identities, deadline, false, epoch);
    return owned_here(std::move(state));
  }
  const std::vector<ShmIdentity> neighbours = neighbours_of(identities, layout);
  Membership here{concat(membership.name, " on this host"), layout.index, {}};
  for (int rank : layout.neighbours()) here.members.push_back(membership.global(rank));
  auto inner = context->inner();
  // The fabric's thread works while a rank waits for its neighbours: each needs two cores to spin without harm.
  std::vector<ShmIdentity> threads = neighbours;
  threads.insert(threads.end(), neighbours.begin(), neighbours.end());
  inner->core_each = has_core_each(threads);
  auto local = join_host(std::move(inner), here, maker, neighbours, deadline, true, epoch);
  // All members are looked at: what counts as another host may be this process too, as in tests.
  state->engine = std::make_shared<NetEngine>(std::move(context), membership, std::move(layout), id, std::move(local),
                                              share_this_process(identities));
  return owned_here(std::move(state));
}

// A group of an engine that needs nothing else.
std::shared_ptr<GroupState> state_of(std::shared_ptr<Engine> engine, std::chrono::milliseconds timeout) {
  auto state = std::make_shared<GroupState>();
  state->context = engine->shared_context();
  state->timeout = timeout;
  state->identities.resize(static_cast<size_t>(engine->membership().size()));
  state->engine = std::move(engine);
  return owned_here(std::move(state));
}

// The value of a key, one per rank. The name is of a meeting that is complete.
std::vector<std::string> exchange(transport::Store& store, const std::string& name, int rank, int size,
                                  std::string_view own, Deadline deadline) {
  store.set(concat(name, "/", rank), std::string(own), deadline);
  std::vector<std::string> all;
  all.reserve(static_cast<size_t>(size));
  for (int r = 0; r < size; ++r) all.push_back(store.get(concat(name, "/", r), deadline));
  return all;
}

template <class T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof(value)};
}

// Reads what begins a text; what follows is `rest`.
Introduction read_introduction(const std::string& text, int from, int rank, std::string* rest = nullptr) {
  Introduction introduction;
  if (text.size() < sizeof(introduction) || (!rest && text.size() > sizeof(introduction)))
    throw CommError(concat("[group] rank ", from, " introduces itself with ", text.size(), " bytes where ",
                           sizeof(Introduction), " are expected: does it run another version?"),
                    {rank, from, "new_group", -1});
  std::memcpy(static_cast<void*>(&introduction), text.data(), sizeof(introduction));
  if (rest) *rest = text.substr(sizeof(introduction));
  return introduction;
}

// Connects ranks of several hosts: tells the others where this one can be reached, and which segment it made for its
// host. Fills in `context.net`, the number of the group, and what the maker of the host's segment told. Returns the
// segment if this rank made it: it must be kept until the neighbours have attached.
std::shared_ptr<shm::Segment> connect_hosts(transport::Store& store, const std::string& name,
                                            const std::vector<ShmIdentity>& identities, int rank,
                                            const transport::FabricName& kind, const NetOptions& options,
                                            Deadline deadline, RankContext& context, Introduction own,
                                            Introduction& maker, uint64_t& id, const transport::EpochStore* epoch) {
  const int size = static_cast<int>(identities.size());
  const NetLayout layout(hosts_of(identities), rank);
  std::shared_ptr<shm::Segment> segment;
  if (layout.is_leader()) {
    segment = make_segment(layout.local_size(), own.id);
    own.segment = segment->file();
  }
  transport::FabricOptions fabric;
  fabric.rank = rank;
  fabric.checksum = context.checksum;
  fabric.chaos = context.chaos;
  if (epoch) fabric.is_over = [epoch] { return epoch->is_over(); };
  const auto builder = make_fabric_builder(kind, options, std::move(fabric));
  const transport::FabricAddress address = builder->address();
  const std::string text = concat(bytes_of(own), address.endpoint, "\n", address.data);
  const std::vector<std::string> all = exchange(store, name, rank, size, text, deadline);
  std::vector<transport::FabricAddress> addresses;
  for (int r = 0; r < size; ++r) {
    std::string reach;
    const Introduction peer = read_introduction(all[static_cast<size_t>(r)], r, rank, &reach);
    if (r == 0) id = peer.id;
    if (r == layout.neighbours()[0]) maker = peer;
    const size_t end = std::min(reach.find('\n'), reach.size());
    addresses.push_back({identities[static_cast<size_t>(r)].host, reach.substr(0, end),
                         end < reach.size() ? reach.substr(end + 1) : std::string()});
  }
  context.net = std::make_shared<NetHub>(builder->connect(addresses, deadline));
  return segment;
}

}  // namespace

std::vector<int> checked_ranks(const Membership& parent, std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  CHORALE_CHECK(!ranks.empty(), "[new_group] a group needs at least one rank");
  for (size_t r = 0; r < ranks.size(); ++r) {
    CHORALE_CHECK(std::binary_search(parent.members.begin(), parent.members.end(), ranks[r]), "[new_group] rank ",
                  ranks[r], " is not in group ", parent.name, " of ", parent.size(), " ranks");
    CHORALE_CHECK(r == 0 || ranks[r] != ranks[r - 1], "[new_group] rank ", ranks[r], " is listed twice");
  }
  return ranks;
}

std::vector<std::vector<int>> checked_lists(const Membership& parent, const std::vector<std::vector<int>>& lists) {
  std::vector<std::vector<int>> sorted;
  for (size_t i = 0; i < lists.size(); ++i) {
    sorted.push_back(checked_ranks(parent, lists[i]));
    for (size_t earlier = 0; earlier < i; ++earlier) {
      for (int rank : sorted[i])
        CHORALE_CHECK(!std::binary_search(sorted[earlier].begin(), sorted[earlier].end(), rank),
                      "[new_subgroups] rank ", rank, " is in two lists, number ", earlier, " and number ", i,
                      "; a rank can be in one of them only");
    }
  }
  CHORALE_CHECK(!sorted.empty(), "[new_subgroups] there is no list of ranks");
  return sorted;
}

std::shared_ptr<GroupState> connect_group(transport::Store& store, const std::string& name, int rank, int size,
                                          const GroupOptions& options) {
  CHORALE_CHECK(size >= 1 && size <= shm::kMostRanks, "[group] a group has 1 to ", shm::kMostRanks, " ranks, not ",
                size);
  CHORALE_CHECK(rank >= 0 && rank < size, "[group] rank ", rank, " is outside 0 to ", size - 1);
  CHORALE_CHECK(options.members.empty() || (options.members.size() == static_cast<size_t>(size) &&
                                            std::is_sorted(options.members.begin(), options.members.end())),
                "[group] members must be ", size, " ascending ranks, or none");
  const auto timeout = options.timeout.value_or(transport::default_timeout());
  const Deadline deadline = within(timeout);
  const transport::FabricName fabric = transport::choose_fabric(options.fabric);
  (void)leave_patience();  // what is wrong with it is said now, not when the work is done
  auto context = std::make_shared<RankContext>();
  context->checksum = options.checksum ? *options.checksum : config::is_on("CHORALE_CHECKSUM", false);
  context->chaos = chaos_of(options, rank, size);
  if (fabric.kind == "mpi") {
    CHORALE_CHECK(!context->checksum && !context->chaos,
                  "[group] MPI moves its own bytes: there are no checksums and no faults on purpose over it");
    return state_of(MpiEngine::connect(name, rank, size, deadline), timeout);
  }
  Introduction own{own_identity(*context), {}, new_id()};
  if (options.net.host) own.identity.host = *options.net.host;
  std::shared_ptr<shm::Segment> segment;
  if (rank == 0) {
    segment = make_segment(size, own.id);
    own.segment = segment->file();
  }
  const transport::MeetingPlan plan{concat("group/", name), concat("the store, for group ", name), rank, size};
  const transport::Meeting meeting = transport::meet(store, plan, bytes_of(own), deadline);
  Introduction maker;
  std::vector<ShmIdentity> identities;
  for (const std::string& text : meeting.told) {
    const Introduction peer = read_introduction(text, static_cast<int>(identities.size()), rank);
    if (identities.empty()) maker = peer;
    identities.push_back(peer.identity);
  }
  uint64_t id = maker.id;
  if (size > 1) name_job(concat(std::hex, id));
  const NetLayout layout(hosts_of(identities), rank);
  const auto* epoch = dynamic_cast<const transport::EpochStore*>(&store);
  context->core_each = has_core_each(neighbours_of(identities, layout));
  if (layout.host_count() > 1) {
    segment = connect_hosts(store, transport::meeting_key(plan, meeting, "net"), identities, rank, fabric, options.net,
                            deadline, *context, own, maker, id, epoch);
  }
  Membership membership{name, rank, std::vector<int>(static_cast<size_t>(size))};
  std::iota(membership.members.begin(), membership.members.end(), 0);
  if (!options.members.empty() && layout.host_count() == 1) membership.members = options.members;
  context->groups_made = 1;
  trace::set_rank(membership.own_global());
  return join(std::move(context), membership, maker, id, identities, timeout, deadline, epoch);
}

// All groups of the lists in one exchange: the first member of each makes its segment and tells where it is.
MadeGroups make_groups(const std::shared_ptr<GroupState>& state, const std::vector<std::vector<int>>& lists,
                       const GroupOptions& options) {
  const Membership& parent = state->membership();
  const int own_global = parent.own_global();
  MadeGroups result;
  std::vector<std::string> names;
  CallBuilder call(state, CallKind::kNewGroup, {});
  for (size_t i = 0; i < lists.size(); ++i) {
    for (int member : lists[i]) {
      call.add_detail(static_cast<uint64_t>(member));
      if (member == own_global) result.own = static_cast<int>(i);
    }
    call.add_detail(~uint64_t{0});
  }
  Introduction own{state->identities[static_cast<size_t>(parent.rank)], {}, new_id()};
  const auto identity_of = [&](int global_rank) {
    return state->identities[static_cast<size_t>(state->group_rank("new_group", global_rank))];
  };
  // The members of this rank's new group that are on its host; the first one makes their segment.
  std::vector<int> neighbours;
  if (result.own >= 0) {
    for (int member : lists[static_cast<size_t>(result.own)]) {
      if (identity_of(member).host == own.identity.host) neighbours.push_back(member);
    }
  }
  std::shared_ptr<shm::Segment> segment;
  if (!neighbours.empty() && neighbours.front() == own_global) {
    segment = make_segment(static_cast<int>(neighbours.size()), own.id);
    own.segment = segment->file();
  }
  std::vector<Introduction> all(static_cast<size_t>(parent.size()));
  call.give({reinterpret_cast<std::byte*>(&own), sizeof(own)});
  for (Introduction& one : all) call.take({reinterpret_cast<std::byte*>(&one), sizeof(one)});
  call.launch().wait();
  {
    const std::lock_guard lock(state->context->mutex);
    for (size_t i = 0; i < lists.size(); ++i) names.push_back(std::to_string(state->context->groups_made++));
  }
  if (result.own < 0) return result;
  const auto& list = lists[static_cast<size_t>(result.own)];
  Membership membership{names[static_cast<size_t>(result.own)], 0, list};
  std::vector<ShmIdentity> identities;
  const auto told_by = [&](int member) -> const Introduction& {
    return all[static_cast<size_t>(state->group_rank("new_group", member))];
  };
  for (size_t r = 0; r < list.size(); ++r) {
    if (list[r] == own_global) membership.rank = static_cast<int>(r);
    identities.push_back(told_by(list[r]).identity);
  }
  if (auto engine = state->engine->make_subgroup(membership)) {
    result.state = state_of(std::move(engine), options.timeout.value_or(state->timeout));
    return result;
  }
  result.state = join(state->context, membership, told_by(neighbours.front()), told_by(list.front()).id, identities,
                      options.timeout.value_or(state->timeout), within(state->timeout));
  return result;
}

// ---- Group's functions that make groups

Group Group::connect(transport::Store& store, const std::string& name, int rank, int size,
                     const GroupOptions& options) {
  return Group(connect_group(store, name, rank, size, options));
}

Group Group::new_group(std::vector<int> ranks, const GroupOptions& options) const {
  if (!is_member()) return {};
  return Group(make_groups(state_, {checked_ranks(state_->membership(), std::move(ranks))}, options).state);
}

Group::Subgroups Group::subgroups(const std::vector<std::vector<int>>& lists, const GroupOptions& options) const {
  MadeGroups made = make_groups(state_, lists, options);
  Subgroups result;
  result.groups.resize(lists.size());
  result.own = made.own;
  if (made.own >= 0) result.groups[static_cast<size_t>(made.own)] = Group(std::move(made.state));
  return result;
}

Group::Subgroups Group::new_subgroups(int group_size, const GroupOptions& options) const {
  if (!is_member()) return {};
  const auto& members = state_->membership().members;
  const int size = state_->size();
  CHORALE_CHECK(group_size >= 1 && group_size <= size, "[new_subgroups] groups of ", group_size,
                " ranks asked for, but the world size is ", size);
  CHORALE_CHECK(size % group_size == 0, "[new_subgroups] the world size ", size, " is not divisible by the group size ",
                group_size);
  std::vector<std::vector<int>> lists;
  for (int begin = 0; begin < size; begin += group_size)
    lists.emplace_back(members.begin() + begin, members.begin() + begin + group_size);
  return subgroups(lists, options);
}

Group::Subgroups Group::new_subgroups(const std::vector<std::vector<int>>& lists, const GroupOptions& options) const {
  if (!is_member()) return {};
  return subgroups(checked_lists(state_->membership(), lists), options);
}

Group Group::split(int64_t color, const GroupOptions& options) const {
  if (!is_member()) return {};
  std::vector<int64_t> colors(static_cast<size_t>(state_->size()));
  const std::vector<int64_t> own{color};
  all_gather_into(std::span(colors), std::span(own)).wait();
  std::vector<int64_t> distinct = colors;
  std::sort(distinct.begin(), distinct.end());
  distinct.erase(std::unique(distinct.begin(), distinct.end()), distinct.end());
  std::vector<std::vector<int>> lists(distinct.size());
  for (size_t r = 0; r < colors.size(); ++r) {
    const auto at = std::lower_bound(distinct.begin(), distinct.end(), colors[r]) - distinct.begin();
    lists[static_cast<size_t>(at)].push_back(state_->membership().members[r]);
  }
  return Group(make_groups(state_, lists, options).state);
}

Group Group::duplicate(const GroupOptions& options) const {
  return is_member() ? new_group(state_->membership().members, options) : Group();
}

}  // namespace chorale::comm
